"""What an evaluation gathers while samples stream through it, and the parts of it that survive a kill."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Callable, Optional

import numpy as np
import torch

from vr_online.errors import UserError
from vr_online.evaluation.features import Extractor
from vr_online.evaluation.frechet import MomentSums
from vr_online.evaluation.group import Group
from vr_online.evaluation.metrics import InceptionScoreSums
from vr_online.evaluation.npz import load_npz, save_npz


class Accumulator:
    """Sums over finished batches of samples.

    Args:
        n: samples of the whole evaluation.
        keep_features: also keep feature vectors (KID, precision / recall).
        with_score: also keep the sums of the Inception Score.
    """

    def __init__(self, n: int, keep_features: bool = False, with_score: bool = False):
        self.n, self.keep_features, self.with_score = n, keep_features, with_score
        self.batches: list[int] = []
        self.evaluations = 0
        self.sums: Optional[MomentSums] = None
        self.score: Optional[InceptionScoreSums] = None
        self.features: dict[int, np.ndarray] = {}

    def empty_like(self) -> "Accumulator":
        return Accumulator(self.n, self.keep_features, self.with_score)

    def add(self, batch: int, first: int, features: torch.Tensor, evaluations: int, extractor: Extractor) -> None:
        """Adds batch number `batch`, whose first sample is number `first`: features (B, d)."""
        self.sums = self.sums or MomentSums(features.shape[1], features.device)
        self.sums.add(features)
        if self.with_score:
            probabilities = extractor.class_probabilities(features).cpu().numpy()
            self.score = self.score or InceptionScoreSums(self.n, probabilities.shape[1])
            self.score.add(first, probabilities)
        if self.keep_features:
            self.features[batch] = features.cpu().numpy()
        self.batches.append(batch)
        self.evaluations += evaluations

    def state(self) -> dict[str, np.ndarray]:
        """Everything as arrays."""
        arrays = {
            "batches": np.array(self.batches, dtype=np.int64),
            "evaluations": np.int64(self.evaluations),
            "n": np.int64(self.sums.n),
            "total": self.sums.total.cpu().numpy(),
            "outer": self.sums.outer.cpu().numpy(),
        }
        if self.score is not None:
            arrays.update(count=self.score.count, neg_entropy=self.score.neg_entropy, marginal=self.score.marginal)
        if self.keep_features:
            arrays["features"] = np.concatenate([self.features[b] for b in self.batches])
            arrays["sizes"] = np.array([len(self.features[b]) for b in self.batches], dtype=np.int64)
        return arrays

    def merge(self, arrays: dict[str, np.ndarray], device: torch.device | str = "cpu") -> None:
        """Adds a saved state of other batches."""
        self.sums = self.sums or MomentSums(len(arrays["total"]), device)
        self.sums.merge(arrays["n"], arrays["total"], arrays["outer"])
        if self.with_score:
            self.score = self.score or InceptionScoreSums(self.n, arrays["marginal"].shape[1])
            for name in ("count", "neg_entropy", "marginal"):
                setattr(self.score, name, getattr(self.score, name) + arrays[name])
        if self.keep_features:
            parts = np.split(arrays["features"], np.cumsum(arrays["sizes"])[:-1])
            self.features.update(zip(arrays["batches"].tolist(), parts))
        self.batches += arrays["batches"].tolist()
        self.evaluations += int(arrays["evaluations"])

    def reduce(self, group: Group, dim: int) -> "Accumulator":
        """The sums of all ranks, on every rank; feature vectors only on the main one. `dim` is their length."""
        result = self.empty_like()
        result.sums = MomentSums(dim)
        if self.sums is not None:
            result.sums.merge(self.sums.n, self.sums.total, self.sums.outer)
        counts = group.sum_(torch.tensor([result.sums.n, self.evaluations, len(self.batches)]))
        result.sums.n, result.evaluations = int(counts[0]), int(counts[1])
        group.sum_(result.sums.total)
        group.sum_(result.sums.outer)
        if self.with_score:
            result.score = self._reduce_score(group)
        if self.keep_features:
            result.features = {k: v for part in group.gather_to_main(self.features) for k, v in part.items()}
        result.batches = sorted(b for part in group.gather(self.batches) for b in part)
        return result

    def _reduce_score(self, group: Group) -> InceptionScoreSums:
        classes = max(group.gather(self.score.marginal.shape[1] if self.score else 0))
        result = InceptionScoreSums(self.n, classes)
        for name in ("count", "neg_entropy", "marginal"):
            own = getattr(self.score if self.score is not None else InceptionScoreSums(self.n, classes), name)
            setattr(result, name, group.sum_(torch.from_numpy(own.copy())).numpy())
        return result

    def ordered_features(self) -> np.ndarray:
        """(n, d) in sample order."""
        return np.concatenate([self.features[b] for b in sorted(self.features)])


ARRAYS = (
    "fingerprint",
    "batches",
    "evaluations",
    "n",
    "total",
    "outer",
    "count",
    "neg_entropy",
    "marginal",
    "features",
    "sizes",
)


class Segments:
    """Sums of finished batches on disk, so that a killed evaluation continues where it was.

    Each save writes one immutable file with the batches since the last; a file is whole or absent. Files of
    another evaluation (other settings, another checkpoint) are told apart by the fingerprint and removed.

    Args:
        folder: `evals/<step>/partial`.
        fingerprint: of everything the samples and their features depend on, batch size included.
    """

    FIRST_S, LAST_S = 20.0, 600.0

    def __init__(self, folder: Path, fingerprint: str):
        self.folder, self.fingerprint = folder, fingerprint
        self.attempt = uuid.uuid4().hex[:12]
        self.interval = self.FIRST_S
        self.saved_at = time.monotonic()
        self.saved = 0

    def found(self, usable_batches: Callable[[list[int]], bool] = lambda batches: True) -> list[tuple[Path, list[int]]]:
        """Files of earlier attempts and the batches in each; damaged, foreign and overlapping ones are left out.

        Args:
            usable_batches: says whether batches may be continued from; files with others are left out too.
        """
        usable, seen = [], set()
        for path in sorted(self.folder.glob("sums-*.npz")):
            try:
                head = load_npz(path, ("fingerprint", "batches"))
            except UserError:
                continue
            batches = head["batches"].tolist() if "batches" in head else []
            if str(head.get("fingerprint")) == self.fingerprint and batches and not seen.intersection(batches) and usable_batches(batches):
                usable.append((path, batches))
                seen.update(batches)
        return usable

    @staticmethod
    def read(path: Path) -> dict[str, np.ndarray]:
        """One file's arrays; raises `UserError` when it is damaged."""
        return load_npz(path, ARRAYS)

    @property
    def due(self) -> bool:
        return time.monotonic() - self.saved_at >= self.interval

    def save(self, fresh: Accumulator) -> None:
        """Writes the batches since the last save."""
        path = self.folder / f"sums-{self.attempt}-{os.getpid()}-{self.saved:04d}.npz"
        save_npz(path, fingerprint=np.str_(self.fingerprint), **fresh.state())
        self.saved += 1
        self.saved_at = time.monotonic()
        # Each file of 2,048 Inception features is 32 MiB: rarer as the job grows.
        self.interval = min(self.interval * 1.5, self.LAST_S)

    def clear(self) -> None:
        """Removes all saved sums, this evaluation's and others'."""
        for path in [*self.folder.glob("sums-*.npz"), *self.folder.glob(".sums-*.part")]:
            path.unlink(missing_ok=True)
