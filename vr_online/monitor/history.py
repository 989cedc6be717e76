"""Columns out of a run's records: scalars over training, and per-bin arrays over training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

import numpy as np


@dataclass(frozen=True)
class Scalars:
    """Every scalar of a run, each (T,) float64 with NaN where a line lacks it.

    Attributes:
        x: step, images and hours of training, by the names `step`, `images`, `hours`.
        values: by metric name.
    """

    x: dict[str, np.ndarray]
    values: dict[str, np.ndarray]

    @staticmethod
    def of(records: Sequence[dict[str, Any]]) -> "Scalars":
        keys = dict.fromkeys(key for record in records for key in record)
        columns = {key: np.array([_number(r.get(key)) for r in records]) for key in keys}
        step = columns.pop("step")
        images = columns.pop("images", np.full_like(step, np.nan))
        columns.pop("time", None)
        step_s = columns.get("speed/step_s", np.full_like(step, np.nan))
        hours = np.cumsum(np.nan_to_num(step_s) * np.diff(step, prepend=0.0)) / 3600
        return Scalars({"step": step, "images": images, "hours": hours}, columns)


@dataclass(frozen=True)
class BinHistory:
    """Per-bin arrays over training.

    Attributes:
        x: `step` and `images`, each (T,).
        values: by quantity, (T, K) float64.
    """

    x: dict[str, np.ndarray]
    values: dict[str, np.ndarray]

    @staticmethod
    def of(records: Sequence[dict[str, Any]]) -> "BinHistory":
        """Keeps the quantities of the last record, and the records that hold all of them with as many bins."""
        shape = {key: len(value) for key, value in records[-1].items() if isinstance(value, list)}
        kept = [r for r in records if all(len(r.get(key) or ()) == k for key, k in shape.items())]
        x = {key: np.array([_number(r.get(key)) for r in kept]) for key in ("step", "images")}
        return BinHistory(x, {key: np.array([r[key] for r in kept], dtype=np.float64) for key in shape})

    @property
    def bins(self) -> int:
        return next((v.shape[1] for v in self.values.values()), 0)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")


def axis(x: dict[str, np.ndarray], wanted: str) -> tuple[np.ndarray, str]:
    """The x values asked for and their label; steps where some record does not tell it."""
    if wanted in x and len(x[wanted]) and not np.isnan(x[wanted]).any():
        return x[wanted], {"images": "images", "step": "steps", "hours": "hours of training"}[wanted]
    return x["step"], "steps"
