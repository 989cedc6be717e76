"""The learned densities: what a target or a proposal makes of the live statistics.

A rule returns a curve over the bins, not normalised: a target's curve is a density up to a factor, a
proposal's is multiplied by the target. To add one, write a function of (`Context`, arguments) and register it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from vr_online.timesteps import densities
from vr_online.timesteps.densities import DensityError, Spec

if TYPE_CHECKING:  # specs are checked with the configuration, before torch is needed
    from torch import Tensor

    from vr_online.timesteps.recent import RecentLosses
    from vr_online.timesteps.statistics import BinView


@dataclass
class Context:
    """What a rule may look at.

    Attributes:
        view: the statistics, with thin bins filled from their neighbours.
        stratified: whether draws are stratified.
        losses: recent individual losses, for rules that ask for them.
        loss_ema: (K,) the VDM++ average, for the rule that asks for it.
        path: the interpolation path.
        prediction: space of the loss: velocity, noise or data.
    """

    view: BinView
    stratified: bool = True
    losses: RecentLosses | None = None
    loss_ema: Tensor | None = None
    path: Any = None
    prediction: str = "velocity"


@dataclass(frozen=True)
class Rule:
    """A learned density.

    Attributes:
        curve: function of (context, *arguments) to a (K,) float64 curve.
        parameters: names of its numeric arguments, and `defaults` for the last of them.
        sketches: it needs a probe.
        ready: function of (context, q, warmup) to a 0-dim bool: enough is known to leave q.
    """

    curve: Callable[..., Tensor]
    help: str
    parameters: tuple[str, ...] = ()
    defaults: tuple[float, ...] = ()
    sketches: bool = False
    ready: Callable[[Context, Tensor, float], Tensor] | None = None


# Bins that hold less than this share of an equal part of q do not hold up the warm-up: they would take for
# ever, and borrow from their neighbours instead.
_NEGLIGIBLE = 0.1
_LEAST = 0.1  # share of what is usual that a bin counts for, however little was learnt there
_ROWS = 4  # of the history that a slope takes


def enough_samples(context: Context, q: Tensor, warmup: float) -> Tensor:
    """Every bin that matters to q has `warmup` effective samples."""
    return ((context.view.n_eff >= warmup) | (q * len(q) < _NEGLIGIBLE)).all()


def enough_losses(context: Context, q: Tensor, warmup: float) -> Tensor:
    """Every bin that matters to q has all its recent losses."""
    return (context.losses.full() | (q * len(q) < _NEGLIGIBLE)).all()


# Targets


def grad_variance(context: Context, power: float) -> Tensor:
    """The objective itself leans to the noisy times: VR-Sampling's density, from live gradients."""
    return context.view.grad_var.pow(power)


def entropy_rate(context: Context, c: float) -> Tensor:
    """Information that x_t gains about x_1 per unit of t, from the live loss, gated at the data end.

    Guo, Shamai, Verdu (2005): d I(x_1; x_t) / d snr = mmse(x_1 | x_t) / 2, with snr = alpha^2 / sigma^2. The
    velocity error is A^2 mmse with A = alpha' - alpha sigma' / sigma, and d snr / dt = 2 alpha A / sigma^2, so
    the rate is loss * alpha / (sigma^2 A); on the linear path loss * t / (1 - t). Where the loss is mostly
    fine detail and model error it does not vanish with sigma, hence the gate sigma^2 / (sigma^2 + c^2).
    """

    def factor(path: _PathAt) -> Tensor:
        gate = path.sigma.square() / (path.sigma.square() + c * c)
        return gate * path.alpha * path.slope / path.sigma.square() * path.mmse(context.prediction)

    return context.view.loss * _bin_mean(context, factor)


def information(context: Context, power: float) -> Tensor:
    """Information that x_t gains about x_1 per unit of log-SNR, snr mmse / 2, from the live loss.

    On the linear path and with the velocity loss it is t^2 loss / 2: Guo, Shamai, Verdu (2005), equation 1.
    """
    return (context.view.loss * _per_log_snr(context)).pow(power)


