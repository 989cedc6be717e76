"""A generator, an extractor and a reference that need no network."""

from __future__ import annotations

import numpy as np
import torch

from vr_online.errors import UserError
from vr_online.evaluation.features import Extractor
from vr_online.evaluation.frechet import Moments
from vr_online.evaluation.statistics import Statistics

DIM = 6


class Noise:
    """Sample i from a generator of its own; notes who asked for what.

    Args:
        fail_at: sample at which it fails.
        nan_at: sample that is not a number.
    """

    def __init__(self, fail_at=None, nan_at=None, error=UserError):
        self.fail_at, self.nan_at, self.error = fail_at, nan_at, error
        self.evaluations = 0
        self.asked: list[int] = []

    def __call__(self, first, last):
        if self.fail_at is not None and first <= self.fail_at < last:
            raise self.error(f"cannot make sample {self.fail_at}")
        self.asked += range(first, last)
        self.evaluations += 3 * (last - first)
        rows = [
            torch.randn(DIM, 1, 1, generator=torch.Generator().manual_seed(i)) * torch.arange(1, DIM + 1).reshape(-1, 1, 1)
            for i in range(first, last)
        ]
        samples = torch.stack(rows)
        if self.nan_at is not None and first <= self.nan_at < last:
            samples[self.nan_at - first] = float("nan")
        return samples


class Identity(Extractor):
    """The sample is its own feature vector."""

    name, metric, space, preprocessing = "identity", "fd_identity", "latent", {}

    def __call__(self, samples):
        return samples.flatten(1).float()

    def class_probabilities(self, features):
        return torch.softmax(features.double(), dim=1)


def reference(n: int = 300) -> Statistics:
    rows = np.random.default_rng(0).normal(size=(n, DIM)).astype(np.float32)
    return Statistics(Moments(rows.mean(0, dtype=np.float64), np.cov(rows, rowvar=False), n), "vr_online", {}, rows)
