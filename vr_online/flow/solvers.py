"""Solvers that carry noise at t = 0 to data at t = 1.

The ODE is dx = v dt. For any w_t >= 0 the SDE

    dx = [v + (w_t / 2) s] dt + sqrt(w_t) dW,        s = grad log p_t(x)

has the same marginals p_t: in the Fokker-Planck equation the extra drift contributes -(w/2) div(p s) =
-(w/2) Laplacian p, which the noise's +(w/2) Laplacian p cancels (SiT, Ma et al. 2024, section 2.3, with time
running from noise to data). The noise is therefore sqrt(w), and sqrt(2 D) for D = w / 2. `DIFFUSIONS` tabulates D
in the scale of the published SiT samples, so that `sigma` is D = sigma_t, w = 2 sigma_t.

Every solver treats the samples of a batch independently, the adaptive one included: each sample has steps and an
error of its own. That is why dopri5 is written here: torchdiffeq's shares one step size over the whole state, so that
a sample would depend on its neighbours in the batch, and it keeps the tableau in a private module. The tests compare
coefficients and, on a batch of one, solutions with it.
"""

from __future__ import annotations

import math
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from vr_online.errors import UserError
from vr_online.flow.paths import Path, expand_like
from vr_online.flow.targets import decompose

Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x (B, ...), t (B,)), both in the integrator's dtype, to d x / d t (B, ...)."""


class Solution(NamedTuple):
    """The state `x` (B, ...) at the end and `nfe` (B,) int64, velocity evaluations spent on each sample."""

    x: Tensor
    nfe: Tensor


ODE_SOLVERS = ("euler", "heun", "dopri5")
SDE_SOLVERS = ("euler_maruyama",)


def integrate(velocity: Velocity, x_0: Tensor, *, solver: str = "heun", steps: int = 50, rtol: float = 1e-3,
              atol: float = 1e-6, dtype: torch.dtype = torch.float32, t_span: tuple[float, float] = (0.0, 1.0),
              singular_end: bool = False) -> Solution:
    """Solves dx/dt = v from `x_0` (B, ...) over `t_span`.

    Args:
        solver: `euler` (order 1, 1 evaluation a step), `heun` (order 2, 2 evaluations) or `dopri5` (adaptive,
            order 5, 6 evaluations a step and 2 to begin).
        steps: equal steps of a fixed-step solver.
        rtol, atol: tolerances of dopri5, on the root mean square of each sample's local error.
        dtype: dtype of the state and of the t given to `velocity`.
        singular_end: errors of the network are magnified at t_span[1]; heun then ends with an Euler step, which does
            not evaluate there (as in Karras et al. 2022, algorithm 1).

    Raises:
        UserError: unknown solver, or dopri5's step size vanishes.
    """
    x = x_0.to(dtype)
    if solver == "dopri5":
        return _dopri5(velocity, x, t_span, rtol, atol)
    if solver not in ODE_SOLVERS:
        raise UserError(f"evaluation.solver: no ODE solver {solver!r}; choose one of {', '.join(ODE_SOLVERS)}")
    times, heun_steps = _grid(*t_span, steps), (steps - singular_end if solver == "heun" else 0)
    for i, (t, t_next) in enumerate(zip(times[:-1], times[1:])):
        x = (_heun_step if i < heun_steps else _euler_step)(velocity, x, t, t_next)
    return Solution(x, _constant_nfe(x, steps + heun_steps))


def _euler_step(velocity: Velocity, x: Tensor, t: float, t_next: float) -> Tensor:
    return x + (t_next - t) * _evaluate(velocity, x, t)


def _heun_step(velocity: Velocity, x: Tensor, t: float, t_next: float) -> Tensor:
    slope = _evaluate(velocity, x, t)
    end_slope = _evaluate(velocity, x + (t_next - t) * slope, t_next)
    return x + (t_next - t) * 0.5 * (slope + end_slope)


def _evaluate(velocity: Velocity, x: Tensor, t: float) -> Tensor:
    return velocity(x, x.new_full(x.shape[:1], t)).to(x.dtype)


def _grid(start: float, stop: float, steps: int) -> list[float]:
    return [start + (stop - start) * i / steps for i in range(steps)] + [stop]


def _constant_nfe(x: Tensor, count: int) -> Tensor:
    return torch.full(x.shape[:1], count, dtype=torch.int64)


