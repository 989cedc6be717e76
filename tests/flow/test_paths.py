"""Paths and targets: end points, derivatives and exact conversions."""

import itertools

import pytest
import torch

from vr_online.errors import UserError
from vr_online.flow.paths import PATHS, T_MAX, get_path
from vr_online.flow.targets import PREDICTIONS, QUANTITIES, Flow, convert

INNER = torch.linspace(0.02, 0.98, 25, dtype=torch.float64)


def pair(batch=len(INNER), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, 2, 3, 3, generator=generator, dtype=torch.float64) for _ in range(2))


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_at_zero_and_data_at_one(name, dtype):
    path, ends = get_path(name), torch.tensor([0.0, 1.0], dtype=dtype)
    alpha, sigma = path.alpha(ends), path.sigma(ends)
    assert alpha.dtype == sigma.dtype == dtype
    assert alpha[1] == pytest.approx(1, abs=1e-6) and sigma[1] == 0
    assert 0 <= alpha[0] < 0.007 and sigma[0] == pytest.approx(1, abs=1e-4)
    assert (path.alpha(INNER).diff() > 0).all() and (path.sigma(INNER).diff() < 0).all()


@pytest.mark.parametrize("name", PATHS)
def test_derivatives_are_those_of_the_coefficients(name):
    path = get_path(name)
    for function, derivative in ((path.alpha, path.d_alpha), (path.sigma, path.d_sigma)):
        t = INNER.clone().requires_grad_()
        (slope,) = torch.autograd.grad(function(t).sum(), t)
        torch.testing.assert_close(derivative(INNER), slope, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["gvp", "vp"])
def test_variance_is_preserved(name):
    path = get_path(name)
    torch.testing.assert_close(path.alpha(INNER) ** 2 + path.sigma(INNER) ** 2, torch.ones_like(INNER))


def test_vp_is_the_linear_beta_schedule():
    """d log alpha / dt = beta / 2 with beta falling from 20 at noise to 0.1 at data."""
    path = get_path("vp")
    t = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(2 * path.d_alpha(t) / path.alpha(t), torch.tensor([20.0, 10.05, 0.1], dtype=torch.float64))


@pytest.mark.parametrize("name", PATHS)
def test_everything_is_finite_on_the_closed_interval_in_float32(name):
    t = torch.tensor([0.0, 1e-7, 0.5, T_MAX, 1 - 1e-7, 1.0])
    x_1, x_0 = (x.float() for x in pair(len(t)))
    point = get_path(name).interpolate(x_1, x_0, t)
    assert point.x_t.isfinite().all() and point.v.isfinite().all()
    for prediction in PREDICTIONS:
        flow = Flow(get_path(name), prediction)
        x_t, target = flow.sample(x_1, x_0, t)
        assert all(flow.convert(target, kind, x_t, t).isfinite().all() for kind in QUANTITIES)


@pytest.mark.parametrize("name", PATHS)
def test_velocity_is_the_motion_of_the_interpolant(name):
    path, (x_1, x_0), h = get_path(name), pair(), 1e-5
    ahead, behind = (path.interpolate(x_1, x_0, INNER + s).x_t for s in (h, -h))
    torch.testing.assert_close(path.interpolate(x_1, x_0, INNER).v, (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name,source,target", itertools.product(PATHS, QUANTITIES, QUANTITIES))
def test_conversions_are_exact(name, source, target):
    path, (x_1, x_0) = get_path(name), pair()
    point = path.interpolate(x_1, x_0, INNER)
    truth = {"velocity": point.v, "noise": x_0, "data": x_1, "score": -x_0 / point.sigma}
    converted = convert(path, truth[source], source, target, point.x_t, INNER)
    torch.testing.assert_close(converted, truth[target], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name,prediction", itertools.product(PATHS, PREDICTIONS))
def test_flow_turns_a_perfect_network_into_the_velocity(name, prediction):
    flow, (x_1, x_0) = Flow(get_path(name), prediction), pair()
    x_t, target = flow.sample(x_1, x_0, INNER)
    torch.testing.assert_close(flow.velocity(target, x_t, INNER), get_path(name).interpolate(x_1, x_0, INNER).v, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(flow.data(target, x_t, INNER), x_1, rtol=1e-8, atol=1e-8)


def test_loss_is_one_float32_number_a_sample_and_ignores_learned_sigma():
    flow = Flow(get_path("linear"))
    target = torch.randn(4, 2, 3, 3)
    offset = torch.tensor([0.0, 1.0, 2.0, 3.0])
    output = torch.cat([target + offset[:, None, None, None], torch.full_like(target, 1e4)], dim=1)
    loss = flow.loss(output, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, offset**2)
    torch.testing.assert_close(flow.loss(output.bfloat16(), target), offset**2, rtol=0.05, atol=0.01)


def test_low_precision_outputs_convert_in_float32():
    flow = Flow(get_path("linear"), "data")
    x_t, t = torch.randn(3, 1, 2, 2), torch.full((3,), 0.5)
    assert flow.velocity(x_t.bfloat16(), x_t, t).dtype == torch.float32


def test_shapes_that_do_not_fit_are_refused():
    path = get_path("linear")
    with pytest.raises(ValueError, match="do not fit"):
        path.interpolate(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2))
    with pytest.raises(ValueError, match="do not fit"):
        path.interpolate(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3))


def test_unknown_names_are_refused_with_the_choices():
    with pytest.raises(UserError, match="linear, gvp, vp"):
        get_path("cosine")
    with pytest.raises(UserError, match="velocity, noise, data"):
        Flow(get_path("linear"), "score")
