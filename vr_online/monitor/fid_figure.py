"""Evaluations over training: a panel per metric, a curve per run and protocol."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Optional, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from vr_online.monitor.figures import fit_y, panels
from vr_online.monitor.history import axis
from vr_online.monitor.runs import Run

# What must agree before two values may share a curve, and how a legend calls it.
PROTOCOL = {
    "solver": "{}",
    "solver_steps": "{} steps",
    "cfg": "cfg {}",
    "cfg_interval": "cfg in {}",
    "n": "n {}",
    "weights": "{} weights",
    "labels": "{} labels",
    "rtol": "rtol {}",
    "atol": "atol {}",
    "diffusion": "{} diffusion",
    "last_step": "last step {}",
    "last_step_size": "last step of {}",
    "features.name": "{}",
    "features.hash": "extractor {}",
    "features.preprocessing": "preprocessing {}",
    "reference.hash": "reference {}",
    "time": "{}",
}
_HIGHER_IS_BETTER = ("is", "inception", "precision", "recall", "class_accuracy")
_UNCERTAINTY = ("_se", "_std", "_error")


def quality(result: dict[str, Any]) -> dict[str, float]:
    """The metrics in an evaluation's result, by name."""
    found = dict(result["metrics"]) if isinstance(result.get("metrics"), dict) else {}
    if isinstance(result.get("metric"), str):
        found.setdefault(result["metric"], result.get("value"))
    numbers = {k: v for k, v in found.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    return {k: float(v) for k, v in numbers.items() if not k.endswith(_UNCERTAINTY)}


def protocol(result: dict[str, Any]) -> dict[str, str]:
    """Each field of `PROTOCOL` as text."""
    return {name: json.dumps(_field(result, name), sort_keys=True) for name in PROTOCOL}


def _field(result: dict[str, Any], name: str) -> Any:
    value: Any = result
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _label(run: Run, chosen: dict[str, str], differing: Sequence[str], several: bool) -> str:
    """The run's name, where there are several, and what sets its protocol apart from the others in the figure."""
    parts = [run.name] if several or not differing else []
    for name in differing:
        value = json.loads(chosen[name])
        if value is not None:
            parts.append(PROTOCOL[name].format(_short(name, value)))
    return ", ".join(map(str, parts))


def _short(name: str, value: Any) -> Any:
    """A value that fits a legend: hashes by their first digits, whole dictionaries by a hash."""
    if isinstance(value, dict):
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
    return value[:8] if name.endswith("hash") and isinstance(value, str) else value


def curves(runs: Sequence[Run], metric: str) -> dict[str, list[dict[str, Any]]]:
    """Results that hold the metric, in order of step, by the label of their run and protocol."""
    everything = [protocol(result) for run in runs for result in run.evaluations]
    differing = [name for name in PROTOCOL if len({chosen[name] for chosen in everything}) > 1]
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for result in run.evaluations:
            if metric in quality(result):
                found.setdefault(_label(run, protocol(result), differing, len(runs) > 1), []).append(result)
    return found


def fid_figure(runs: Sequence[Run], wanted: str) -> Optional[Figure]:
    """Every metric of the evaluations over training, a panel each; None without evaluations.

    Values found under different protocols (solver, steps, guidance, n, extractor, reference, ...) are different
    curves, and the legend says in what they differ.
    """
    metrics = list(dict.fromkeys(name for run in runs for result in run.evaluations for name in quality(result)))
    if not metrics:
        return None
    columns = min(3, len(metrics))
    title = "evaluations" if len(runs) > 1 else f"{runs[0].name}: evaluations"
    figure, axes = panels(-(-len(metrics) // columns), columns, title)
    labels = list(dict.fromkeys(label for metric in metrics for label in curves(runs, metric)))
    for metric, ax in zip(metrics, axes.flat):
        _metric_plot(ax, curves(runs, metric), metric, labels, wanted)
    for ax in axes.flat[len(metrics) :]:
        ax.set_visible(False)
    if len(labels) > 1:
        lines = {line.get_label(): line for ax in axes.flat for line in ax.get_lines()}
        columns = 1 if max(map(len, labels)) > 40 else min(4, len(labels))
        figure.legend([lines[n] for n in labels], labels, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _metric_plot(ax: Axes, found: dict[str, list[dict[str, Any]]], metric: str, labels: list[str], wanted: str) -> None:
    drawn = []
    for label, results in found.items():
        x = {key: np.array([float(r.get(key) or "nan") for r in results]) for key in ("step", "images")}
        places, x_label = axis(x, wanted)
        drawn.append(np.array([quality(r)[metric] for r in results]))
        colour = colormaps["tab10"](labels.index(label) % 10)
        ax.plot(places, drawn[-1], marker="o", markersize=4, color=colour, label=label)
        ax.set_xlabel(x_label)
    fit_y(ax, *drawn)
    ax.set_xlim(0, None)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    direction = "higher" if metric.startswith(_HIGHER_IS_BETTER) else "lower"
    ax.set_title(f"{metric} ({direction} is better)", fontsize=10)
