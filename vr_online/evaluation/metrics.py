"""What is measured beside the Frechet distance: KID, Inception Score, precision and recall."""

from __future__ import annotations

import contextlib
from typing import Iterator

import numpy as np
import torch

from vr_online.errors import UserError


@contextlib.contextmanager
def _numpy_seeded(seed: int) -> Iterator[None]:
    """NumPy's global generator seeded inside, as it was outside."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)


def kernel_inception_distance(real: np.ndarray, fake: np.ndarray, seed: int = 0) -> float:
    """KID (Binkowski et al. 2018, arXiv:1801.01401) as clean-fid computes it: cubic polynomial kernel, mean over
    100 random subsets of at most 1,000.

    Args:
        real, fake: features (n, d) and (m, d), both with at least 2 rows.
        seed: of the subsets.
    """
    from cleanfid.fid import kernel_distance

    if min(len(real), len(fake)) < 2:
        raise UserError(f"kid needs at least 2 samples on both sides, got {len(real)} and {len(fake)}")
    with _numpy_seeded(seed):
        return kernel_distance(real, fake)


class InceptionScoreSums:
    """Streaming Inception Score (Salimans et al. 2016, arXiv:1606.03498): exp of the mean divergence of p(y|x) from p(y).

    The n samples are cut into `splits` runs of neighbouring indices; mean and standard deviation are over them.

    Args:
        n: samples in all.
        classes: length of a probability vector.
    """

    def __init__(self, n: int, classes: int, splits: int = 10):
        self.n, self.splits = n, min(splits, n)
        self.count = np.zeros(self.splits)
        self.neg_entropy = np.zeros(self.splits)
        self.marginal = np.zeros((self.splits, classes))

    def add(self, first: int, probabilities: np.ndarray) -> None:
        """Adds samples `first`, `first + 1`, ... with float64 probabilities (B, classes)."""
        split = (first + np.arange(len(probabilities))) * self.splits // self.n
        logs = np.log(np.maximum(probabilities, 1e-300))
        np.add.at(self.count, split, 1)
        np.add.at(self.neg_entropy, split, (probabilities * logs).sum(1))
        np.add.at(self.marginal, split, probabilities)

    def score(self) -> tuple[float, float]:
        """(mean, standard deviation) over splits."""
        marginal = self.marginal / self.count[:, None]
        divergence = self.neg_entropy / self.count - (marginal * np.log(np.maximum(marginal, 1e-300))).sum(1)
        scores = np.exp(divergence)
        return float(scores.mean()), float(scores.std())


def precision_recall(
    real: np.ndarray, fake: np.ndarray, k: int = 3, chunk: int = 1024, device: torch.device | str = "cpu"
) -> tuple[float, float]:
    """Improved precision and recall (Kynkaanniemi et al. 2019, arXiv:1904.06991, equations 1 and 2).

    Precision is the share of `fake` inside the union of balls around each `real`, whose radius is the distance
    to its k-th nearest neighbour; recall the same with the roles exchanged. Memory: chunk * max(n, m) numbers.

    Args:
        real, fake: features (n, d) and (m, d), both with more than k rows.
    """
    if min(len(real), len(fake)) <= k:
        raise UserError(f"pr with k = {k} needs more than {k} samples on both sides, got {len(real)} and {len(fake)}")
    centre = real.mean(0, dtype=np.float64).astype(np.float32)  # distances from matrix products lose less around 0
    a = torch.as_tensor(real - centre, device=device, dtype=torch.float32)
    b = torch.as_tensor(fake - centre, device=device, dtype=torch.float32)
    return _covered(a, b, k, chunk), _covered(b, a, k, chunk)


def _covered(support: torch.Tensor, points: torch.Tensor, k: int, chunk: int) -> float:
    """Share of `points` inside the balls of `support`."""
    radii = torch.cat([torch.cdist(rows, support).kthvalue(k + 1, dim=1).values for rows in support.split(chunk)])
    inside = [(torch.cdist(rows, support) <= radii).any(1) for rows in points.split(chunk)]
    return torch.cat(inside).double().mean().item()
