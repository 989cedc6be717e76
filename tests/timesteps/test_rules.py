"""The learned targets against closed forms and quadrature."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vr_online.config import ConfigError, TimestepConfig, validate
from vr_online.flow.paths import get_path
from vr_online.timesteps import OnlineSampler, rules
from vr_online.timesteps.statistics import BinStatistics

PATHS, PREDICTIONS = ["linear", "gvp", "vp"], ["velocity", "noise", "data"]


def loss_of(mmse, t, path, prediction):
    """The loss of a denoiser of x_1 with the given error."""
    alpha, sigma, d_alpha, d_sigma = path.coefficients(t)
    return {"velocity": (d_alpha - alpha * d_sigma / sigma) ** 2, "data": 1.0, "noise": (alpha / sigma) ** 2}[prediction] * mmse


def context_of(loss, path="linear", prediction="velocity", **fields) -> rules.Context:
    stats = BinStatistics(len(loss), 0, 1e6)
    zero = torch.zeros_like(loss)
    stats.fold(torch.stack([zero + 1, zero, loss, zero, zero], 1), len(loss), None)
    context = rules.Context(stats.view(), path=get_path(path), prediction=prediction)
    for name, value in fields.items():
        setattr(context.view, name, value)
    return context


def centers(bins: int) -> torch.Tensor:
    return (torch.arange(bins, dtype=torch.float64) + 0.5) / bins


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_nothing_is_learnable_beyond_a_linear_denoiser_in_gaussian_data(path, prediction):
    """The live loss of N(0, 1) is the linear denoiser's, so what is left is the tenth that no bin goes below."""
    t, form = centers(400), get_path(path)
    mmse = form.sigma(t) ** 2 / (form.alpha(t) ** 2 + form.sigma(t) ** 2)
    loss = loss_of(mmse, t, form, prediction)
    got = rules.learnable(context_of(loss, path, prediction), 1.0, 0.0)
    inside = slice(20, -20)
    torch.testing.assert_close(got[inside], 0.1 * loss[inside], rtol=5e-2, atol=0)


@pytest.mark.parametrize("path", ["linear", "gvp"])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_tilt_one_integrates_over_log_snr_to_the_negentropy(path, prediction, monkeypatch):
    """Data: a mixture of N(-m, s^2) and N(m, s^2) of variance 1; the divergence from N(0, 1) by quadrature."""
    monkeypatch.setattr(rules, "_LEAST", 0.0)
    m, s2 = 0.9, 1 - 0.9**2
    form, t = get_path(path), centers(2000)
    alpha, sigma = form.alpha(t)[:, None], form.sigma(t)[:, None]
    x = torch.linspace(-6, 6, 4001, dtype=torch.float64)[None] * torch.sqrt(alpha**2 + sigma**2)
    spread = alpha**2 * s2 + sigma**2
    parts = [torch.exp(-((x - sign * alpha * m) ** 2) / (2 * spread)) / torch.sqrt(2 * torch.pi * spread) / 2 for sign in (-1, 1)]
    means = [sign * m + alpha * s2 / spread * (x - sign * alpha * m) for sign in (-1, 1)]
    density = parts[0] + parts[1]
    mean = (parts[0] * means[0] + parts[1] * means[1]) / density.clamp(min=1e-300)
    mmse = 1 - (density * mean**2).sum(1) * (x[:, 1] - x[:, 0])

    rate = rules.learnable(context_of(loss_of(mmse, t, form, prediction), path, prediction), 1.0, 1.0)
    log_snr = 2 * torch.log(form.alpha(t) / form.sigma(t))
    inside = slice(20, -20)  # at the ends a bin's mean of the snr is not that of its middle
    got = torch.trapezoid(rate[inside], log_snr[inside])

    y = torch.linspace(-8, 8, 20001, dtype=torch.float64)
    p = sum(torch.exp(-((y - sign * m) ** 2) / (2 * s2)) for sign in (-1, 1)) / (2 * np.sqrt(2 * np.pi * s2))
    gauss = torch.exp(-(y**2) / 2) / np.sqrt(2 * np.pi)
    negentropy = torch.trapezoid(p * torch.log(p.clamp(min=1e-300) / gauss), y)
    assert got.item() == pytest.approx(negentropy.item(), rel=0.02)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_information_of_gaussian_data_per_log_snr(path, prediction):
    """d/d log snr of log(1 + snr) / 2 is snr / (1 + snr) / 2."""
    t, form = centers(400), get_path(path)
    snr = (form.alpha(t) / form.sigma(t)) ** 2
    got = rules.information(context_of(loss_of(1 / (1 + snr), t, form, prediction), path, prediction), 1.0)
    inside = slice(20, -20)
    torch.testing.assert_close(got[inside], (snr / (1 + snr) / 2)[inside], rtol=2e-2, atol=0)