def learnable(context: Context, power: float, tilt: float) -> Tensor:
    """How far the live loss is below that of the best linear denoiser, to a power, times (snr mmse / 2 per unit of loss)^tilt.

    What only a network can learn: nothing at either end, where a linear denoiser is best. On the linear path with the
    velocity loss the second factor is (t^2 / 2)^tilt. With power 1 and tilt 1 the curve is snr (mmse_gauss - mmse) / 2, the rate,
    per unit of log-SNR, at which x_t tells the data from a Gaussian of the same variance; its integral is the divergence of
    the two, the data's negentropy (Guo, Shamai, Verdu 2005, theorem 1, applied to both).
    """
    return _below_linear(context).pow(power) * _per_log_snr(context).pow(tilt)


def frontier(context: Context, power: float, tilt: float, progress: float) -> Tensor:
    """What the network has learnt, where it still learns: `learnable` times `progress` to a power."""
    return learnable(context, power, tilt) * _fall(context).pow(progress)


def progress(context: Context, power: float) -> Tensor:
    """Fall of a bin's loss per doubling of the images, over the last half of them.

    While losses fall as a power of the images, it is in proportion to what is still left to learn.
    """
    return _fall(context).pow(power)


def signal(context: Context, power: float) -> Tensor:
    """Squared norm of the bin's mean gradient over its variance: how much one sample tells."""
    return (context.view.signal / context.view.grad_var.clamp(min=1e-300)).pow(power)


def agreement(context: Context, power: float) -> Tensor:
    """How much a step on the bin helps all of them: its mean gradient along the mean over bins, over its spread."""
    mean = context.view.mean_sketch
    along = (mean @ mean.mean(0)) / context.view.grad_sq.clamp(min=1e-300).sqrt()
    return along.clamp(min=0).pow(power)


@dataclass
class _PathAt:
    """The path at times t: alpha, sigma and A = alpha' - alpha sigma' / sigma, the velocity per unit of x_1's error."""

    alpha: Tensor
    sigma: Tensor
    slope: Tensor

    def mmse(self, prediction: str) -> Tensor:
        """Error of x_1 per unit of loss."""
        if prediction == "velocity":
            return self.slope.pow(-2)
        return (self.sigma / self.alpha).square() if prediction == "noise" else self.alpha.pow(0)


def _bin_mean(context: Context, function: Callable[[_PathAt], Tensor], points: int = 8) -> Tensor:
    """(K,) mean of a function of the path over each bin."""
    centers = context.view.centers
    offsets = (centers.new_ones(points).cumsum(0) - 0.5) / points - 0.5  # made on the device, which nothing then waits for
    alpha, sigma, d_alpha, d_sigma = context.path.coefficients(centers[:, None] + offsets[None, :] / len(centers))
    return function(_PathAt(alpha, sigma, d_alpha - alpha * d_sigma / sigma)).mean(1)


def _per_log_snr(context: Context) -> Tensor:
    """(K,) snr mmse / 2 per unit of loss."""
    return _bin_mean(context, lambda path: 0.5 * (path.alpha / path.sigma).square() * path.mmse(context.prediction))


def _linear_loss(context: Context) -> Tensor:
    """(K,) loss of the best linear denoiser of data with independent coordinates of variance 1, as normalised shards have:
    mmse = sigma^2 / (alpha^2 + sigma^2)."""
    return _bin_mean(
        context, lambda path: path.sigma.square() / (path.alpha.square() + path.sigma.square()) / path.mmse(context.prediction)
    )


def _below_linear(context: Context) -> Tensor:
    """(K,) linear denoiser's loss less the live one; at least a tenth of it, so that a bin which is not even that far yet,
    as all are at first, is not left out."""
    linear = _linear_loss(context)
    return (linear - context.view.loss).clamp(min=_LEAST * linear)


def _fall(context: Context) -> Tensor:
    """(K,) least-squares fall of the loss per doubling of the images over the last half of them; at least a tenth of the
    bins' mean, and the same for all while little of the past is known."""
    past, loss = context.view.history, context.view.loss
    recent = [i for i, images in enumerate(past.images) if images >= past.images[-1] / 2]
    if len(recent) < _ROWS:
        return loss.new_ones(len(loss))
    x = np.log2([past.images[i] for i in recent])
    slope = (x - x.mean()) / np.square(x - x.mean()).sum()
    fall = -sum(float(w) * past.loss[i] for w, i in zip(slope, recent))
    fall = fall.clamp(min=0)
    return fall.clamp(min=_LEAST * fall.mean())


