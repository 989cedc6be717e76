from __future__ import annotations

import math

import pytest
import torch

from vr_online.config import EmaConfig, OptimizerConfig
from vr_online.ema import Decay, Ema, power_exponent
from vr_online.optim import GuardedAdamW, Schedule


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in ((7, 5), (11,))]


def set_gradients(params, seed: int, scale: float = 1.0) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g) * scale


@pytest.mark.parametrize("clip", [None, 0.5])
def test_equals_adamw_after_clip_grad_norm(clip):
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1)
    ours, reference = parameters(), parameters()
    optimizer = GuardedAdamW(ours, config, clip)
    optimizer.ready = True
    other = torch.optim.AdamW(reference, lr=1e-2, weight_decay=0.1, eps=config.eps)
    for step in range(5):
        set_gradients(ours, step, scale=3.0)
        set_gradients(reference, step, scale=3.0)
        norm = torch.nn.utils.clip_grad_norm_(reference, clip if clip else math.inf)
        optimizer.step()
        other.step()
        torch.testing.assert_close(optimizer.grad_norm, norm)
        for a, b in zip(ours, reference):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_non_finite_gradient_changes_nothing_at_all(bad, clip):
    params = parameters()
    optimizer = GuardedAdamW(params, OptimizerConfig(lr=1e-2, weight_decay=0.1), clip)
    optimizer.ready = True
    set_gradients(params, 0)
    optimizer.step()
    assert float(optimizer.found_inf) == 0
    before = [p.detach().clone() for p in params], [{k: v.clone() for k, v in optimizer.state[p].items()} for p in params]
    set_gradients(params, 1)
    params[1].grad[3] = bad
    optimizer.step()
    assert float(optimizer.found_inf) == 1
    assert all(p.equal(q) for p, q in zip(params, before[0]))
    assert all(optimizer.state[p][k].equal(v) for p, state in zip(params, before[1]) for k, v in state.items())


def test_schedule_in_images():
    warm = Schedule(OptimizerConfig(lr=1.0, warmup=100), 1000)
    assert warm(50) == 0.5 and warm(100) == warm(1000) == 1.0
    cosine = Schedule(OptimizerConfig(lr=1.0, lr_min=0.2, schedule="cosine"), 1000)
    assert cosine(0) == pytest.approx(1.0) and cosine(500) == pytest.approx(0.6) and cosine(1000) == pytest.approx(0.2)


def test_half_life_is_in_images_whatever_the_batch():
    for batch in (1, 20, 250):
        config = EmaConfig(half_life=1000, rampup=None)
        masters = [torch.zeros(3)]
        ema = Ema(masters, config, batch)
        ema.averages[0].fill_(1.0)
        for step in range(1, 1000 // batch + 1):
            ema.update(step * batch, torch.zeros(()))
        torch.testing.assert_close(ema.averages[0], torch.full((3,), 0.5), rtol=1e-4, atol=0)


def test_decay_0_9999_at_batch_256():
    assert Decay(EmaConfig(rampup=None), 256)(10**9) == pytest.approx(0.9999, abs=1e-7)


@pytest.mark.parametrize("sigma_rel", [0.05, 0.10])
def test_power_average_has_its_relative_width(sigma_rel):
    """The weights of an average over n steps have standard deviation sigma_rel x n (EDM2's definition of the width)."""
    gamma = power_exponent(sigma_rel)
    assert math.sqrt((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3))) == pytest.approx(sigma_rel, rel=1e-6)
    decay, n, batch = Decay(EmaConfig(kind="power", sigma_rel=sigma_rel), 10), 2000, 10
    weights = torch.zeros(n, dtype=torch.float64)
    for step in range(n):
        beta = decay((step + 1) * batch)
        weights *= beta
        weights[step] = 1 - beta
    position = torch.arange(n, dtype=torch.float64)
    mean = (weights * position).sum()
    std = (weights * (position - mean) ** 2).sum().sqrt()
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-9)
    assert float(std) / n == pytest.approx(sigma_rel, rel=0.01)


def test_average_stands_still_on_a_skipped_step():
    ema = Ema([torch.zeros(4)], EmaConfig(), 10)
    ema.averages[0].copy_(torch.tensor([1.0, -2.0, 1e-20, 0.1]))
    before = ema.averages[0].clone()
    ema.update(1000, torch.ones(()))
    assert ema.averages[0].equal(before)
