"""Interpolants x_t = alpha_t x_1 + sigma_t x_0 between noise (t = 0) and data (t = 1).

| name     | alpha_t                                                | sigma_t           |
| -------- | ------------------------------------------------------ | ----------------- |
| `linear` | t                                                      | 1 - t             |
| `gvp`    | sin(pi t / 2)                                          | cos(pi t / 2)     |
| `vp`     | exp(-(1-t)^2 (beta_1 - beta_0)/4 - (1-t) beta_0/2)     | sqrt(1 - alpha^2) |

with beta_0 = 0.1 and beta_1 = 20 (Song et al. 2021, appendix C; SiT, Ma et al. 2024, section 2).

Two things about `vp` matter to a caller. alpha(0) = 0.0066, not 0, so pure noise is a slightly wrong
starting point of a sampler (SiT's too). And d_sigma grows like (1-t)^(-1/2) towards t = 1, so derivatives and
everything solved from them are taken at `min(t, T_MAX)`, 1e-5 before the end: the bound SiT trains with.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from vr_online.errors import UserError

T_MAX = 1.0 - 1e-5
"""Latest time at which the derivative of the VP path's sigma is evaluated."""

BETA_MIN, BETA_MAX = 0.1, 20.0


class PathSample(NamedTuple):
    """A point of the path: `x_t` and `v` = d x_t / dt shaped like x_1; `alpha`, `sigma` broadcast against it."""

    x_t: Tensor
    v: Tensor
    alpha: Tensor
    sigma: Tensor


class Coefficients(NamedTuple):
    """alpha, sigma and their time derivatives at one t, all shaped like t."""

    alpha: Tensor
    sigma: Tensor
    d_alpha: Tensor
    d_sigma: Tensor


class Path(ABC):
    """One interpolant. Every function takes t of any shape in [0, 1] and keeps its shape and dtype."""

    name: str

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor:
        """Weight of the data x_1; increases from (nearly) 0 to 1."""

    @abstractmethod
    def sigma(self, t: Tensor) -> Tensor:
        """Weight of the noise x_0; decreases from (nearly) 1 to 0."""

    @abstractmethod
    def d_alpha(self, t: Tensor) -> Tensor:
        """Derivative of alpha with respect to t."""

    @abstractmethod
    def d_sigma(self, t: Tensor) -> Tensor:
        """Derivative of sigma with respect to t; finite for every t in [0, 1]."""

    def clamp(self, t: Tensor) -> Tensor:
        """The time at which a consistent set of the four coefficients exists."""
        return t

    def coefficients(self, t: Tensor) -> Coefficients:
        """All four at `clamp(t)`, so that they describe one and the same point of the path."""
        t = self.clamp(t)
        return Coefficients(self.alpha(t), self.sigma(t), self.d_alpha(t), self.d_sigma(t))

    def interpolate(self, x_1: Tensor, x_0: Tensor, t: Tensor) -> PathSample:
        """x_t and its velocity for data `x_1` (B, ...), noise `x_0` (same shape) and times `t` (B,).

        Raises:
            ValueError: the shapes do not fit together.
        """
        if x_0.shape != x_1.shape or t.shape != x_1.shape[:1]:
            shapes = f"x_1 {tuple(x_1.shape)}, x_0 {tuple(x_0.shape)} and t {tuple(t.shape)}"
            raise ValueError(f"{shapes} do not fit: want (B, ...), (B, ...), (B,)")
        alpha, sigma, d_alpha, d_sigma = self.coefficients(expand_like(t, x_1))
        return PathSample(alpha * x_1 + sigma * x_0, d_alpha * x_1 + d_sigma * x_0, alpha, sigma)


class LinearPath(Path):
    """Straight line (rectified flow): v = x_1 - x_0."""

    name = "linear"

    def alpha(self, t: Tensor) -> Tensor:
        return t

    def sigma(self, t: Tensor) -> Tensor:
        return 1 - t

    def d_alpha(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def d_sigma(self, t: Tensor) -> Tensor:
        return -torch.ones_like(t)


class GVPPath(Path):
    """Generalised variance preserving, the cosine path: alpha^2 + sigma^2 = 1, trigonometric in t."""

    name = "gvp"

    def alpha(self, t: Tensor) -> Tensor:
        return torch.sin(t * (math.pi / 2))

    def sigma(self, t: Tensor) -> Tensor:
        # sin of the complement is exactly 0 at t = 1, where cos(pi / 2) in floating point is not.
        return torch.sin((1 - t) * (math.pi / 2))

    def d_alpha(self, t: Tensor) -> Tensor:
        return self.sigma(t) * (math.pi / 2)

    def d_sigma(self, t: Tensor) -> Tensor:
        return self.alpha(t) * (-math.pi / 2)


class VPPath(Path):
    """Variance preserving diffusion with the linear beta schedule."""

    name = "vp"

    def _log_alpha(self, t: Tensor) -> Tensor:
        s = 1 - t
        return -0.25 * (BETA_MAX - BETA_MIN) * s * s - 0.5 * BETA_MIN * s

    def _d_log_alpha(self, t: Tensor) -> Tensor:
        return 0.5 * (BETA_MAX - BETA_MIN) * (1 - t) + 0.5 * BETA_MIN

    def alpha(self, t: Tensor) -> Tensor:
        return self._log_alpha(t).exp()

    def sigma(self, t: Tensor) -> Tensor:
        # expm1 keeps all digits where alpha is close to 1.
        return torch.sqrt(-torch.expm1(2 * self._log_alpha(t)))

    def d_alpha(self, t: Tensor) -> Tensor:
        return self.alpha(t) * self._d_log_alpha(t)

    def d_sigma(self, t: Tensor) -> Tensor:
        t = self.clamp(t)
        return -self.alpha(t).square() * self._d_log_alpha(t) / self.sigma(t)

    def clamp(self, t: Tensor) -> Tensor:
        return t.clamp(max=T_MAX)


PATHS = {path.name: path for path in (LinearPath(), GVPPath(), VPPath())}


def get_path(name: str) -> Path:
    """The path called `linear`, `gvp` or `vp`; raises `UserError` for another name."""
    try:
        return PATHS[name]
    except KeyError:
        raise UserError(f"flow.path: no path {name!r}; choose one of {', '.join(PATHS)}") from None


def expand_like(t: Tensor, x: Tensor) -> Tensor:
    """`t` (B,) with trailing axes of length 1, so that it broadcasts over `x` (B, ...)."""
    return t.reshape(t.shape + (1,) * (x.ndim - t.ndim))
