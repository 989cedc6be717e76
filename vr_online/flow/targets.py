"""What a network may predict, exact conversions between those, and the training loss.

Given x_t and t, each of velocity, noise, data and score fixes the pair (x_1, x_0), and the pair fixes all of
them:

    velocity = d_alpha x_1 + d_sigma x_0        score = -x_0 / sigma

Applied to conditional expectations instead of samples the same identities hold, because they are linear, which
is why they convert the output of a trained network (SiT, Ma et al. 2024, section 2.2).

Solving a noise prediction for data divides by alpha (0 at t = 0), a data prediction for noise or a score by
sigma (0 at t = 1). Such divisions see t moved at most `EDGE` inside; samplers stay `SAMPLE_EPS` away from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vr_online.errors import UserError
from vr_online.flow.paths import Path, expand_like, get_path

QUANTITIES = ("velocity", "noise", "data", "score")
PREDICTIONS = ("velocity", "noise", "data")

EDGE = 1e-5
"""Distance from a singular end of [0, 1] to which conversions move t."""

SAMPLE_EPS = 1e-3
"""Distance that samplers keep from a singular end (the value SiT samples with)."""


def decompose(path: Path, kind: str, value: Tensor, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """The (x_1, x_0) that give this x_t and this `value` of `kind`; all (B, ...), `t` (B,)."""
    c = path.coefficients(expand_like(_inside(t), x_t))
    if kind == "velocity":
        determinant = c.alpha * c.d_sigma - c.sigma * c.d_alpha
        return (c.d_sigma * x_t - c.sigma * value) / determinant, (c.alpha * value - c.d_alpha * x_t) / determinant
    if kind == "noise":
        return (x_t - c.sigma * value) / c.alpha, value
    if kind == "data":
        return value, (x_t - c.alpha * value) / c.sigma
    if kind == "score":
        noise = -c.sigma * value
        return (x_t - c.sigma * noise) / c.alpha, noise
    raise ValueError(f"unknown quantity {kind!r}: choose one of {', '.join(QUANTITIES)}")


def compose(path: Path, kind: str, x_1: Tensor, x_0: Tensor, t: Tensor) -> Tensor:
    """The quantity `kind` of the pair (x_1, x_0), each (B, ...), at `t` (B,)."""
    c = path.coefficients(expand_like(t, x_1))
    if kind == "velocity":
        return c.d_alpha * x_1 + c.d_sigma * x_0
    if kind == "noise":
        return x_0
    if kind == "data":
        return x_1
    if kind == "score":
        return -x_0 / path.sigma(expand_like(_inside(t), x_1))
    raise ValueError(f"unknown quantity {kind!r}: choose one of {', '.join(QUANTITIES)}")


def convert(path: Path, value: Tensor, source: str, target: str, x_t: Tensor, t: Tensor) -> Tensor:
    """`value` of kind `source` at (`x_t`, `t`) as the kind `target`; kinds are those of `QUANTITIES`."""
    if source == target:
        return value
    return compose(path, target, *decompose(path, source, value, x_t, t), t)


def _inside(t: Tensor) -> Tensor:
    return t.clamp(EDGE, 1 - EDGE)


@dataclass(frozen=True)
class Flow:
    """A path together with what the network predicts (`velocity`, `noise` or `data`).

    Network outputs may have twice the channels (learned sigma); the first half is used.
    Everything is computed in float32, or float64 where x_t or the output is.
    """

    path: Path
    prediction: str = "velocity"

    def __post_init__(self) -> None:
        if isinstance(self.path, str):
            object.__setattr__(self, "path", get_path(self.path))
        if self.prediction not in PREDICTIONS:
            raise UserError(f"flow.prediction: {self.prediction!r} is none of {', '.join(PREDICTIONS)}")

    def sample(self, x_1: Tensor, x_0: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """(x_t, target of the network), both (B, ...), for data, noise and `t` (B,)."""
        point = self.path.interpolate(x_1, x_0, t)
        return point.x_t, {"velocity": point.v, "noise": x_0, "data": x_1}[self.prediction]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean squared error of each sample, (B,) float32, from the network's output and `target` (B, C, ...)."""
        error = output[:, : target.shape[1]].float() - target.float()
        return error.square().flatten(1).mean(1)

    def velocity(self, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """d x_t / dt implied by the network's output."""
        return self.convert(output, "velocity", x_t, t)

    def score(self, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Gradient of the log density of x_t implied by the network's output."""
        return self.convert(output, "score", x_t, t)

    def data(self, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """Expected data E[x_1 | x_t] implied by the network's output."""
        return self.convert(output, "data", x_t, t)

    def convert(self, output: Tensor, kind: str, x_t: Tensor, t: Tensor) -> Tensor:
        """The network's `output` at (`x_t`, `t`) as `kind`, in float32 or float64."""
        dtype = torch.promote_types(torch.promote_types(output.dtype, x_t.dtype), torch.float32)
        output = output[:, : x_t.shape[1]].to(dtype)
        return convert(self.path, output, self.prediction, kind, x_t.to(dtype), t.to(dtype))

    def time_range(self, steps: int | None = None) -> tuple[float, float]:
        """The part of [0, 1] on which to solve with the velocity, ends included.

        Noise prediction leaves out t = 0 where alpha vanishes there, data prediction and the VP path t = 1. With a
        fixed number of `steps`, noise prediction begins half a step late: the velocity holds the network's error
        divided by alpha, which a first step from `SAMPLE_EPS` would magnify step / SAMPLE_EPS times.
        """
        alpha_vanishes = float(self.path.alpha(torch.zeros((), dtype=torch.float64))) == 0
        late = max(SAMPLE_EPS, 0.5 / steps) if steps else SAMPLE_EPS
        start = min(late, 0.1) if self.prediction == "noise" and alpha_vanishes else 0.0
        stop = 1 - SAMPLE_EPS if self.prediction == "data" or self.path.name == "vp" else 1.0
        return start, stop
