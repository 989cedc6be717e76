"""Solvers against the closed form of Gaussian data, whose velocity and flow map are known exactly."""

import itertools
import math

import pytest
import torch

from vr_online.errors import UserError
from vr_online.flow.paths import PATHS, get_path
from vr_online.flow import solvers
from vr_online.flow.solvers import DIFFUSIONS, LAST_STEPS, diffusion_coefficient, integrate, integrate_sde

FACTOR = torch.tensor([[0.8, 0.0], [0.6, 0.3]], dtype=torch.float64)
COVARIANCE = FACTOR @ FACTOR.T
MEAN = torch.tensor([1.0, -0.5], dtype=torch.float64)
EIGENVALUES, EIGENVECTORS = torch.linalg.eigh(COVARIANCE)


def velocity_of(path):
    """E[v | x_t = x] for data N(MEAN, COVARIANCE): E[x_1 | x] and E[x_0 | x] by Gaussian conditioning."""

    def velocity(x, t):
        alpha, sigma, d_alpha, d_sigma = (c[:, None] for c in path.coefficients(t))
        centred = (x - alpha * MEAN) @ EIGENVECTORS / (alpha**2 * EIGENVALUES + sigma**2)
        x_1 = MEAN + (centred * alpha * EIGENVALUES) @ EIGENVECTORS.T
        return d_alpha * x_1 + d_sigma * (centred * sigma) @ EIGENVECTORS.T

    return velocity


def moments(path, t):
    """Mean and covariance of x_t."""
    t = torch.tensor(t, dtype=torch.float64)
    alpha, sigma = path.alpha(t), path.sigma(t)
    return alpha * MEAN, alpha**2 * COVARIANCE + sigma**2 * torch.eye(2, dtype=torch.float64)


def flow_map(path, x, start, stop):
    """Where the ODE carries x: along each principal axis, standardised positions stay as they are."""
    (mean, cov), (mean_stop, cov_stop) = moments(path, start), moments(path, stop)
    spread = [(EIGENVECTORS.T @ c @ EIGENVECTORS).diagonal().sqrt() for c in (cov, cov_stop)]
    return mean_stop + ((x - mean) @ EIGENVECTORS * spread[1] / spread[0]) @ EIGENVECTORS.T


def noise(n, seed=0):
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ode_error(name, solver, steps=1, stop=0.9, **options):
    path, x_0 = get_path(name), noise(32)
    solution = integrate(velocity_of(path), x_0, solver=solver, steps=steps, dtype=torch.float64, t_span=(0.0, stop), **options)
    return float((solution.x - flow_map(path, x_0, 0.0, stop)).abs().max()), solution


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("solver,order", [("euler", 1), ("heun", 2)])
def test_order_of_convergence(name, solver, order):
    errors = [ode_error(name, solver, steps)[0] for steps in (80, 160, 320)]
    assert errors[0] > 1e-8
    for coarse, fine in zip(errors, errors[1:]):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.15)


@pytest.mark.parametrize("name", PATHS)
def test_dopri5_reaches_its_tolerance(name):
    loose, few = ode_error(name, "dopri5", rtol=1e-3, atol=1e-3)
    tight, many = ode_error(name, "dopri5", rtol=1e-8, atol=1e-8)
    assert loose < 2e-2 and tight < 1e-6
    assert (many.nfe > few.nfe).all()


@pytest.mark.parametrize("name", ["linear", "gvp"])
def test_ode_ends_at_the_data(name):
    for solver in ("euler", "heun", "dopri5"):
        error, _ = ode_error(name, solver, steps=400, stop=1.0, rtol=1e-6, atol=1e-6)
        assert error < {"euler": 2e-2, "heun": 1e-4, "dopri5": 1e-4}[solver]


