"""The examples run, learn and adapt."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules.pop("plain_loop", None)
    return module


def check_adapted(sampler) -> None:
    metrics = sampler.metrics()
    assert metrics["ready"] == 1 and metrics["gain"] < 1 and metrics["nonfinite"] == 0
    assert not torch.allclose(sampler.p, sampler.q)


def test_plain_loop(monkeypatch):
    sampler = load("plain_loop", monkeypatch).main(steps=40)
    check_adapted(sampler)
    assert sampler.snapshot()["visits"].sum() == 40 * 128


def test_accelerate_loop(monkeypatch):
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'vr_online[accelerate]'")
    sampler = load("accelerate_loop", monkeypatch).main(steps=60, cpu=True)
    check_adapted(sampler)
    assert sampler.snapshot()["visits"].sum() == 60 * 128


def test_diffusers_step(monkeypatch):
    module = load("diffusers_step", monkeypatch)
    torch.manual_seed(0)
    model = module.TinyTransformer()
    sampler = module.make_sampler(model)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    latents, condition = torch.randn(64, 4, 4, 4) * 0.3 + 1, torch.zeros(64, 4)
    losses = [module.training_step(model, sampler, optimizer, latents, condition) for _ in range(120)]
    check_adapted(sampler)
    assert torch.stack(losses[-5:]).mean() < 0.6 * torch.stack(losses[:5]).mean()


@pytest.mark.parametrize("name", ["plain_loop", "accelerate_loop", "diffusers_step"])
def test_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60