def test_learnable_at_the_start_of_a_run_is_the_linear_denoisers_loss():
    """With nothing learnt every bin counts for a tenth of it, so a run begins with a bell, not with its first lucky bin."""
    t = centers(32)
    got = rules.learnable(context_of(torch.full((32,), 2.0).double()), 2.0, 0.0)
    torch.testing.assert_close(got / got.max(), (0.5 / (t**2 + (1 - t) ** 2)) ** 2, rtol=2e-2, atol=0)


def with_history(losses_at, images, bins=4):
    context = context_of(torch.ones(bins).double())
    for i, n in enumerate(images):
        context.view.history.record(i * context.view.history.every, n, losses_at(n), torch.ones(bins).double())
    return context


def test_progress_is_the_fall_per_doubling():
    rates = torch.tensor([0.3, 0.2, 0.1, 0.05]).double()
    context = with_history(lambda n: 2 - rates * np.log2(n), range(100, 3000, 100))
    torch.testing.assert_close(rules.progress(context, 1.0), rates)
    torch.testing.assert_close(rules.progress(context, 0.5), rates.sqrt())


def test_progress_looks_at_the_last_half_and_forgets_no_bin():
    """A fall that is over counts for nothing but the tenth; a rise no more than that."""
    stop = torch.tensor([0.0, 1.0, 1.0, -1.0]).double()
    context = with_history(lambda n: torch.where(stop > 0, 1000.0 / n, stop * (3000.0 / n if n > 1400 else 1.0)), range(100, 3000, 100))
    got = rules.progress(context, 1.0)
    assert got[0] == got[3] == pytest.approx(0.1 * float(got[1] + got[2]) / 4) and got[1] == got[2]


def test_progress_is_even_while_little_is_known():
    assert torch.equal(rules.progress(with_history(lambda n: torch.rand(4).double(), [100, 200]), 1.0), torch.ones(4).double())


def test_frontier_is_a_product():
    context = with_history(lambda n: torch.tensor([0.9, 1.2, 1.3, 0.8]).double() / n**0.1, range(100, 3000, 100))
    both = rules.frontier(context, 2.0, 0.5, 0.7)
    torch.testing.assert_close(both, rules.learnable(context, 2.0, 0.5) * rules.progress(context, 0.7))


def test_signal_and_agreement_of_known_gradients():
    mean = torch.tensor([[3.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]).double()
    context = context_of(
        torch.ones(4).double(), mean_sketch=mean, signal=torch.tensor([9.0, 1.0, 1.0, 1.0]).double(),
        grad_var=torch.tensor([1.0, 2.0, 4.0, 1.0]).double(), grad_sq=torch.tensor([4.0, 1.0, 1.0, 1.0]).double(),
    )
    torch.testing.assert_close(rules.signal(context, 1.0), torch.tensor([9.0, 0.5, 0.25, 1.0]).double())
    whole = torch.tensor([0.75, 0.25]).double()
    torch.testing.assert_close(rules.agreement(context, 1.0), torch.tensor([2.25 / 2, 0.75, 0.0, 0.25]).double())
    torch.testing.assert_close(rules.agreement(context, 2.0), ((mean @ whole) / context.view.grad_sq.sqrt()).clamp(min=0) ** 2)


@pytest.mark.parametrize("between, shares", [([256, 512], [0, 0, 0, 0, 0, 0.25, 0.5, 0.75, 1, 1]), ([320, 320], [0] * 5 + [1] * 5)])
def test_an_annealed_target_gives_way_to_uniform(between, shares):
    sampler = OnlineSampler(TimestepConfig(target="logit_normal(1, 1)", proposal="same", bins=8, anneal=between), batch_size=64)
    plain = OnlineSampler(TimestepConfig(target="logit_normal(1, 1)", proposal="same", bins=8), batch_size=64)
    for share in shares:
        sampler.draw()
        torch.testing.assert_close(sampler.q, (1 - share) * plain.q + share / 8)
        sampler.commit()


@pytest.mark.parametrize("between", [[3, 2], [-1, 2], [1]])
def test_a_wrong_annealing_is_refused(between):
    with pytest.raises(ConfigError, match="timesteps.anneal"):
        validate({"timesteps": {"anneal": between}})