def test_polynomials_are_integrated_exactly():
    for solver, degree in (("euler", 0), ("heun", 1), ("dopri5", 4)):
        def velocity(x, t, k=degree):
            return (k + 1) * t[:, None] ** k + torch.zeros_like(x)

        x = integrate(velocity, torch.zeros(3, 2), solver=solver, steps=7, dtype=torch.float64).x
        torch.testing.assert_close(x, torch.ones(3, 2, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_dopri5_agrees_with_torchdiffeq_on_one_sample():
    odeint = pytest.importorskip("torchdiffeq").odeint
    velocity, x_0 = velocity_of(get_path("gvp")), noise(1)
    ours = integrate(velocity, x_0, solver="dopri5", rtol=1e-7, atol=1e-7, dtype=torch.float64).x
    times = torch.tensor([0.0, 1.0], dtype=torch.float64)
    theirs = odeint(lambda t, x: velocity(x, t.expand(1)), x_0, times, rtol=1e-7, atol=1e-7, method="dopri5")[-1]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)


def test_dopri5_has_torchdiffeqs_coefficients():
    """But for the error estimate, where torchdiffeq has Shampine's."""
    tableau = pytest.importorskip("torchdiffeq._impl.dopri5").Dopri5Solver.tableau
    assert solvers.DP_C[1:] == pytest.approx(tableau.alpha.tolist(), abs=1e-15)
    for ours, theirs in zip(solvers.DP_A[1:], tableau.beta, strict=True):
        assert ours == pytest.approx(theirs.tolist(), abs=1e-15)


def ends_of_steps(velocity, stop):
    """Times up to which dopri5 has gone after each step: the last of the 6 evaluations of one."""
    times = []

    def noting(x, t):
        times.append(float(t[0]))
        return velocity(x, t)

    x = integrate(noting, torch.ones(1, 2), solver="dopri5", rtol=1e-8, atol=1e-8, dtype=torch.float64, t_span=(0.0, stop)).x
    return times[7::6], x


@pytest.mark.parametrize("short", [1e-12, 5e-8, 9e-7, 1e-5, 1e-3])
def test_dopri5_ends_wherever_its_steps_happen_to_land(short):
    """An end just behind that of a step: what is left is no step that vanished."""

    def velocity(x, t):
        return -x

    steps, _ = ends_of_steps(velocity, 1.0)
    assert len(steps) > 2
    stop = steps[-2] + short
    there, x = ends_of_steps(velocity, stop)
    assert there[-1] == stop and there[:-2] == steps[: len(there) - 2]
    torch.testing.assert_close(x, torch.full_like(x, math.exp(-stop)), rtol=1e-6, atol=0)


def test_a_step_stretched_to_the_end_is_still_refused_where_it_is_too_long():
    """The field turns violent near the end: the steps that would reach it shrink."""

    def velocity(x, t):
        return torch.where(t > 0.9, 50.0 * torch.cos(400 * t), 0.0)[:, None].expand_as(x)

    ends, x = ends_of_steps(velocity, 1.0)
    assert ends.count(1.0) > 1 and sum(0.9 < end < 1 for end in ends) > 3
    exact = 1 + 50 / 400 * (math.sin(400) - math.sin(360))
    torch.testing.assert_close(x, torch.full_like(x, exact), rtol=0, atol=1e-4)


@pytest.mark.parametrize("solver", ["euler", "heun", "dopri5"])
def test_a_sample_does_not_depend_on_its_batch(solver):
    velocity, x_0 = velocity_of(get_path("linear")), noise(6)
    x_0[3] *= 30  # a neighbour that needs small steps
    together = integrate(velocity, x_0, solver=solver, steps=9, dtype=torch.float64)
    for i in range(len(x_0)):
        alone = integrate(velocity, x_0[i : i + 1], solver=solver, steps=9, dtype=torch.float64)
        torch.testing.assert_close(alone.x[0], together.x[i], rtol=1e-9, atol=1e-9)
        assert alone.nfe[0] == together.nfe[i]


@pytest.mark.parametrize("solver", ["euler", "heun", "dopri5"])
def test_evaluations_are_counted(solver):
    calls = []

    def velocity(x, t):
        calls.append(t)
        return -x

    nfe = integrate(velocity, noise(1), solver=solver, steps=5).nfe
    assert nfe.tolist() == [len(calls)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_and_time_have_the_asked_for_dtype(dtype):
    seen = set()

    def velocity(x, t):
        seen.update([x.dtype, t.dtype])
        return x.bfloat16()

    for solver in ("euler", "heun", "dopri5"):
        assert integrate(velocity, noise(2), solver=solver, steps=3, rtol=0.1, atol=0.1, dtype=dtype).x.dtype == dtype
    sde = integrate_sde(velocity, noise(2), path=get_path("linear"), noise=lambda i: noise(2, i), steps=3, dtype=dtype)
    assert sde.x.dtype == dtype and seen == {dtype}


def sde_deviation(name, diffusion, last_step, noise_factor=1.0, n=20_000):
    """Largest deviation of mean and covariance from the marginal's, in standard errors."""
    path, size = get_path(name), 0.01
    generator = torch.Generator().manual_seed(1)
    mean, cov = moments(path, 0.0)
    x_0 = mean + torch.randn(n, 2, generator=generator, dtype=torch.float64) @ torch.linalg.cholesky(cov).T
    x = integrate_sde(
        velocity_of(path), x_0, path=path, diffusion=diffusion, last_step=last_step, last_step_size=size, steps=200,
        noise=lambda i: noise_factor * torch.randn(n, 2, generator=generator), dtype=torch.float64,
    ).x  # fmt: skip
    mean, cov = moments(path, 1 - size if last_step == "none" else 1.0)
    mean_error = (x.mean(0) - mean) / (cov.diagonal() / n).sqrt()
    cov_error = (torch.cov(x.T) - cov) / ((cov.diagonal()[:, None] * cov.diagonal() + cov**2) / n).sqrt()
    return float(mean_error.abs().max()), float(cov_error.abs().max())


@pytest.mark.parametrize("name,diffusion", itertools.product(PATHS, DIFFUSIONS))
def test_sde_keeps_the_marginals(name, diffusion):
    assert max(sde_deviation(name, diffusion, "mean")) < 4


@pytest.mark.parametrize("name,last_step", itertools.product(PATHS, LAST_STEPS))
def test_every_last_step_keeps_the_marginals(name, last_step):
    assert max(sde_deviation(name, "sigma", last_step)) < 4


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("wrong", [math.sqrt(0.5), math.sqrt(2)])
def test_another_noise_scale_would_be_noticed(name, wrong):
    """sqrt(w) mistaken for sqrt(2 w), or the reverse, moves the covariance by far more than 4 standard errors."""
    assert sde_deviation(name, "sigma", "none", noise_factor=wrong)[1] > 10


def test_sbdm_on_the_vp_path_is_half_of_beta():
    for t in (0.0, 0.3, 0.9):
        assert 2 * diffusion_coefficient(get_path("vp"), "sbdm", t) == pytest.approx(20 + (0.1 - 20) * t, rel=1e-6)


def test_sbdm_on_the_linear_path():
    assert diffusion_coefficient(get_path("linear"), "sbdm", 0.25) == pytest.approx(0.75 / 0.25)


@pytest.mark.parametrize("name", DIFFUSIONS)
@pytest.mark.parametrize("path", PATHS)
def test_diffusion_is_never_negative(name, path):
    assert all(diffusion_coefficient(get_path(path), name, i / 20) >= 0 for i in range(20))


def test_sde_without_a_last_step_reaches_the_data():
    """Every step is alike and no coefficient is evaluated at t = 1."""
    times = []

    def velocity(x, t):
        times.append(float(t[0]))
        return velocity_of(get_path("linear"))(x, t)

    solution = integrate_sde(velocity, noise(4), path=get_path("linear"), noise=lambda i: noise(4, i), steps=10,
                             last_step_size=0.0, dtype=torch.float64)  # fmt: skip
    assert times == pytest.approx([i / 10 for i in range(10)])
    assert solution.x.isfinite().all() and solution.nfe.tolist() == [10] * 4


@pytest.mark.parametrize("rule,count", [("mean", 8), ("tweedie", 8), ("euler", 8), ("none", 7)])
def test_sde_evaluations_are_counted(rule, count):
    calls = []

    def velocity(x, t):
        calls.append(t)
        return -x

    nfe = integrate_sde(velocity, noise(2), path=get_path("gvp"), noise=lambda i: noise(2, i), steps=8, last_step=rule).nfe
    assert nfe.tolist() == [count] * 2 and len(calls) == count


def test_wrong_settings_name_their_key():
    def sde(**options):
        integrate_sde(lambda x, t: x, noise(1), path=get_path("linear"), noise=noise, **options)

    with pytest.raises(UserError, match="evaluation.solver.*heun"):
        integrate(lambda x, t: x, noise(1), solver="rk4")
    with pytest.raises(UserError, match="evaluation.diffusion.*sbdm"):
        sde(diffusion="cosine")
    with pytest.raises(UserError, match="evaluation.last_step.*tweedie"):
        sde(last_step="last")
    with pytest.raises(UserError, match="evaluation.steps"):
        sde(steps=1)


def test_dopri5_stops_on_an_impossible_problem():
    with pytest.raises(UserError, match="dopri5's step vanished at t"):
        integrate(lambda x, t: x * float("nan"), noise(2), solver="dopri5")
