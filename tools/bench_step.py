"""Time and memory of our train step against a bare PyTorch loop of the same SiT.

The bare loop is forward, mean squared error, backward, fused AdamW and an average of the weights: no engine, no
sampler, no probe, no data loading, no clipping. Both train SiT-S/2 on 4 x 32 x 32 latents at batch 8, step by step
alternating in one process; memory is the peak of a fresh process each.

    python tools/bench_step.py            # a few minutes on two cores
    python tools/bench_step.py --quick    # under a minute
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

LATENT, CLASSES, BATCH = (4, 32, 32), 1000, 8


def write_shards(folder: Path, samples: int = 64) -> None:
    from vr_online.data.writer import ShardWriter, describe, shard_name

    rng = np.random.default_rng(0)
    with ShardWriter(folder / shard_name(0), LATENT) as shard:
        latents = rng.standard_normal((samples, *LATENT)).astype(np.float16)
        shard.write_batch([f"{i:06d}" for i in range(samples)], latents, rng.integers(0, CLASSES, samples))
    describe(
        {shard_name(0): shard.stats}, latent_shape=LATENT, moments=False, class_names=[str(c) for c in range(CLASSES)],
        codec="pixel", codec_hash="synthetic", source="synthetic",
    ).save(folder)


def our_loop(folder: Path, model: str):
    """(step function, closing function) of the product's own trainer."""
    from vr_online.config import load_config
    from vr_online.ranks import Ranks
    from vr_online.run import start
    from vr_online.train import train_step

    config = load_config(None, [
        f"data.shards={folder}/shards", "data.workers=0", f"run_dir={folder}/run", f"model.name={model}",
        f"train.batch_size={BATCH}", "train.steps=1000000", "engine.zero_stage=0", "timesteps.proposal=online_vr",
    ])
    ranks = Ranks()
    run = start(config, ranks)
    return lambda: train_step(run), ranks.close


def bare_loop(model: str):
    """Step function of a plain loop over one fixed batch."""
    from vr_online.config import ModelConfig
    from vr_online.models.sit import build_sit

    network = build_sit(ModelConfig(name=model), LATENT, CLASSES)
    average = copy.deepcopy(network).requires_grad_(False)
    pairs = [(a, p) for a, p in zip(average.parameters(), network.parameters())]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    x_1, y = torch.randn(BATCH, *LATENT), torch.randint(0, CLASSES, (BATCH,))

    def step() -> None:
        t, x_0 = torch.rand(BATCH), torch.randn_like(x_1)
        s = t[:, None, None, None]
        loss = (network(s * x_1 + (1 - s) * x_0, t, y) - (x_1 - x_0)).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_([a for a, _ in pairs], [p for _, p in pairs], 1e-4)

    return step


def seconds(step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def peak_mib(which: str, model: str, steps: int) -> float:
    """Peak resident memory of a fresh process that runs one of the two loops."""
    done = subprocess.run(
        [sys.executable, __file__, "--only", which, "--model", model, "--steps", str(steps)], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout.strip().splitlines()[-1])


def run_only(which: str, model: str, steps: int, folder: Path) -> None:
    if which == "ours":
        write_shards(folder / "shards")
        step, close = our_loop(folder, model)
    else:
        step, close = bare_loop(model), lambda: None
    for _ in range(steps):
        step()
    close()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--model", default="SiT-S/2")
    parser.add_argument("--steps", type=int, default=None, help="timed steps of each loop")
    parser.add_argument("--only", choices=["ours", "bare"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    steps = args.steps or (6 if args.quick else 40)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.only:
            return run_only(args.only, args.model, steps, folder)
        memory = {which: peak_mib(which, args.model, 3) for which in ("ours", "bare")}
        write_shards(folder / "shards")
        ours, close = our_loop(folder, args.model)
        bare = bare_loop(args.model)
        ours(), bare()
        times = [(seconds(ours), seconds(bare)) for _ in range(steps)]
        close()
    ratio = statistics.median(a / b for a, b in times)
    print(json.dumps({
        "model": args.model, "batch": BATCH, "rounds": steps, "threads": torch.get_num_threads(),
        "ours_s": statistics.median(a for a, _ in times), "bare_s": statistics.median(b for _, b in times),
        "time_ratio": round(ratio, 4), "ours_mib": memory["ours"], "bare_mib": memory["bare"],
        "memory_ratio": round(memory["ours"] / memory["bare"], 4),
    }))


if __name__ == "__main__":
    main()
