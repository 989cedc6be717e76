"""The learned densities: what a target or a proposal makes of the live statistics.

A rule returns a curve over the bins, not normalised: a target's curve is a density up to a factor, a
proposal's is multiplied by the target. To add one, write a function of (`Context`, arguments) and register it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable

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
        path: the interpolation path, or None.
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
        needs_path: it needs the interpolation path.
        ready: function of (context, q, warmup) to a 0-dim bool: enough is known to leave q.
    """

    curve: Callable[..., Tensor]
    help: str
    parameters: tuple[str, ...] = ()
    defaults: tuple[float, ...] = ()
    sketches: bool = False
    needs_path: bool = False
    ready: Callable[[Context, Tensor, float], Tensor] | None = None


# Bins that hold less than this share of an equal part of q do not hold up the warm-up: they would take for
# ever, and borrow from their neighbours instead.
_NEGLIGIBLE = 0.1


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
    return context.view.loss * _rate_factor(context.path, context.prediction, c, context.view.centers)


def _rate_factor(path: Any, prediction: str, c: float, centers: Tensor, points: int = 8) -> Tensor:
    """(K,) mean over each bin of gate * (d snr / dt / 2) * (mmse per unit of loss)."""
    offsets = (centers.new_ones(points).cumsum(0) - 0.5) / points - 0.5  # made on the device, which nothing then waits for
    t = centers[:, None] + offsets[None, :] / len(centers)
    alpha, sigma, d_alpha, d_sigma = path.coefficients(t)
    slope = d_alpha - alpha * d_sigma / sigma
    mmse = {"velocity": slope.pow(-2), "data": t.pow(0), "noise": (sigma / alpha).square()}[prediction]
    gate = sigma.square() / (sigma.square() + c * c)
    return (gate * alpha * slope / sigma.square() * mmse).mean(1)


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
        needs_path=True, ready=enough_samples,
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
    if any(value <= 0 for value in parsed.args):
        raise DensityError(f"{spec}: the arguments of {parts.name} must be above 0")
    return parsed


def parse_target(spec: str) -> Spec:
    """A target density: fixed or learned."""
    return parse(spec, TARGETS)


def parse_proposal(spec: str) -> Spec:
    """A proposal density: `same`, fixed or learned."""
    return parse(spec, PROPOSALS, also=("same",))