# Proposals


def online_vr(context: Context) -> Tensor:
    """Neyman allocation: the within-bin standard deviation when stratified, the root of the second moment when
    draws are independent."""
    return (context.view.grad_var if context.stratified else context.view.grad_sq).clamp(min=0).sqrt()


def loss_second_moment(context: Context) -> Tensor:
    """Nichol and Dhariwal (2021), section 3.3: the root of the mean of the last ten squared losses."""
    return context.losses.mean_square().sqrt()


def loss_ema(context: Context) -> Tensor:
    """Kingma and Gao (2023, VDM++), appendix F: in proportion to a running mean of the loss, decay 0.999."""
    return context.loss_ema


TARGETS: dict[str, Rule] = {
    "grad_variance": Rule(
        grad_variance, "the live gradient variance to a power (1 if not given)", ("power",), (1.0,),
        sketches=True, ready=enough_samples,
    ),
    "entropy_rate": Rule(
        entropy_rate, "information rate of the live loss, gated at the data end", ("c",), (0.15,),
        ready=enough_samples,
    ),
    "information": Rule(
        information, "information of the live loss per unit of log-SNR, to a power", ("power",), (1.0,), ready=enough_samples,
    ),
    "learnable": Rule(
        learnable, "live loss below a linear denoiser's, to a power, tilted to the data", ("power", "tilt"), (4.0, 1.0),
        ready=enough_samples,
    ),
    "frontier": Rule(
        frontier, "`learnable` times `progress` to a power", ("power", "tilt", "progress"), (4.0, 1.0, 0.5), ready=enough_samples,
    ),
    "progress": Rule(progress, "recent fall of the live loss, to a power", ("power",), (1.0,), ready=enough_samples),
    "signal": Rule(signal, "mean gradient over its noise, to a power", ("power",), (1.0,), sketches=True, ready=enough_samples),
    "agreement": Rule(
        agreement, "the bin's gradient along the whole one, to a power", ("power",), (1.0,), sketches=True, ready=enough_samples,
    ),
}

PROPOSALS: dict[str, Rule] = {
    "online_vr": Rule(online_vr, "q times the live gradient's spread: least variance", sketches=True, ready=enough_samples),
    "loss_second_moment": Rule(
        loss_second_moment, "OpenAI's rule on the last ten losses", ready=enough_losses
    ),
    "loss_ema": Rule(loss_ema, "VDM++'s rule on a running mean of the loss"),
}


def parse(spec: str, rules: dict[str, Rule], also: tuple[str, ...] = ()) -> Spec:
    """A spec that names a rule, one of `also`, or a fixed density. Raises `DensityError`."""
    parts = densities.split(spec)
    if parts.name in also and not parts.args:
        return parts
    if parts.name not in rules:
        return densities.parse(spec, also=(*rules, *also))
    rule = rules[parts.name]
    required = len(rule.parameters) - len(rule.defaults)
    parsed = densities.numbers(parts, rule.parameters, required)
    missing = len(rule.parameters) - len(parsed.args)
    parsed = Spec(parts.name, parsed.args + rule.defaults[len(rule.defaults) - missing :])
    if any(value < 0 for value in parsed.args):
        raise DensityError(f"{spec}: the arguments of {parts.name} must not be negative")
    return parsed


def parse_target(spec: str) -> Spec:
    """A target density: fixed or learned."""
    return parse(spec, TARGETS)


def parse_proposal(spec: str) -> Spec:
    """A proposal density: `same`, fixed or learned."""
    return parse(spec, PROPOSALS, also=("same",))


def need_probe(target: Spec, proposal: Spec) -> list[str]:
    """Which of `target` and `proposal` learn from gradient sketches."""
    specs = (("target", target, TARGETS), ("proposal", proposal, PROPOSALS))
    return [key for key, spec, table in specs if spec.name in table and table[spec.name].sketches]
