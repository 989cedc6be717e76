"""Several real processes: one distribution, bit for bit, whatever their number, and exact sketches under ZeRO."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.timesteps.models import batch, net, per_sample_loss
from tests.timesteps.ranks import on_ranks
from vr_online.config import ProbeConfig, TimestepConfig
from vr_online.timesteps import OnlineSampler, attach_probe

GLOBAL_BATCH = 24


def problem_losses(model, t, first: int, step: int):
    """Per-sample losses of the samples `first`, ... of the global batch of `step`: the same on any rank that has them."""
    generator = torch.Generator().manual_seed(step)
    x, c = torch.randn(GLOBAL_BATCH, 5, 8, generator=generator), torch.randn(GLOBAL_BATCH, 8, generator=generator)
    rows = slice(first, first + len(t))
    return per_sample_loss(model, x[rows] * (1 + 5 * t[:, None, None]), c[rows])


def run(rank: int, world_size: int, steps: int = 25, accumulation: int = 1, state=None, bad_step: int = -1, proposal="online_vr"):
    """Trains nothing, but learns the distribution; returns its state and p after every step."""
    model = net()
    config = TimestepConfig(bins=4, half_life=1e5, proposal=proposal, probe=ProbeConfig(k=3, layers=["*"]))
    sampler = OnlineSampler(
        config, probe=attach_probe(model, config.probe), batch_size=GLOBAL_BATCH, accumulation=accumulation, rank=rank,
        world_size=world_size, seed=7,
    )
    if state is not None:
        sampler.load_state_dict(state)
    proposals = []
    for _ in range(steps):
        step, skip = sampler.step, 0.0
        for _ in range(accumulation):
            draw = sampler.draw()
            losses = problem_losses(model, draw.t, draw.first, step)
            if step == bad_step and rank == world_size - 1:
                losses = torch.where(torch.arange(len(losses)) == len(losses) - 1, float("nan"), losses)
            (draw.weight * losses).mean().div(accumulation).backward()
            sampler.update(draw, losses)
        sampler.commit(torch.tensor(float(step == bad_step)))
        proposals.append(sampler.p.numpy().copy())
    return sampler.state_dict(), np.stack(proposals), sampler.metrics()


def assert_close_states(a, b) -> None:
    np.testing.assert_allclose(a["statistics"]["sums"], b["statistics"]["sums"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(a["statistics"]["visits"], b["statistics"]["visits"])


def test_two_ranks_learn_what_one_does_and_agree_bitwise(tmp_path):
    alone, p_alone, metrics = run(0, 1)
    (first, p_first, _), (second, p_second, metrics_2) = on_ranks(run, 2, tmp_path)
    assert np.array_equal(p_first, p_second) and np.array_equal(first["statistics"]["sums"], second["statistics"]["sums"])
    np.testing.assert_allclose(p_first, p_alone, rtol=1e-5)
    assert_close_states(first, alone)
    assert not np.allclose(p_alone[-1], 0.25)
    assert metrics_2["achieved"] == pytest.approx(metrics["achieved"], rel=1e-4)


def test_one_rank_with_a_non_finite_loss(tmp_path):
    """The sample is counted on both ranks, the step leaves no other trace, and both go on alike."""
    (first, p_first, metrics), (second, p_second, _) = on_ranks(run, 2, tmp_path, 25, 1, None, 12)
    assert metrics["nonfinite"] == 1 and np.array_equal(p_first, p_second)
    assert first["statistics"]["visits"].sum() == 24 * GLOBAL_BATCH
    np.testing.assert_array_equal(p_first[12], p_first[13])
    assert np.isfinite(p_first).all() and not np.array_equal(p_first[13], p_first[14])


@pytest.mark.parametrize("proposal", ["online_vr", "loss_second_moment"])
def test_saved_on_two_ranks_resumed_on_one_and_back(tmp_path, proposal):
    straight, p_straight, _ = run(0, 1, steps=30, proposal=proposal)
    (state, *_), _ = on_ranks(run, 2, tmp_path, 10, 1, None, -1, proposal)
    state, p_middle, _ = run(0, 1, steps=10, accumulation=3, state=state, proposal=proposal)
    (state, p_last, _), _ = on_ranks(run, 2, tmp_path, 10, 2, state, -1, proposal)
    assert state["step"] == 30 and state["images"] == 30 * GLOBAL_BATCH
    np.testing.assert_allclose(p_middle, p_straight[10:20], rtol=1e-4)
    np.testing.assert_allclose(p_last, p_straight[20:], rtol=1e-4)
    assert_close_states(state, straight)


def zero_sketches(rank: int, world_size: int, stages):
    """This rank's half of the batch under each ZeRO stage: sketches of two steps, in bf16 and float32."""
    import deepspeed

    for name in [n for n in deepspeed.ops.__compatible_ops__ if "shm" in n]:
        deepspeed.ops.__compatible_ops__[name] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    results = {}
    for stage, dtype in stages:
        model = net(recompute=True, width=8)
        probe = attach_probe(model, ProbeConfig(k=4, layers=["*"]))
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=_zero_config(stage, dtype))
        results[stage, dtype] = [_one_step(engine, probe, rank, dtype, step) for step in range(2)]
        engine.destroy()
    return results


def _zero_config(stage: int, dtype: str) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1, "steps_per_print": None,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage},
    }


def _one_step(engine, probe, rank: int, dtype: str, step: int):
    x, c = (part[3 * rank : 3 * rank + 3] for part in batch(seed=step))
    if dtype == "bf16":
        x, c = x.bfloat16(), c.bfloat16()
    probe.arm(3, "cpu")
    engine.backward(per_sample_loss(engine, x, c).mean())
    sketch = probe.read() * 3
    engine.step()
    return sketch.numpy()


def plain_sketches():
    """The same two steps without DeepSpeed, on one process."""
    model = net(width=8)
    probe = attach_probe(model, ProbeConfig(k=4, layers=["*"]))
    optimizer, results = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(2):
        x, c = batch(seed=step)
        probe.arm(6, "cpu")
        per_sample_loss(model, x, c).mean().backward()
        results.append((probe.read() * 6).numpy())
        optimizer.step()
        optimizer.zero_grad()
    return results


def test_sketches_are_exact_under_every_zero_stage(tmp_path):
    stages = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (3, "bf16")]
    first, second = on_ranks(zero_sketches, 2, tmp_path, stages)
    expected = plain_sketches()
    assert not np.allclose(expected[0], expected[1])
    for key in stages:
        got = [np.concatenate([a, b]) for a, b in zip(first[key], second[key])]
        tolerance = 0.05 if key[1] == "bf16" else 1e-4
        for mine, plain in zip(got, expected):
            assert np.linalg.norm(mine - plain) < tolerance * np.linalg.norm(plain), key
