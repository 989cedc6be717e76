"""Run by test_engine.py through the deepspeed launcher: trains a small network at every ZeRO stage and precision and
prints, per case, how far weights and average are from a plain PyTorch loop over the same global batch."""

from __future__ import annotations

import copy
import gc
import json

import torch

from vr_online.config import load_config
from vr_online.ema import Decay, Ema
from vr_online.engine import MasterWeights, build_engine, gather_into, plan_batch
from vr_online.ranks import Ranks

STEPS, BATCH, BAD_STEP = 5, 8, 2


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.SiLU(), torch.nn.Linear(9, 3), torch.nn.SiLU(), torch.nn.Linear(3, 1))


def batches() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, 6, generator=g) for _ in range(STEPS)]


def reference(config, dtype: torch.dtype) -> tuple[torch.nn.Module, list[torch.Tensor], list[float]]:
    """Weights, their average and gradient norms of a plain loop; the bad step left out."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, weight_decay=config.optimizer.weight_decay)
    decay = Decay(config.ema, BATCH)
    average, norms = [p.detach().clone() for p in model.parameters()], []
    for step, x in enumerate(batches()):
        if step == BAD_STEP:
            continue
        low = copy.deepcopy(model).to(dtype)  # as the engine: compute in low precision, update the fp32 masters
        loss = low(x.to(dtype)).float().square().mean()
        grads = torch.autograd.grad(loss, list(low.parameters()))
        for p, g in zip(model.parameters(), grads):
            p.grad = g.float()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip)))
        optimizer.step()
        with torch.no_grad():
            for a, p in zip(average, model.parameters()):
                a.lerp_(p, 1 - decay((step + 1) * BATCH))
    return model, average, norms


def check(stage: int, precision: str, accumulation: int, ranks: Ranks) -> dict:
    micro = BATCH // ranks.world_size // accumulation
    config = load_config(None, [
        "train.steps=5", f"train.batch_size={BATCH}", f"train.micro_batch_size={micro}", "train.clip=0.05", "optimizer.lr=1e-2",
        "optimizer.weight_decay=0.1", "ema.half_life=20", "ema.rampup=null", f"engine.zero_stage={stage}", f"engine.precision={precision}",
    ])
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    plan = plan_batch(BATCH, micro, ranks.world_size)
    engine, optimizer = build_engine(network(), config, plan)
    masters = MasterWeights(engine, optimizer, stage)
    ema = Ema(masters.flats, config.ema, BATCH)
    skips, norms = [], []
    for step, x in enumerate(batches()):
        for i in range(accumulation):
            first = (i * ranks.world_size + ranks.rank) * micro
            part = x[first : first + micro].to(dtype)
            factor = float("nan") if step == BAD_STEP and ranks.rank == ranks.world_size - 1 else 1.0
            optimizer.found_inf = None
            engine.backward(engine(part).float().square().mean() * factor)
            engine.step()
        skipped = optimizer.found_inf if optimizer.found_inf is not None else torch.ones(())
        ema.update((step + 1) * BATCH, skipped)
        skips.append(float(skipped))
        if not skips[-1]:
            norms.append(float(optimizer.grad_norm))
    wanted, wanted_average, wanted_norms = reference(config, dtype)
    weights, average = network(), network()
    gather_into(weights, masters.fragments, masters.flats, ranks.device)
    gather_into(average, masters.fragments, ema.averages, ranks.device)
    moved = max(float((a - b).abs().max()) for a, b in zip(wanted.parameters(), network().parameters()))
    result = {
        "stage": stage, "precision": precision, "accumulation": accumulation, "skips": skips, "moved": moved,
        "weights": max(float((a - b).abs().max()) for a, b in zip(weights.parameters(), wanted.parameters())),
        "average": max(float((a - b).abs().max()) for a, b in zip(average.parameters(), wanted_average)),
        "norm": max(abs(a / b - 1) for a, b in zip(norms, wanted_norms)),
        "share": sum(f.numel for f in masters.fragments) / sum(p.numel() for p in network().parameters()),
        "optimizer_steps": masters.optimizer_steps,
    }
    engine.destroy()
    del engine, optimizer, masters, ema
    gc.collect()
    return result


def main() -> None:
    ranks = Ranks()
    for precision in ("fp32", "bf16"):
        for stage in (0, 1, 2, 3):
            for accumulation in (1, 2):
                result = check(stage, precision, accumulation, ranks)
                every = ranks.gather(result)
                if ranks.is_main:
                    print("RESULT " + json.dumps(every), flush=True)
    ranks.close()


if __name__ == "__main__":
    main()
