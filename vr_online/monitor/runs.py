"""Reading a run's directory for the figures: metrics, per-bin arrays, evaluations."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from vr_online.errors import UserError
from vr_online.monitor.history import BinHistory, Scalars
from vr_online.monitor.monitor import BINS_FILE, METRICS_FILE
from vr_online.monitor.records import read_records


@dataclass(frozen=True)
class Run:
    """What the figures need of one run.

    Attributes:
        name: shown in legends.
        scalars: everything in `metrics.jsonl`.
        bins: everything in `bins.jsonl`; None for a run without an adaptive sampler.
        evaluations: the contents of the `result.json` below `evals/`, by step.
    """

    name: str
    directory: Path
    scalars: Scalars
    bins: Optional[BinHistory]
    evaluations: list[dict[str, Any]] = field(default_factory=list)


def read_run(directory: str | Path, name: Optional[str] = None) -> Run:
    """Reads a run.

    Raises:
        UserError: the directory or its metrics are missing, empty or unreadable.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such run directory; give the folder that holds {METRICS_FILE}")
    scalars = Scalars.of(read_records(directory / METRICS_FILE))
    bins = directory / BINS_FILE
    history = BinHistory.of(read_records(bins)) if bins.exists() and bins.stat().st_size else None
    return Run(name or directory.resolve().name, directory, scalars, history, read_evaluations(directory))


def read_evaluations(directory: Path) -> list[dict[str, Any]]:
    """All results below `evals/` that hold a step, those of other settings included, in order of step.

    Raises:
        UserError: a result is not JSON.
    """
    found = []
    for path in sorted([*directory.glob("evals/*/result.json"), *directory.glob("evals/*/*/result.json")]):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot read this result ({error}); delete it and evaluate the step again") from None
        if isinstance(result, dict) and isinstance(result.get("step"), int):
            found.append(result)
    return sorted(found, key=lambda result: result["step"])
