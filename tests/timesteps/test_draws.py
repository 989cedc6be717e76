"""Draws: the right distribution, one point a stratum, and the same set however the batch is shared out."""

from __future__ import annotations

import pytest
import torch

from vr_online.config import TimestepConfig
from vr_online.timesteps import OnlineSampler
from vr_online.timesteps.draws import invert, uniforms


@pytest.mark.parametrize("size", [1, 2, 5, 64, 1000])
def test_stratified_uniforms_have_one_point_per_stratum_at_one_offset(size):
    u = uniforms(size, seed=3, step=11, stratified=True)
    scaled = (u * size).sort().values
    assert u.dtype == torch.float64 and (u >= 0).all() and (u < 1).all()
    torch.testing.assert_close(scaled.diff(), torch.ones(size - 1, dtype=torch.float64))
    assert scaled[0] < 1


@pytest.mark.parametrize("stratified", [True, False])
def test_uniforms_are_a_function_of_seed_and_step(stratified):
    def draw(seed, step):
        return uniforms(32, seed, step, stratified)

    assert torch.equal(draw(1, 2), draw(1, 2))
    assert not torch.equal(draw(1, 2), draw(1, 3))
    assert not torch.equal(draw(1, 2), draw(2, 2))
    assert not torch.equal(draw(1, 2), draw(2, 1))


def test_strata_are_in_random_order():
    """Any rank's slice is a fair sample: over many steps each position sees the mean 1/2."""
    means = torch.stack([uniforms(8, 0, step, True) for step in range(4000)]).mean(0)
    assert ((means - 0.5).abs() < 4 * (1 / 12 / 4000) ** 0.5).all()


def test_inverse_reproduces_masses_and_is_uniform_inside_a_bin():
    p = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64)
    t, bin = invert(uniforms(100_000, 0, 0, True), p)
    assert t.dtype == torch.float32 and (t > 0).all() and (t < 1).all()
    assert torch.equal(bin, (t.double() * 4).floor().long().clamp(max=3))
    torch.testing.assert_close(torch.bincount(bin, minlength=4) / 1e5, p.float(), atol=2e-5, rtol=0)
    inside = t[bin == 2] * 4 - 2
    assert abs(inside.mean() - 0.5) < 1e-3 and abs(inside.var() - 1 / 12) < 1e-3


@pytest.mark.parametrize("masses", [[1.0], [0.0, 1.0, 0.0], [1e-300, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0]])
def test_bins_without_mass_are_never_drawn(masses):
    p = torch.tensor(masses, dtype=torch.float64)
    edges = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    t, bin = invert(edges, p)
    assert (p[bin] > 0).all() and t.isfinite().all() and (t > 0).all() and (t < 1).all()


def global_draws(config, world_size, accumulation, steps=3, batch_size=24):
    """(steps, batch) t and weight, gathered over ranks, sorted."""
    rows = []
    samplers = [
        OnlineSampler(config, seed=5, batch_size=batch_size, accumulation=accumulation, rank=r, world_size=world_size)
        for r in range(world_size)
    ]
    for _ in range(steps):
        draws = [s.draw() for _ in range(accumulation) for s in samplers]
        pairs = torch.stack([torch.cat([d.t for d in draws]), torch.cat([d.weight for d in draws])])
        rows.append(pairs[:, pairs[0].argsort()])
    return torch.stack(rows)


@pytest.mark.parametrize("draws", ["stratified", "iid"])
def test_same_global_set_for_any_number_of_ranks_and_micro_batches(draws):
    config = TimestepConfig(target="logit_normal(0, 1)", proposal="beta(2, 1)", draws=draws, bins=6)
    one = global_draws(config, 1, 1)
    assert one.shape == (3, 2, 24) and not torch.equal(one[0], one[1])
    for world_size, accumulation in [(2, 1), (1, 3), (2, 2), (3, 4)]:
        assert torch.equal(global_draws(config, world_size, accumulation), one)


def test_an_uneven_micro_batch_is_refused():
    sampler = OnlineSampler(TimestepConfig(proposal="same"), accumulation=2)
    sampler.draw(4)
    with pytest.raises(ValueError, match="micro-batch of 3 samples in a step that began with 4"):
        sampler.draw(3)
