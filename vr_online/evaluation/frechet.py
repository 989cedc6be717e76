"""Frechet distance between Gaussians fitted to feature vectors, from streaming float64 sums.

The distance of Heusel et al. 2017 (arXiv:1706.08500, equation 6), with features (n, d):

    d^2 = |m_1 - m_2|^2 + Tr(C_1 + C_2 - 2 (C_1 C_2)^(1/2))

`MomentSums` holds n, the sum of x and the sum of x x^T, so memory does not grow with n, sums of
several ranks or of an interrupted run simply add, and no sample is ever counted twice.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy.linalg
import torch
import torch.distributed as dist

from vr_online.errors import UserError


@dataclasses.dataclass(frozen=True)
class Moments:
    """Mean (d,) and covariance (d, d) of n feature vectors, float64; n is 0 where the file did not say."""

    mean: np.ndarray
    cov: np.ndarray
    n: int = 0

    @property
    def dim(self) -> int:
        return self.mean.shape[0]


class MomentSums:
    """Float64 sums of feature vectors of length `dim`, kept on `device`."""

    def __init__(self, dim: int, device: torch.device | str = "cpu"):
        self.n = 0
        self.total = torch.zeros(dim, dtype=torch.float64, device=device)
        self.outer = torch.zeros(dim, dim, dtype=torch.float64, device=device)

    @property
    def dim(self) -> int:
        return self.total.shape[0]

    def add(self, features: torch.Tensor | np.ndarray) -> None:
        """Adds features (B, d).

        Raises:
            UserError: a feature is not finite, or the length is not d.
        """
        x = torch.as_tensor(features).to(self.total.device, torch.float64)
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise UserError(f"features have shape {tuple(x.shape)}, expected (batch, {self.dim})")
        if not torch.isfinite(x).all():
            raise UserError("a feature is not finite: the samples hold NaN or infinity, so no distance can be computed")
        self.n += x.shape[0]
        self.total += x.sum(0)
        self.outer.addmm_(x.T, x)

    def merge(self, n: int, total: np.ndarray | torch.Tensor, outer: np.ndarray | torch.Tensor) -> None:
        """Adds the sums of other samples."""
        self.n += int(n)
        self.total += torch.as_tensor(total).to(self.total)
        self.outer += torch.as_tensor(outer).to(self.outer)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> "MomentSums":
        """The sums over all ranks of `group`, on every rank; this object stays as it is."""
        result = MomentSums(self.dim, self.total.device)
        count = torch.tensor([self.n], dtype=torch.int64, device=self.total.device)
        result.total.copy_(self.total)
        result.outer.copy_(self.outer)
        for tensor in (count, result.total, result.outer):
            dist.all_reduce(tensor, group=group)
        result.n = int(count)
        return result

    def moments(self) -> Moments:
        """Mean and unbiased covariance, as `numpy.cov` gives it.

        Raises:
            UserError: fewer than 2 samples.
        """
        if self.n < 2:
            raise UserError(f"a covariance needs at least 2 samples, got {self.n}")
        mean = self.total / self.n
        cov = (self.outer - torch.outer(mean, self.total)) / (self.n - 1)
        cov = (cov + cov.T) / 2
        return Moments(mean.cpu().numpy(), cov.cpu().numpy(), self.n)


def _root(cov: np.ndarray) -> np.ndarray:
    """F (d, r) with F F^T = cov, from symmetric eigenvalues; directions below rounding are dropped."""
    values, vectors = scipy.linalg.eigh(cov)
    keep = values > max(values[-1], 0.0) * len(values) * np.finfo(np.float64).eps
    return vectors[:, keep] * np.sqrt(values[keep])


def frechet_distance(a: Moments, b: Moments) -> float:
    """Squared Frechet distance of two Gaussians, the number called FID.

    With F_i F_i^T = C_i, Tr (C_1 C_2)^(1/2) is the sum of the singular values of F_1^T F_2. Unlike a
    matrix square root this needs no regularisation for singular C_i, cannot turn complex, and unlike
    the eigenvalues of F_1^T C_2 F_1 it does not lose half of the digits of small ones.

    Raises:
        UserError: the dimensions differ.
    """
    if a.dim != b.dim:
        raise UserError(f"feature dimensions differ: {a.dim} and {b.dim}")
    product = _root(a.cov).T @ _root(b.cov)
    trace = scipy.linalg.svdvals(product).sum() if product.size else 0.0
    difference = a.mean - b.mean
    return float(difference @ difference + np.trace(a.cov) + np.trace(b.cov) - 2 * trace)
