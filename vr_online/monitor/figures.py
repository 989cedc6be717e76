"""Pictures of the adaptation and of a run, from arrays; no files and no global plotting state."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from vr_online.monitor.history import BinHistory, axis
from vr_online.monitor.names import BINS

T_LABEL = "t  (0 noise, 1 data)"
PANEL = (5.2, 3.4)  # inches of one panel


def panels(rows: int, columns: int, title: str) -> tuple[Figure, np.ndarray]:
    """A figure with rows x columns axes, shape (rows, columns)."""
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows + 0.5), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.grid(True, alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def rasterize(figure: Figure) -> np.ndarray:
    """The figure as (H, W, 3) uint8."""
    if not isinstance(figure.canvas, FigureCanvasAgg):
        FigureCanvasAgg(figure)
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()


def centres(bins: int) -> np.ndarray:
    """Midpoints of the bins, (K,)."""
    return (np.arange(bins) + 0.5) / bins


def steps_plot(ax: Axes, values: np.ndarray, **style: Any) -> None:
    """A piecewise constant function of t."""
    ax.stairs(values, np.linspace(0, 1, len(values) + 1), baseline=None, **style)


def fit_y(ax: Axes, *arrays: np.ndarray) -> None:
    """Log axis for positive values that span more than a factor of 30, otherwise a linear one from zero."""
    values = np.concatenate([np.ravel(a) for a in arrays]) if arrays else np.empty(0)
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0 and values.max() > 30 * values.min():
        ax.set_yscale("log")
    elif len(values) and values.min() >= 0:
        ax.set_ylim(bottom=0)


def moments_plot(ax: Axes, history: BinHistory, quantity: str, wanted: str, count: int = 5) -> None:
    """A quantity over t at a few moments of training, dark early and bright late."""
    values = history.values[quantity]
    x, label = axis(history.x, wanted)
    some = np.unique(np.linspace(0, len(values) - 1, count).round().astype(int))
    for rank, i in enumerate(some):
        colour = colormaps["viridis"](0.9 * rank / max(1, len(some) - 1))
        steps_plot(ax, values[i], color=colour, linewidth=1.6, label=f"{EngFormatter(sep='')(x[i])} {label}")
    fit_y(ax, values[some])
    ax.set(xlabel=T_LABEL, xlim=(0, 1))
    ax.legend(fontsize=8, edgecolor="none", framealpha=0.75)


def heat_plot(
    ax: Axes, history: BinHistory, values: np.ndarray, wanted: str, label: str, centre: Optional[float] = None
) -> None:
    """Values (T, K) over training (across) and t (up); diverging colours around `centre` if given."""
    x, x_label = axis(history.x, wanted)
    edges = np.concatenate([[x[0] - (x[1] - x[0] if len(x) > 1 else max(x[0], 1.0))], x])
    edges = np.maximum.accumulate(np.maximum(edges, 0.0))
    settled = values[len(values) // 8 :]  # the colours are for what comes after the first transient
    finite = settled[np.isfinite(settled)]
    limits: dict[str, Any] = {"cmap": "viridis"}
    if centre is not None and len(finite):
        reach = max(float(np.abs(finite - centre).max()), 1e-3)
        limits = {"cmap": "RdBu_r", "vmin": centre - reach, "vmax": centre + reach}
    elif len(finite):
        low, high = np.percentile(finite, [1, 99])
        limits.update(vmin=low, vmax=high if high > low else low + 1)
    mesh = ax.pcolormesh(edges, np.linspace(0, 1, values.shape[1] + 1), values.T, rasterized=True, **limits)
    ax.set(xlabel=x_label, ylabel=T_LABEL)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.grid(False)
    ax.figure.colorbar(mesh, ax=ax, label=label)


def variance_figure(history: BinHistory, wanted: str = "images", title: str = "gradient and loss over t") -> Optional[Figure]:
    """Per-bin variance, second moment and loss: a few moments of training, and a heat map over all of it."""
    rows = [
        (key, label)
        for key, label in (
            ("grad_var", "gradient variance"),
            ("grad_sq", "gradient second moment"),
            ("loss", "loss"),
        )
        if key in history.values
    ]
    if not rows:
        return None
    figure, axes = panels(len(rows), 2, title)
    for (key, label), (curves, heat) in zip(rows, axes):
        moments_plot(curves, history, key, wanted)
        curves.set_ylabel(label)
        shown, name = history.values[key], label
        positive = np.where(shown > 0, shown, np.nan)
        if np.isfinite(positive).any() and np.nanmax(positive) > 30 * np.nanmin(positive):
            shown, name = np.log10(positive), f"log10 {label}"
        heat_plot(heat, history, shown, wanted, name)
    return figure


def proposal_figure(history: BinHistory, wanted: str = "images", title: str = "where t is drawn") -> Optional[Figure]:
    """Proposal and target now, the proposal at a few moments, weights, and log2 p/q over training."""
    if "p" not in history.values or "q" not in history.values:
        return None
    figure, axes = panels(2, 2, title)
    p, q = densities(history)
    steps_plot(axes[0, 0], p[-1], label="proposal p (drawn)", linewidth=2, color="tab:blue")
    steps_plot(axes[0, 0], q[-1], label="target q (objective)", linewidth=2, color="tab:orange", linestyle="--")
    axes[0, 0].set(xlabel=T_LABEL, ylabel="density", xlim=(0, 1), ylim=(0, None), title="now")
    axes[0, 0].legend(frameon=False)
    moments_plot(axes[0, 1], BinHistory(history.x, {"p": p}), "p", wanted)
    axes[0, 1].set(ylabel="proposal density", title="proposal over training")
    _weight_plot(axes[1, 0], history, p[-1], q[-1])
    with np.errstate(divide="ignore", invalid="ignore"):
        heat_plot(axes[1, 1], history, np.log2(p / q), wanted, "log2 p/q", centre=0.0)
    axes[1, 1].set_title("red: drawn more often than the target asks")
    return figure


def densities(history: BinHistory) -> tuple[np.ndarray, np.ndarray]:
    """Proposal and target densities, each (T, K), from the probabilities of the bins."""
    return history.values["p"] * history.bins, history.values["q"] * history.bins


def _weight_plot(ax: Axes, history: BinHistory, p: np.ndarray, q: np.ndarray) -> None:
    recorded = "weight" in history.values
    weight = history.values["weight"][-1] if recorded else np.divide(q, p, out=np.full(len(p), np.nan), where=p > 0)
    steps_plot(ax, weight, color="tab:green", linewidth=2)
    ax.axhline(1, color="grey", linewidth=1, linestyle=":")
    label = "weight" if recorded else "q / p"
    ax.set(xlabel=T_LABEL, ylabel=label, xlim=(0, 1), ylim=(0, None), title="importance weight now")


def visits_figure(history: BinHistory, title: str = "what the estimates rest on, now") -> Optional[Figure]:
    """Visits, effective samples and age of each bin, as far as recorded."""
    shown = [quantity for quantity in ("visits", "n_eff", "age") if quantity in history.values]
    if not shown:
        return None
    figure, axes = panels(1, len(shown), title)
    for quantity, ax in zip(shown, axes.flat):
        steps_plot(ax, history.values[quantity][-1], linewidth=1.8)
        fit_y(ax, history.values[quantity][-1])
        ax.set(xlabel=T_LABEL, ylabel=BINS[quantity].unit, xlim=(0, 1), title=BINS[quantity].meaning)
    return figure


def tensorboard_figures(records: Sequence[dict[str, Any]]) -> dict[str, Figure]:
    """The pictures that `Monitor` shows while a run goes, by tag."""
    history = BinHistory.of(records)
    made = {
        "figures/variance": variance_figure(history),
        "figures/proposal": proposal_figure(history),
        "figures/visits": visits_figure(history),
    }
    return {tag: figure for tag, figure in made.items() if figure is not None}
