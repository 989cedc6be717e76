"""The PNG figures of one run or of several side by side."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from vr_online.monitor import names
from vr_online.monitor.fid_figure import fid_figure
from vr_online.monitor.figures import (
    T_LABEL,
    fit_y,
    heat_plot,
    panels,
    proposal_figure,
    steps_plot,
    variance_figure,
)
from vr_online.monitor.history import axis
from vr_online.monitor.runs import Run

_TITLES = {
    "train/loss": "loss",
    "train/grad_norm": "gradient norm before clipping",
    "train/lr": "learning rate",
    "train/skipped_steps": "skipped steps so far",
    "speed/images_per_s": "images per second",
    "speed/step_s": "seconds a step",
    "speed/wait_share": "share of time waiting for data",
    "speed/mfu": "model FLOPs utilisation",
    "memory/device_peak_gib": "peak device memory (GiB)",
    "memory/device_reserved_gib": "peak reserved device memory (GiB)",
    "memory/host_peak_gib": "peak host memory (GiB)",
    "sampler/ess": "effective sample size (share of the batch)",
    "sampler/weight_max": "largest weight",
}


def colour(index: int) -> Any:
    """One colour per run."""
    return colormaps["tab10"](index % 10)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving mean over the values that are numbers, shorter at the ends; (T,) -> (T,)."""
    finite = np.isfinite(values)
    kernel = np.ones(min(window, len(values)))
    total = np.convolve(np.where(finite, values, 0.0), kernel, mode="same")
    count = np.convolve(finite.astype(float), kernel, mode="same")
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def scalar_plot(ax: Axes, runs: Sequence[Run], name: str, wanted: str, smoothed: bool = False) -> None:
    """One metric over training, a line per run that has it."""
    drawn = []
    for i, run in enumerate(runs):
        values = run.scalars.values.get(name)
        if values is None or not np.isfinite(values).any():
            continue
        x, label = axis(run.scalars.x, wanted)
        kept = np.isfinite(values)
        x, values = x[kept], values[kept]
        if smoothed and len(values) >= 20:
            ax.plot(x, values, color=colour(i), alpha=0.25, linewidth=0.8)
            values = smooth(values, max(3, len(values) // 40))
        ax.plot(x, values, color=colour(i), label=run.name, linewidth=1.6, marker="." if len(values) < 20 else None)
        drawn.append(values)
        ax.set_xlabel(label)
    if not drawn:
        _nothing(ax, name)
        return
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if name == "train/loss":
        ax.set_ylim(_inner_limits(drawn))
    else:
        top = max(float(values.max()) for values in drawn)
        ax.set_ylim(0, 1.06 * top if top > 0 else 1)
    ax.set_xlim(0, None)
    ax.set_title(_TITLES.get(name, name), fontsize=10)


def _inner_limits(curves: Sequence[np.ndarray]) -> tuple[float, float]:
    """Limits that leave out the steep start of a loss and rare spikes, so that late differences show."""
    values = np.concatenate([c for c in curves])
    late = np.concatenate([c[len(c) // 20 :] for c in curves])
    low, high = np.min(values), np.percentile(late, 99.5)
    margin = 0.08 * max(high - low, 1e-6 * max(abs(high), 1.0))
    return low - margin, high + margin


def _nothing(ax: Axes, what: str) -> None:
    ax.text(0.5, 0.5, f"{what}\nnot recorded", ha="center", va="center", transform=ax.transAxes, color="grey")
    ax.set(xticks=[], yticks=[])


def _legend(figure: Figure, axes: Sequence[Axes], runs: Sequence[Run]) -> None:
    """One legend below the panels, where there is more than one run."""
    if len(runs) < 2:
        return
    found: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            found.setdefault(label, handle)
    shown = [run.name for run in runs if run.name in found]
    figure.legend([found[n] for n in shown], shown, loc="outside lower center", ncols=min(4, len(shown)), frameon=False)


def loss_figure(runs: Sequence[Run], wanted: str) -> Optional[Figure]:
    """Loss, gradient norm, learning rate and skipped steps."""
    metrics = ("train/loss", "train/grad_norm", "train/lr", "train/skipped_steps")
    return _scalar_figure(runs, wanted, metrics, "training", 2)


def speed_figure(runs: Sequence[Run], wanted: str) -> Optional[Figure]:
    """Throughput, step time, waiting, MFU and memory, as far as recorded."""
    listed = [name for name in names.SCALARS if name.startswith(("speed/", "memory/"))]
    present = tuple(n for n in listed if any(n in run.scalars.values for run in runs))
    return _scalar_figure(runs, wanted, present, "speed and memory", 3)


def _scalar_figure(
    runs: Sequence[Run], wanted: str, metrics: tuple[str, ...], title: str, columns: int
) -> Optional[Figure]:
    if not any(name in run.scalars.values for name in metrics for run in runs):
        return None
    rows = -(-len(metrics) // columns)
    figure, axes = panels(rows, min(columns, len(metrics)), _with_name(title, runs))
    for name, ax in zip(metrics, axes.flat):
        scalar_plot(ax, runs, name, wanted, smoothed=name in ("train/loss", "train/grad_norm", "speed/images_per_s"))
    for ax in axes.flat[len(metrics) :]:
        ax.set_visible(False)
    _legend(figure, axes.flat, runs)
    return figure


def _with_name(title: str, runs: Sequence[Run]) -> str:
    return f"{runs[0].name}: {title}" if len(runs) == 1 else title


def variance_plots(runs: Sequence[Run], wanted: str) -> Optional[Figure]:
    """One run: curves and heat maps over training. Several: their last curves together."""
    if len(runs) == 1:
        return runs[0].bins and variance_figure(runs[0].bins, wanted, f"{runs[0].name}: gradient and loss over t")
    quantities = {"grad_var": "gradient variance", "grad_sq": "gradient second moment", "loss": "loss"}
    return _last_bins(runs, quantities, "gradient and loss over t, at the end")


def proposal_plots(runs: Sequence[Run], wanted: str) -> Optional[Figure]:
    """One run: proposal, target, weights, and their history. Several: their last ones together."""
    if len(runs) == 1:
        return runs[0].bins and proposal_figure(runs[0].bins, wanted, f"{runs[0].name}: where t is drawn")
    quantities = {"p": "proposal density p", "q": "target density q", "weight": "importance weight"}
    return _last_bins(runs, quantities, "where t is drawn, at the end")


def _last_bins(runs: Sequence[Run], quantities: dict[str, str], title: str) -> Optional[Figure]:
    adaptive = [(i, run) for i, run in enumerate(runs) if run.bins]
    shown = [q for q in quantities if any(q in run.bins.values for _, run in adaptive)]
    if not shown:
        return None
    figure, axes = panels(1, len(shown), title)
    for quantity, ax in zip(shown, axes.flat):
        drawn = []
        for i, run in adaptive:
            if quantity in run.bins.values:
                scale = run.bins.bins if quantity in ("p", "q") else 1  # probabilities to densities
                drawn.append(scale * run.bins.values[quantity][-1])
                steps_plot(ax, drawn[-1], color=colour(i), label=run.name, linewidth=1.8)
        fit_y(ax, *drawn)
        ax.set(xlabel=T_LABEL, ylabel=quantities[quantity], xlim=(0, 1))
    _legend(figure, axes.flat, runs)
    return figure


def sampler_figure(runs: Sequence[Run], wanted: str) -> Optional[Figure]:
    """Predicted and achieved gain, weights, visits and age of the bins."""
    if not any(name.startswith("sampler/") for run in runs for name in run.scalars.values):
        return None
    figure, axes = panels(2, 3, _with_name("sampler", runs))
    gain_plot(axes[0, 0], runs, wanted)
    scalar_plot(axes[0, 1], runs, "sampler/ess", wanted)
    axes[0, 1].set_ylim(0, 1.05)
    scalar_plot(axes[0, 2], runs, "sampler/weight_max", wanted)
    last_bins_plot(axes[1, 0], runs, "visits")
    last_bins_plot(axes[1, 1], runs, "n_eff")
    age_plot(axes[1, 2], runs, wanted)
    _legend(figure, axes.flat, runs)
    return figure


def gain_plot(ax: Axes, runs: Sequence[Run], wanted: str) -> None:
    """Predicted gain as a dashed line, the achieved ratio with two standard errors around it."""
    alone, found = len(runs) == 1, False
    for i, run in enumerate(runs):
        values = run.scalars.values
        x, label = axis(run.scalars.x, wanted)
        ax.set_xlabel(label)
        if "sampler/gain" in values:
            name = "predicted gain" if alone else None
            ax.plot(x, values["sampler/gain"], "--", color=colour(i), linewidth=1.8, label=name)
            found = True
        if "sampler/achieved" in values:
            achieved = values["sampler/achieved"]
            error = 2 * values.get("sampler/achieved_error", np.zeros_like(achieved))
            name = "achieved, 2 standard errors" if alone else run.name
            ax.plot(x, achieved, color=colour(i), linewidth=1.2, label=name)
            ax.fill_between(x, achieved - error, achieved + error, color=colour(i), alpha=0.2, linewidth=0)
            found = True
    if not found:
        return _nothing(ax, "gain")
    ax.axhline(1, color="grey", linewidth=1, linestyle=":")
    ax.set_ylim(_gain_limits(runs))
    ax.set_xlim(0, None)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    suffix = "" if alone else "; dashed: predicted"
    ax.set_title("gradient variance, adapted / not (below 1 it pays)" + suffix, fontsize=10)
    if alone:
        ax.legend(fontsize=8, frameon=False)


def _gain_limits(runs: Sequence[Run]) -> tuple[float, float]:
    """Limits around 1 and the later half of every run, error bars included; early estimates may lie far outside."""
    bounds = ("sampler/gain", "sampler/achieved_low", "sampler/achieved_high", "sampler/achieved")
    curves = [run.scalars.values[name] for run in runs for name in bounds if name in run.scalars.values]
    late = np.concatenate([curve[len(curve) // 2 :] for curve in curves] + [np.ones(1)])
    late = late[np.isfinite(late)]
    margin = 0.05 * max(float(np.ptp(late)), 0.05)
    return float(late.min()) - margin, float(late.max()) + margin


def last_bins_plot(ax: Axes, runs: Sequence[Run], quantity: str) -> None:
    """A per-bin quantity as it was last recorded."""
    drawn = []
    for i, run in enumerate(runs):
        if run.bins and quantity in run.bins.values:
            drawn.append(run.bins.values[quantity][-1])
            steps_plot(ax, drawn[-1], color=colour(i), label=run.name, linewidth=1.6)
    if not drawn:
        return _nothing(ax, quantity)
    metric = names.BINS[quantity]
    fit_y(ax, *drawn)
    if max(np.nanmax(d, initial=0) for d in drawn) >= 10_000:
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))
    ax.set(xlabel=T_LABEL, ylabel=metric.unit, xlim=(0, 1))
    ax.set_title(metric.meaning, fontsize=10)


def age_plot(ax: Axes, runs: Sequence[Run], wanted: str) -> None:
    """Age of each bin: over training for one run, at the end for several."""
    history = runs[0].bins
    if len(runs) > 1 or history is None or "age" not in history.values:
        return last_bins_plot(ax, runs, "age")
    heat_plot(ax, history, history.values["age"], wanted, names.BINS["age"].unit)
    ax.set_title(names.BINS["age"].meaning, fontsize=10)


FIGURES: dict[str, Callable[[Sequence[Run], str], Optional[Figure]]] = {
    "loss": loss_figure,
    "speed": speed_figure,
    "variance": variance_plots,
    "proposal": proposal_plots,
    "sampler": sampler_figure,
    "fid": fid_figure,
}