# Dormand and Prince 1980, RK5(4)7M. The last row of DP_A also gives the fifth-order solution; DP_E is that minus
# the embedded fourth-order one.
DP_C = (0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
DP_A = (
    (),
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
DP_E = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)

SMALLEST_STEP = 1e-7
"""Shortest step that dopri5's error control may ask for."""
STRETCH = 1.01
"""Below the 1 / 0.9 by which a rejected step shrinks, so that a stretched step that fails is not tried again."""


def _dopri5(velocity: Velocity, x: Tensor, t_span: tuple[float, float], rtol: float, atol: float) -> Solution:
    """Adaptive steps, one size a sample; finished samples wait with a step of length 0 for the rest."""
    start, stop = t_span
    # Times stay float64 so that many small steps add up; only `velocity` sees them in the state's dtype.
    t = torch.full(x.shape[:1], start, dtype=torch.float64, device=x.device)
    slope = velocity(x, t.to(x.dtype)).to(x.dtype)
    h = _first_step(velocity, x, t, slope, rtol, atol)
    nfe = torch.full_like(t, 2, dtype=torch.int64)
    while bool((unfinished := t < stop).any()):
        if bool((unfinished & ~(h > SMALLEST_STEP)).any()):
            raise UserError(f"evaluation.solver: dopri5's step vanished at t = {float(t[unfinished].min()):.6f}; "
                            "loosen evaluation.rtol and evaluation.atol, or use heun")
        # A step that all but reaches the end is stretched to it; what is cut off there may be as short as it likes.
        last = unfinished & (t + STRETCH * h >= stop)
        h = torch.where(last, stop - t, h)
        x_new, new_slope, error = _dopri5_step(velocity, x, t, torch.where(unfinished, h, 0), slope)
        ratio = _rms(error / (atol + rtol * torch.maximum(x.abs(), x_new.abs())))
        accepted = unfinished & (ratio <= 1)
        x, slope = _select(accepted, x_new, x), _select(accepted, new_slope, slope)
        t = torch.where(accepted, torch.where(last, stop, t + h), t)
        nfe += 6 * unfinished
        h = h * _growth(ratio, accepted)
    return Solution(x, nfe.cpu())


def _dopri5_step(velocity: Velocity, x: Tensor, t: Tensor, h: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    width = expand_like(h, x).to(x.dtype)
    slopes, point = [slope], x
    for c, row in zip(DP_C[1:], DP_A[1:]):
        point = x + width * sum(a * k for a, k in zip(row, slopes) if a)
        slopes.append(velocity(point, (t + c * h).to(x.dtype)).to(x.dtype))
    return point, slopes[-1], width * sum(e * k for e, k in zip(DP_E, slopes) if e)


def _first_step(velocity: Velocity, x: Tensor, t: Tensor, slope: Tensor, rtol: float, atol: float) -> Tensor:
    """First step size of each sample (Hairer, Norsett and Wanner, section II.4)."""
    scale = atol + rtol * x.abs()
    size, speed = _rms(x / scale), _rms(slope / scale)
    h = torch.where((size < 1e-5) | (speed < 1e-5), 1e-6, 0.01 * size / speed)
    ahead = velocity(x + expand_like(h, x).to(x.dtype) * slope, (t + h).to(x.dtype)).to(x.dtype)
    curvature = torch.maximum(_rms((ahead - slope) / scale) / h, speed)
    return torch.minimum(100 * h, (0.01 / curvature.clamp(min=1e-15)) ** 0.2)


def _growth(ratio: Tensor, accepted: Tensor) -> Tensor:
    factor = (0.9 * ratio.clamp(min=1e-10) ** -0.2).nan_to_num(0.2).clamp(0.2, 10)
    return torch.where(accepted, factor.clamp(min=1), factor.clamp(max=0.9))


def _rms(x: Tensor) -> Tensor:
    return x.double().square().flatten(1).mean(1).sqrt()


def _select(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(expand_like(mask, no), yes, no)


def _sbdm(path: Path, t: float) -> float:
    """D of the reverse of the noising process that has this path: w = g^2, beta_t for the VP path."""
    alpha, sigma, d_alpha, d_sigma = _coefficients(path, t)
    return d_alpha / alpha * sigma**2 - sigma * d_sigma if alpha > 0 else math.inf


DIFFUSIONS: dict[str, Callable[[Path, float], float]] = {
    "constant": lambda path, t: 1.0,
    "sbdm": _sbdm,
    "sigma": lambda path, t: _coefficients(path, t)[1],
    "linear": lambda path, t: 1 - t,
    "decreasing": lambda path, t: 0.25 * (math.cos(math.pi * t) + 1) ** 2,
    "increasing-decreasing": lambda path, t: math.sin(math.pi * t) ** 2,
}
"""D_t = w_t / 2 by name (SiT, Ma et al. 2024, table of diffusion coefficients)."""

MOST_RENEWED = 0.5
"""Largest D dt / sigma^2 of a stochastic step."""

LAST_STEPS = ("mean", "tweedie", "euler", "none")


def diffusion_coefficient(path: Path, name: str, t: float) -> float:
    """D_t >= 0 of the table, at one time; infinite for `sbdm` where alpha_t = 0.

    Raises:
        UserError: unknown name.
    """
    try:
        return DIFFUSIONS[name](path, t)
    except KeyError:
        raise UserError(f"evaluation.diffusion: no coefficient {name!r}; choose one of {', '.join(DIFFUSIONS)}") from None


def integrate_sde(velocity: Velocity, x_0: Tensor, *, path: Path, noise: Callable[[int], Tensor], diffusion: str = "sbdm",
                  steps: int = 250, last_step: str = "mean", last_step_size: float = 0.04, scale: float = 1.0,
                  dtype: torch.dtype = torch.float32, t_span: tuple[float, float] = (0.0, 1.0)) -> Solution:
    """Euler-Maruyama from `x_0` (B, ...) at t_span[0]; one velocity evaluation a step, the score is derived from it.

    The last of the `steps` is the one of length `last_step_size`, ending at t = 1:
    `mean` takes the drift without noise, `tweedie` jumps to E[x_1 | x_t], `euler` follows the ODE, `none` stops
    before it. With `last_step_size` 0 all steps are alike and go to t_span[1].

    D is capped so that one step renews at most half of the noise, D dt <= sigma^2 / 2: any w_t keeps the marginals,
    but an explicit step beyond that overshoots (`sbdm` at t = 0, `constant` near t = 1). The last step, which adds
    no noise, may remove all of it: D dt <= sigma^2, where `sigma` on the linear path lies exactly.

    Args:
        noise: i (0 for the first step) to a standard normal sample shaped like x_0.
        scale: factor on D_t.

    Raises:
        UserError: unknown coefficient or last-step rule, or only one step while the last one is set apart.
    """
    _check_last_step(last_step, last_step_size, steps)
    x, (start, stop) = x_0.to(dtype), t_span
    apart = last_step_size > 0
    times = _grid(start, 1 - last_step_size if apart else stop, steps - 1 if apart else steps)
    for i, (t, t_next) in enumerate(zip(times[:-1], times[1:])):
        dt = t_next - t
        d = _capped(path, diffusion, scale, t, dt, MOST_RENEWED)
        x = x + dt * _drift(velocity, x, path, t, d) + math.sqrt(2 * d * dt) * noise(i).to(x)
    if not apart or last_step == "none":
        return Solution(x, _constant_nfe(x, len(times) - 1))
    d = _capped(path, diffusion, scale, times[-1], last_step_size, 1.0)
    return Solution(_last(velocity, x, path, times[-1], d, last_step), _constant_nfe(x, steps))


def _check_last_step(rule: str, size: float, steps: int) -> None:
    if rule not in LAST_STEPS:
        raise UserError(f"evaluation.last_step: no rule {rule!r}; choose one of {', '.join(LAST_STEPS)}")
    if size > 0 and steps < 2:
        raise UserError("evaluation.steps: the SDE needs at least 2 steps when last_step_size is not 0")


def _last(velocity: Velocity, x: Tensor, path: Path, t: float, d: float, rule: str) -> Tensor:
    if rule == "tweedie":
        time = x.new_full(x.shape[:1], t)
        return decompose(path, "velocity", velocity(x, time).to(x.dtype), x, time)[0]
    return x + (1 - t) * _drift(velocity, x, path, t, d if rule == "mean" else 0.0)


def _drift(velocity: Velocity, x: Tensor, path: Path, t: float, d: float) -> Tensor:
    time = x.new_full(x.shape[:1], t)
    v = velocity(x, time).to(x.dtype)
    if d == 0:
        return v
    noise = decompose(path, "velocity", v, x, time)[1]
    return v - d / _coefficients(path, t)[1] * noise


def _capped(path: Path, diffusion: str, scale: float, t: float, dt: float, share: float) -> float:
    sigma = _coefficients(path, t)[1]
    return min(scale * diffusion_coefficient(path, diffusion, t), share * sigma**2 / dt)


def _coefficients(path: Path, t: float) -> tuple[float, float, float, float]:
    return tuple(float(c) for c in path.coefficients(torch.tensor(t, dtype=torch.float64)))
