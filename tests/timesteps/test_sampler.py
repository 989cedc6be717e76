"""The sampler: right expectations, the best allocation, and nothing lost in corner cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from vr_online.config import ProbeConfig, TimestepConfig
from vr_online.errors import UserError
from vr_online.flow.paths import get_path
from vr_online.timesteps import OnlineSampler, attach_probe
from vr_online.timesteps import proposal as prop

ALL_LAYERS = ProbeConfig(k=8, layers=["*"])


class Regression:
    """Linear regression whose residual at t in bin b has standard deviation SPREAD[b] in each of m = 8 outputs, and
    mean MEAN[b] in the first.

    The input is 1, so with loss = mean squared residual the gradient of a sample is -2 / m times its residual: its
    variance is 4 SPREAD^2 / m, its second moment 4 (m SPREAD^2 + MEAN^2) / m^2, and the sketch is
    exact because k spans the layer. Weights stay where they are.
    """

    D, M = 1, 8
    SPREAD = torch.tensor([1.0, 0.3, 2.0, 0.7])
    MEAN = torch.tensor([0.0, 4.0, 3.0, 0.5])
    GRAD_VAR = (4 / M * SPREAD.square()).double()
    GRAD_SQ = (4 / M**2 * (M * SPREAD.square() + MEAN.square())).double()

    def __init__(self, seed: int = 0, probe: bool = True, **config) -> None:
        self.model = nn.Linear(self.D, self.M, bias=False)
        nn.init.zeros_(self.model.weight)
        settings = dict(target="uniform", proposal="online_vr", bins=4, smooth=0.0, floor=0.02, half_life=1e6, probe=ALL_LAYERS)
        self.config = TimestepConfig(**{**settings, **config})
        self.probe = attach_probe(self.model, ALL_LAYERS) if probe else None
        self.sampler = OnlineSampler(self.config, probe=self.probe, batch_size=64, seed=seed, path=get_path("linear"))
        self.generator = torch.Generator().manual_seed(seed)

    def losses(self, draw):
        noise = torch.randn(len(draw.t), self.M, generator=self.generator)
        target = self.SPREAD[draw.bin][:, None] * noise
        target[:, 0] += self.MEAN[draw.bin]
        return (self.model(torch.ones(len(draw.t), self.D)) - target).square().mean(1)

    def step(self) -> torch.Tensor:
        """One step without an optimizer; the gradient, flat."""
        self.model.zero_grad()
        draw = self.sampler.draw()
        losses = self.losses(draw)
        (draw.weight * losses).mean().backward()
        self.sampler.update(draw, losses)
        self.sampler.commit()
        return self.model.weight.grad.flatten().clone()

    def steps(self, count: int) -> torch.Tensor:
        return torch.stack([self.step() for _ in range(count)])


# Expectations

TARGETS = ["uniform", "logit_normal(0, 1)", "beta(2, 3)"]
PROPOSALS = ["same", "uniform", "logit_normal(-0.75, 1)", "shift(3)"]


@pytest.mark.parametrize("draws", ["stratified", "iid"])
@pytest.mark.parametrize("target, proposal", itertools.product(TARGETS, PROPOSALS))
def test_weighted_means_under_p_are_integrals_under_q(target, proposal, draws):
    config = TimestepConfig(target=target, proposal=proposal, draws=draws, bins=16)
    sampler = OnlineSampler(config, batch_size=64)
    batches = [sampler.draw() for _ in range(144)]
    t = torch.stack([d.t for d in batches]).double()
    w = torch.stack([d.weight for d in batches]).double()
    fine = (torch.arange(1600, dtype=torch.float64) + 0.5) / 1600
    density = sampler.q.repeat_interleave(100) / 100
    for f in (lambda t: t, lambda t: torch.sin(9 * t), lambda t: (t > 0.8).double(), lambda t: 1 / (t + 0.05)):
        means = (w * f(t)).mean(1)
        assert abs(means.mean() - (density * f(fine)).sum()) < 4 * means.std() / 12 + 1e-4


@pytest.mark.parametrize("correction", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("floor", [0.02, 0.2, 1.0])
def test_weights_are_bounded_and_of_mean_one(correction, floor):
    torch.manual_seed(0)
    for _ in range(50):
        q = torch.rand(9, dtype=torch.float64).pow(8)
        q = q / q.sum()
        extreme = torch.nn.functional.one_hot(torch.randint(9, ()), 9).double()
        p = prop.mixed(extreme, q, floor)
        w = prop.importance_weights(q, p, correction)
        assert (p * w).sum() == pytest.approx(1)
        assert (w <= 1 / floor * (1 + 1e-12)).all() and (w > 0).all()
        assert 0 < prop.effective_share(p, w) <= 1 + 1e-12
    assert correction > 0 or torch.equal(w, torch.ones_like(w))


def test_full_correction_is_the_ratio():
    q, p = torch.tensor([0.2, 0.8]).double(), torch.tensor([0.5, 0.5]).double()
    assert prop.importance_weights(q, p, 1.0).tolist() == pytest.approx([0.4, 1.6])


@pytest.mark.parametrize("correction, biased", [(1.0, False), (0.0, True)])
@pytest.mark.parametrize("draws", ["stratified", "iid"])
def test_weighted_gradient_is_unbiased_for_q_exactly_when_corrected(correction, biased, draws):
    problem = Regression(correction=correction, draws=draws, target="beta(2, 1)")
    problem.steps(20)
    assert not torch.allclose(problem.sampler.p, problem.sampler.q, atol=0.05)
    gradients = problem.steps(400).double()[:, 0]
    exact = (problem.sampler.q * -2 / problem.M * problem.MEAN.double()).sum()
    error = (gradients.mean() - exact).abs() / (gradients.std() / 20)
    assert (error > 8) if biased else (error < 4)


# The best allocation


@pytest.mark.parametrize("draws", ["stratified", "iid"])
@pytest.mark.parametrize("target", ["uniform", "logit_normal(0.5, 1)"])
def test_proposal_converges_to_the_best_allocation(draws, target):
    problem = Regression(draws=draws, target=target, floor=0.001)
    problem.steps(200)
    truth = problem.GRAD_VAR if draws == "stratified" else problem.GRAD_SQ
    best = problem.sampler.q * truth.sqrt()
    torch.testing.assert_close(problem.sampler.p, best / best.sum(), rtol=0.05, atol=0)
    view = problem.sampler.statistics.view()
    torch.testing.assert_close(view.grad_var, problem.GRAD_VAR, rtol=0.1, atol=0)
    torch.testing.assert_close(view.grad_sq, problem.GRAD_SQ, rtol=0.1, atol=0)


@pytest.mark.parametrize("draws", ["stratified", "iid"])
def test_measured_gradient_variance_falls_by_the_predicted_gain(draws):
    adapted, plain = Regression(draws=draws), Regression(draws=draws, proposal="same", seed=1)
    adapted.steps(30), plain.steps(30)
    count = 500
    measured = adapted.steps(count).var(0).sum() / plain.steps(count).var(0).sum()
    metrics = adapted.sampler.metrics()
    error = measured * 2 / (count * Regression.M) ** 0.5
    assert metrics["gain"] + 5 * error < 1
    assert abs(measured - metrics["gain"]) < 4 * error
    assert abs(metrics["achieved"] - metrics["gain"]) < 4 * metrics["achieved_error"]
    assert metrics["achieved_error"] < 0.2 * metrics["achieved"]
    assert metrics["best_gain"] <= metrics["gain"] + 1e-9 and metrics["can_pay"] == 1
    assert "adapting pays" in adapted.sampler.verdict()


def test_says_so_where_adapting_cannot_pay():
    problem = Regression()
    problem.SPREAD = torch.ones(4)
    problem.steps(80)
    metrics = problem.sampler.metrics()
    assert metrics["can_pay"] == 0 and metrics["best_gain"] > 0.97
    assert "cannot pay" in problem.sampler.verdict()


def test_importance_weights_scale_and_accumulation_do_not_reach_the_statistics():
    """The same samples give the same statistics whatever p, the weights, the scale and the number of micro-batches."""

    def sums(proposal, accumulation, scale):
        problem = Regression(proposal=proposal)
        sampler = OnlineSampler(problem.config, probe=problem.probe, accumulation=accumulation, batch_size=64)
        for micro in range(accumulation):
            draw = sampler.draw()
            draw.bin = torch.arange(64).chunk(accumulation)[micro] % 4
            losses = problem.losses(draw)
            factor = 1 / accumulation if scale is None else scale
            ((draw.weight * losses).mean() * factor).backward()
            sampler.update(draw, losses, scale)
        sampler.commit()
        sampler.metrics()
        return sampler.statistics.sums

    reference = sums("same", 1, None)
    assert reference[:, 4].min() > 0
    for other in (sums("beta(2, 1)", 1, None), sums("same", 4, None), sums("beta(1, 3)", 2, torch.tensor(1024.0))):
        torch.testing.assert_close(other, reference, rtol=1e-4, atol=1e-4)


# Learned targets


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_grad_variance_target_follows_the_variance_to_its_power(power):
    problem = Regression(target=f"grad_variance({power})", proposal="same", target_floor=0.01)
    problem.steps(150)
    expected = problem.GRAD_VAR**power / (problem.GRAD_VAR**power).sum()
    torch.testing.assert_close(problem.sampler.q, 0.99 * expected + 0.01 / 4, rtol=0.1, atol=1e-3)
    assert torch.equal(problem.sampler.q, problem.sampler.p)


@pytest.mark.parametrize("path", ["linear", "gvp", "vp"])
@pytest.mark.parametrize("prediction", ["velocity", "noise", "data"])
def test_entropy_rate_of_gaussian_data_is_its_closed_form(path, prediction):
    """For x_1 ~ N(0, s^2), information about x_1 is log(1 + snr s^2) / 2, so its rate is known exactly."""
    from vr_online.timesteps import rules
    from vr_online.timesteps.statistics import BinStatistics

    path, s2, bins = get_path(path), 0.5, 400
    stats = BinStatistics(bins, 0, 1e6)
    t = stats.centers
    alpha, sigma, d_alpha, d_sigma = path.coefficients(t)
    mmse = s2 * sigma**2 / (alpha**2 * s2 + sigma**2)
    loss = {"velocity": (d_alpha - alpha * d_sigma / sigma) ** 2, "data": 1.0, "noise": (alpha / sigma) ** 2}[prediction] * mmse
    stats.fold(torch.stack([torch.ones_like(t), 0 * t, loss, 0 * t, 0 * t], 1), bins, None)
    context = rules.Context(stats.view(), path=path, prediction=prediction)
    c = 0.15
    got = rules.entropy_rate(context, c)

    def information(t):
        return 0.5 * torch.log1p(s2 * (path.alpha(t) / path.sigma(t)) ** 2)

    inside = slice(10, -10)
    exact = (information(t + 1e-5) - information(t - 1e-5)) / 2e-5 * sigma**2 / (sigma**2 + c**2)
    torch.testing.assert_close(got[inside], exact[inside], rtol=2e-2, atol=0)


def test_a_learned_target_is_uniform_until_it_knows():
    problem = Regression(target="grad_variance", proposal="online_vr", warmup=30)
    problem.step()
    problem.sampler.draw()
    assert torch.equal(problem.sampler.q, torch.full((4,), 0.25).double()) and torch.equal(problem.sampler.p, problem.sampler.q)
    assert "warming up" in problem.sampler.verdict()
    problem.probe.disarm()
    problem.sampler.commit()


# Published baselines


def feed(sampler, losses_by_step):
    """Steps whose sample i is in bin i, with the losses given."""
    for losses in losses_by_step:
        draw = sampler.draw(len(losses))
        sampler.update(draw, torch.tensor(losses)[draw.bin])
        sampler.commit()
    sampler.draw(2)


def test_loss_second_moment_is_the_root_of_the_mean_of_the_last_ten_squares():
    # A new proposal only every 19 steps, so that until then each step has one sample in each of the two bins.
    sampler = OnlineSampler(TimestepConfig(bins=2, target="uniform", proposal="loss_second_moment", floor=0.001, smooth=0, update_every=19))
    feed(sampler, [[5.0, 7.0]] * 9)
    sampler.commit()
    sampler._refresh()
    assert torch.equal(sampler.p, sampler.q)  # nine losses of ten: still uniform, as published
    sampler.step -= 1
    # Ten more steps push all the early ones out. Worked by hand: bin 0 holds 1..10, mean square 38.5; bin 1 holds
    # nine 2s and a 6, mean square (9 * 4 + 36) / 10 = 7.2.
    feed(sampler, [[float(i + 1), 2.0 if i else 6.0] for i in range(10)])
    expected = np.sqrt([38.5, 7.2])
    expected = 0.999 * expected / expected.sum() + 0.001 / 2
    np.testing.assert_allclose(sampler.p.numpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(sampler.weight.numpy(), 0.5 / expected, rtol=1e-6)


def test_loss_ema_is_proportional_to_the_running_mean():
    config = TimestepConfig(bins=2, proposal="loss_ema", floor=0.001, smooth=0)
    sampler = OnlineSampler(config)
    feed(sampler, [[3.0, 0.5]] * 2)
    # From 1, each visit moves the mean by a thousandth of the way to its loss.
    expected = np.array([3 - 2 * 0.999**2, 0.5 + 0.5 * 0.999**2])
    expected = 0.999 * expected / expected.sum() + 0.001 / 2
    np.testing.assert_allclose(sampler.p.numpy(), expected, rtol=1e-6)


# Switches


@pytest.mark.parametrize("spec", ["logit_normal(1, 0.5)", "mode(1)", "cosmap", "shift(3)", "beta(3, 1)"])
def test_each_density_moves_what_it_names(spec):
    """As target it moves t and, against a uniform proposal, the weights; as proposal it moves t and the weights."""

    def drawn(**config):
        draw = OnlineSampler(TimestepConfig(**config), batch_size=512).draw()
        return draw.t.sort().values, draw.weight

    uniform_t, uniform_w = drawn(proposal="same")
    t, w = drawn(target=spec, proposal="same")
    assert not torch.allclose(t, uniform_t, atol=0.02) and torch.equal(w, uniform_w)
    t, w = drawn(target=spec, proposal="uniform")
    assert w.std() > 0.1
    t, w = drawn(proposal=spec)
    assert not torch.allclose(t, uniform_t, atol=0.02) and w.std() > 0.1
    t, w = drawn(proposal=spec, correction=0.0)
    assert not torch.allclose(t, uniform_t, atol=0.02) and torch.equal(w, uniform_w)


def test_update_every_holds_the_proposal():
    problem = Regression(update_every=5, warmup=1)
    held = []
    for _ in range(20):
        problem.step()
        held.append(problem.sampler.p.clone())
    changed = [i for i in range(1, 20) if not torch.equal(held[i], held[i - 1])]
    assert changed == [5, 10, 15]


def test_what_is_missing_is_named():
    with pytest.raises(UserError, match="proposal: online_vr needs a probe"):
        OnlineSampler(TimestepConfig(proposal="online_vr"))
    with pytest.raises(UserError, match="target: signal.* needs a probe"):
        OnlineSampler(TimestepConfig(target="signal", proposal="same"))
    with pytest.raises(ValueError, match="micro_batch_size"):
        OnlineSampler(TimestepConfig(proposal="same")).draw()
    sampler = OnlineSampler(TimestepConfig(proposal="same"))
    with pytest.raises(ValueError, match="per_sample_loss has shape"):
        sampler.update(sampler.draw(4), torch.ones(()))


# Corner cases


def test_one_bin():
    problem = Regression(bins=1)
    problem.SPREAD, problem.MEAN = torch.ones(1), torch.zeros(1)
    problem.steps(20)
    metrics = problem.sampler.metrics()
    assert problem.sampler.p.tolist() == [1.0] and metrics["gain"] == pytest.approx(1) and metrics["ess"] == 1


def test_a_bin_that_is_never_visited_keeps_p_at_q_and_everything_finite():
    problem = Regression()
    for _ in range(40):
        draw = problem.sampler.draw()
        draw.bin = draw.bin.clamp(max=2)
        losses = problem.losses(draw)
        (draw.weight * losses).mean().backward()
        problem.sampler.update(draw, losses)
        problem.sampler.commit()
    snapshot, metrics = problem.sampler.snapshot(), problem.sampler.metrics()
    assert metrics["ready"] == 0 and metrics["n_eff_min"] == 0
    assert all(np.isfinite(v).all() for v in snapshot.values())
    np.testing.assert_array_equal(snapshot["p"], snapshot["q"])
    assert snapshot["age"][3] == metrics["age_max"] == 40 * 64


def test_a_bin_outside_the_target_does_not_hold_up_the_rest(tmp_path):
    from vr_online.timesteps.densities import write_table

    file = tmp_path / "half.json"
    write_table(file, np.linspace(0, 1, 5), np.array([0.0, 1.0, 1.0, 1e-9]))
    problem = Regression(target=f"table({file})")
    problem.steps(30)
    assert problem.sampler.metrics()["ready"] == 1
    assert problem.sampler.p[0] == 0 and problem.sampler.p[2] > 1.5 * problem.sampler.p[1]
    assert problem.sampler.snapshot()["visits"][0] == 0


def test_all_gradient_in_one_bin():
    problem = Regression(floor=0.25)
    problem.SPREAD, problem.MEAN = torch.tensor([0.0, 0.0, 1.0, 0.0]), torch.zeros(4)
    problem.steps(40)
    sampler = problem.sampler
    assert sampler.p.tolist() == pytest.approx([0.0625, 0.0625, 0.8125, 0.0625])
    assert sampler.weight.max() <= 4 and sampler.metrics()["gain"] == pytest.approx(0.25 / 0.8125)


def test_no_gradient_anywhere_keeps_p_at_q():
    problem = Regression()
    problem.SPREAD, problem.MEAN = torch.zeros(4), torch.zeros(4)
    problem.steps(30)
    assert torch.equal(problem.sampler.p, problem.sampler.q)
    assert all(np.isfinite(v) for k, v in problem.sampler.metrics().items() if not k.startswith("achieved"))


def test_a_batch_smaller_than_the_number_of_bins_still_converges():
    problem = Regression(half_life=1e6)
    problem.sampler.batch_size = 3
    problem.steps(400)
    best = problem.GRAD_VAR.sqrt() / problem.GRAD_VAR.sqrt().sum()
    torch.testing.assert_close(problem.sampler.p, best, rtol=0.15, atol=0)


def test_a_non_finite_sample_is_counted_and_a_skipped_step_changes_nothing_else():
    problem = Regression()
    problem.steps(20)
    before = problem.sampler.state_dict()
    draw = problem.sampler.draw()
    losses = problem.losses(draw)
    losses = torch.where(torch.arange(64) == 5, float("nan"), losses)
    (draw.weight * losses).mean().backward()
    problem.sampler.update(draw, losses)
    problem.sampler.commit(torch.tensor(1.0))
    after = problem.sampler.state_dict()
    assert problem.sampler.metrics()["nonfinite"] == 1
    assert problem.sampler.snapshot()["nonfinite"][draw.bin[5]] == 1
    for name in ("sums", "visits", "age"):
        np.testing.assert_array_equal(after["statistics"][name], before["statistics"][name])
    np.testing.assert_array_equal(after["achieved"]["sums"], before["achieved"]["sums"])
    problem.steps(5)
    assert torch.isfinite(problem.sampler.p).all()


def test_a_step_without_commit_counts_as_taken():
    problem = Regression()
    for _ in range(5):
        draw = problem.sampler.draw()
        losses = problem.losses(draw)
        (draw.weight * losses).mean().backward()
        problem.sampler.update(draw, losses)
    problem.sampler.commit()
    assert problem.sampler.snapshot()["visits"].sum() == 5 * 64


# State


def continued(problem, other, steps=6):
    return problem.steps(steps), other.steps(steps)


@pytest.mark.parametrize("config", [{}, {"update_every": 4}, {"proposal": "loss_second_moment"}, {"proposal": "loss_ema"}, {"target": "entropy_rate"}, {"target": "learnable"}, {"target": "frontier"}, {"anneal": [64, 1024]}, {"draws": "iid"}])
def test_a_resumed_sampler_continues_bitwise(config):
    problem, other = Regression(**config), Regression(**config)
    problem.steps(22)
    assert not torch.equal(problem.sampler.p, torch.full((4,), 0.25).double())
    other.sampler.load_state_dict(problem.sampler.state_dict())
    other.generator.set_state(problem.generator.get_state())
    a, b = continued(problem, other)
    assert torch.equal(a, b) and torch.equal(problem.sampler.p, other.sampler.p)
    assert str(problem.sampler.metrics()) == str(other.sampler.metrics())  # nan equals nan in text


def test_state_survives_a_change_of_density():
    problem, other = Regression(), Regression(target="logit_normal(0, 1)", proposal="loss_ema")
    problem.steps(20)
    other.sampler.load_state_dict(problem.sampler.state_dict())
    assert other.sampler.snapshot()["visits"].sum() == 20 * 64
    assert not torch.allclose(other.sampler.q, problem.sampler.q)


@pytest.mark.parametrize(
    "other, message",
    [
        (dict(bins=8), r"timesteps.bins = 4, this run has 8"), (dict(k=4), "timesteps.probe.k = 8, this run has 4"),
        (dict(path="gvp"), "flow.path = linear, this run has gvp"),
    ],
)
def test_state_of_another_kind_is_refused_with_the_reason(other, message):
    problem = Regression()
    problem.steps(2)
    state = problem.sampler.state_dict()
    probe = attach_probe(nn.Linear(4, 8), ProbeConfig(k=other.get("k", 8), layers=["*"]))
    config = TimestepConfig(bins=other.get("bins", 4))
    sampler = OnlineSampler(config, probe=probe, path=get_path(other.get("path", "linear")))
    with pytest.raises(UserError, match=message):
        sampler.load_state_dict(state)
    state["version"] = 99
    with pytest.raises(UserError, match="version 99"):
        problem.sampler.load_state_dict(state)


def test_state_in_the_middle_of_a_step_is_refused():
    sampler = OnlineSampler(TimestepConfig(proposal="same"))
    sampler.draw(4)
    with pytest.raises(RuntimeError, match="commit"):
        sampler.state_dict()


def test_says_so_where_the_proposal_misses_what_adapting_would_bring():
    problem = Regression(proposal="same")
    problem.steps(40)
    assert problem.sampler.metrics()["gain"] == pytest.approx(1)
    assert "timesteps.proposal=same does not get it" in problem.sampler.verdict()
