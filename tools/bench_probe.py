"""Which layers to tap, and with how many directions: sketch quality against step time.

Quality: a small SiT is trained on real latents; then true per-sample gradients of all its parameters
(torch.func) and per-layer sketches of the same samples give, for each candidate (layers, k),

    correlation     of sqrt(sketched variance) and sqrt(true variance) over the bins
    reduction_kept  share of the best proposal's variance reduction that a proposal from the sketch gets

both as means over independent draws of the directions. Cost: SiT-S/2 on 4 x 32 x 32 latents, batch 8, forward,
backward, AdamW, with and without probe and statistics, alternating in one run; `overhead_ratio` is the median
of paired ratios of step time.

    python tools/bench_probe.py --quick
    python tools/bench_probe.py --shards data/cifar10_tae/train --train-steps 1000

Without --shards the latents are scikit-learn's digits. The last line is one JSON object; its `correlation`,
`reduction_kept` and `overhead_ratio` are those of the default in `ProbeConfig`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time

import numpy as np
import torch
from torch.func import functional_call, grad, vmap
from tqdm import tqdm

from vr_online.config import DataConfig, ModelConfig, ProbeConfig, TimestepConfig
from vr_online.flow.paths import get_path
from vr_online.flow.targets import Flow
from vr_online.models.sit import build_sit
from vr_online.timesteps import OnlineSampler, attach_probe

CANDIDATES = {
    "all": ["*"],
    "all but adaLN": ["*", "!*adaLN*"],
    "all but fc2": ["*", "!*.mlp.fc2"],
    "all but qkv": ["*", "!*.attn.qkv"],
    "all but fc1 and fc2": ["*", "!*.mlp.fc*"],
    "all but qkv and fc2": ["*", "!*.attn.qkv", "!*.mlp.fc2"],
    "all but odd blocks": ["*", "!blocks.*[13579].*"],
    "all but even blocks": ["*", "!blocks.*[02468].*"],
    "no block": ["*", "!blocks.*"],
    "attn.qkv and final": ["blocks.*.attn.qkv", "final_layer.*"],
    "mlp.fc1 and final": ["blocks.*.mlp.fc1", "final_layer.*"],
    "adaLN and final": ["*adaLN_modulation.1", "final_layer.linear"],
    "final": ["final_layer.*"],
    "adaLN, final and proj": ["*adaLN_modulation.1", "final_layer.linear", "*.attn.proj"],
    "adaLN, and proj and fc1 of even blocks": ["*", "!*.attn.qkv", "!*.mlp.fc2", "!blocks.*[13579].attn.proj", "!blocks.*[13579].mlp.fc1"],
}
KS = (4, 8, 12, 16, 24)


def load_latents(shards: str | None, limit: int = 4096):
    """Normalised latents (N, C, H, W) float32, labels (N,) and the number of classes."""
    if shards is None:
        from vr_online.data.digits import load_splits

        images, labels = load_splits()["train"]
        x = torch.from_numpy(images).float() / 127.5 - 1
        return (x - x.mean()) / x.std(), torch.from_numpy(labels), 10
    from vr_online.data.format import DatasetInfo
    from vr_online.data.reader import LatentStream

    info = DatasetInfo.load(shards)
    count = min(limit, info.samples)
    stream = LatentStream(DataConfig(shards=shards, workers=0), info, batch_size=count, seed=0)
    batch = next(iter(stream))
    stream.close()
    return info.norm.normalize(batch.latent), batch.y, info.num_classes


def small_model(shape, classes: int, depth: int, width: int):
    torch.manual_seed(0)
    patch = 2 if shape[1] >= 8 else 1
    return build_sit(ModelConfig(name="custom", depth=depth, hidden_size=width, num_heads=4, patch_size=patch), shape, classes)


def train(model, x, y, flow: Flow, steps: int, batch: int = 64) -> None:
    """Plain training, uniform stratified t."""
    sampler = OnlineSampler(TimestepConfig(target="uniform"), batch_size=batch)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in tqdm(range(steps), desc="training", mininterval=5):
        rows = torch.randint(len(x), (batch,), generator=generator)
        x_0 = torch.randn(x[rows].shape, generator=generator)
        draw = sampler.draw()
        x_t, target = flow.sample(x[rows], x_0, draw.t)
        flow.loss(model(x_t, draw.t, y[rows]), target).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def samples_of(bins: int, per_bin: int, x, y, bin: int):
    """Data, noise, time and labels of one bin's samples, the same for truth and sketch."""
    generator = torch.Generator().manual_seed(1000 + bin)
    rows = torch.randint(len(x), (per_bin,), generator=generator)
    noise = torch.randn(x[rows].shape, generator=generator)
    t = (bin + torch.rand(per_bin, generator=generator)) / bins
    return x[rows], noise, t, y[rows]


def true_variance(model, flow: Flow, batch, chunk: int = 16) -> float:
    """Variance of the per-sample gradient of all parameters over one bin's samples."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(params, x_1, x_0, t, y):
        x_t, target = flow.sample(x_1[None], x_0[None], t[None])
        return flow.loss(functional_call(model, params, (x_t, t[None], y[None])), target)[0]

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0, 0, 0))
    square, total, count = 0.0, None, len(batch[0])
    for start in range(0, count, chunk):
        grads = per_sample(parameters, *(part[start : start + chunk] for part in batch))
        flat = torch.cat([g.flatten(1) for g in grads.values()], 1).double()
        square += flat.square().sum().item()
        total = flat.sum(0) if total is None else total + flat.sum(0)
    return (square / count - (total / count).square().sum().item()) * count / (count - 1)


def layer_sketches(model, flow: Flow, batch, seed: int, k: int) -> dict[str, torch.Tensor]:
    """(B, k, k) sketch of each layer alone; its upper left corner is the sketch of a smaller k."""
    probes = {name: attach_probe(model, ProbeConfig(k=k, layers=[name]), seed=seed) for name in _linears(model)}
    x_1, x_0, t, y = batch
    for probe in probes.values():
        probe.arm(len(t), "cpu")
    x_t, target = flow.sample(x_1, x_0, t)
    flow.loss(model(x_t, t, y), target).sum().backward()
    sketches = {name: probe.read().unflatten(1, (k, k)) for name, probe in probes.items()}
    for probe in probes.values():
        probe.remove()
    model.zero_grad()
    return sketches


def _linears(model) -> list[str]:
    probe = attach_probe(model, ProbeConfig(k=1, layers=["*"]))
    probe.remove()
    return probe.layers


def sketched_variance(sketches: dict[str, torch.Tensor], layers: list[str], k: int, pairs: bool = False) -> float:
    """From all k x k directions, or from the k pairs (u_a, v_a) alone."""
    s = sum(sketches[name][:, :k, :k].double() for name in layers)
    s = s.diagonal(dim1=1, dim2=2) if pairs else s.flatten(1)
    return s.var(0, unbiased=True).mean().item()


def kept(true: np.ndarray, sketched: np.ndarray) -> float:
    """Share of the best reduction, for a uniform target: variance of p is sum(true / p) / K^2."""

    def ratio(p):
        return (true / p).sum() / len(true) / true.sum()

    best, got = np.sqrt(true), np.sqrt(sketched)
    return (1 - ratio(got / got.sum())) / (1 - ratio(best / best.sum()))


def quality(args) -> list[dict]:
    """One row per candidate and k."""
    x, y, classes = load_latents(args.shards)
    flow = Flow(get_path("linear"), "velocity")
    model = small_model(tuple(x.shape[1:]), classes, args.depth, args.width)
    train(model, x, y, flow, args.train_steps)
    batches = [samples_of(args.bins, args.per_bin, x, y, b) for b in range(args.bins)]
    true = np.array([true_variance(model, flow, b) for b in tqdm(batches, desc="true gradients", mininterval=5)])
    best = np.sqrt(true)
    print(f"true variance over {args.bins} bins: {np.array2string(true / true.mean(), precision=2)}")
    print(f"gain of the best proposal: {best.mean() ** 2 / true.mean():.4f}")
    chosen = {n: _matching(model, layers) for n, layers in {"default": ProbeConfig().layers, **CANDIDATES}.items()}
    ks = sorted({*KS, ProbeConfig().k})
    scores: dict[tuple, list] = {}
    for seed in tqdm(range(args.probe_seeds), desc="sketches", mininterval=5):
        sketches = [layer_sketches(model, flow, b, seed, max(ks)) for b in batches]
        for (name, layers), k in itertools.product(chosen.items(), ks):
            v = np.array([sketched_variance(s, layers, k) for s in sketches])
            scores.setdefault((name, k), []).append((np.corrcoef(np.sqrt(v), best)[0, 1], kept(true, v)))
            if name == "default":
                v = np.array([sketched_variance(s, layers, k, pairs=True) for s in sketches])
                scores.setdefault(("default, k pairs alone", k), []).append((np.corrcoef(np.sqrt(v), best)[0, 1], kept(true, v)))
    return [
        {"candidate": n, "k": k, "correlation": float(np.mean(s, 0)[0]), "worst_correlation": float(np.min(s, 0)[0]),
         "reduction_kept": float(np.mean(s, 0)[1])}
        for (n, k), s in scores.items()
    ]


def _matching(model, layers: list[str]) -> list[str]:
    probe = attach_probe(model, ProbeConfig(k=1, layers=layers))
    probe.remove()
    return probe.layers


class Stepper:
    """Training steps of one SiT-S/2, each with the probe asked for."""

    def __init__(self, batch: int) -> None:
        torch.manual_seed(0)
        self.model = build_sit(ModelConfig(name="SiT-S/2"), (4, 32, 32), 1000)
        for parameter in self.model.parameters():  # away from the zeros of adaLN, which are not typical
            torch.nn.init.normal_(parameter, std=0.02)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.flow = Flow(get_path("linear"), "velocity")
        self.x, self.noise = torch.randn(2, batch, 4, 32, 32)
        self.y = torch.arange(batch)
        self.samplers: dict[str, OnlineSampler] = {}

    def step(self, name: str, layers: list[str] | None, k: int) -> np.ndarray:
        """Seconds of one step: wall, and CPU time of this process. The taps are set before the clock starts."""
        probe = attach_probe(self.model, ProbeConfig(k=k, layers=layers)) if layers else None
        if name not in self.samplers:
            config = TimestepConfig(target="uniform", proposal="online_vr" if layers else "same")
            self.samplers[name] = OnlineSampler(config, probe=probe, batch_size=len(self.y))
        self.samplers[name].probe = probe
        start = np.array([time.perf_counter(), time.process_time()])
        self._train(self.samplers[name])
        taken = np.array([time.perf_counter(), time.process_time()]) - start
        if probe:
            probe.remove()
        return taken

    def _train(self, sampler: OnlineSampler) -> None:
        draw = sampler.draw()
        x_t, target = self.flow.sample(self.x, self.noise, draw.t)
        losses = self.flow.loss(self.model(x_t, draw.t, self.y), target)
        (draw.weight * losses).mean().backward()
        if sampler.probe is not None:
            sampler.update(draw, losses)
        self.optimizer.step()
        self.optimizer.zero_grad()
        sampler.commit()


def overheads(candidates: dict[str, tuple[list[str], int]], pairs: int, batch: int) -> dict[str, dict[str, float]]:
    """Median ratio of step time, with over without, each candidate next to a plain step; `noise` is plain against plain."""
    stepper = Stepper(batch)
    contenders = {**candidates, "noise": (None, 1)}
    ratios: dict[str, list] = {name: [] for name in contenders}
    stepper.step("plain", None, 1)
    for pair in tqdm(range(pairs), desc="step times", mininterval=5):
        for name, (layers, k) in contenders.items():
            order = [(name, layers, k), ("plain", None, 1)]
            times = {o[0]: stepper.step(*o) for o in (order if pair % 2 else order[::-1])}
            ratios[name].append(times[name] / times["plain"])
    medians = {name: np.median(r, 0) for name, r in ratios.items()}
    return {name: {"overhead_ratio": float(m[0]), "cpu_overhead_ratio": float(m[1])} for name, m in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute: little training, few samples, a few steps of batch 2")
    parser.add_argument("--shards", help="folder of latent shards; default: scikit-learn's digits")
    parser.add_argument("--bins", type=int, default=16)
    parser.add_argument("--per-bin", type=int, default=128, help="samples a bin for the true gradients")
    parser.add_argument("--train-steps", type=int, default=500)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--probe-seeds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of steps to time")
    parser.add_argument("--batch", type=int, default=8, help="batch of the timed steps")
    parser.add_argument("--time", nargs="*", default=["all"], choices=list(CANDIDATES), help="candidates to time beside the default")
    parser.add_argument("--time-k", nargs="*", type=int, default=[16], help="directions to time them with")
    parser.add_argument("--skip", choices=["quality", "time"], help="leave out one half")
    args = parser.parse_args()
    if args.quick:
        args.bins, args.per_bin, args.train_steps, args.probe_seeds = 8, 32, 60, 1
        args.pairs, args.batch, args.time = 4, 2, []
    report(args)


def report(args) -> None:
    default = ProbeConfig()
    result: dict = {"default": {"layers": default.layers, "k": default.k}, "latents": args.shards or "digits"}
    if args.skip != "quality":
        rows = quality(args)
        for row in sorted(rows, key=lambda r: (r["k"], -r["correlation"])):
            print("k {k:3d}  correlation {correlation:.4f} (worst {worst_correlation:.4f})  kept {reduction_kept:.4f}  {candidate}".format(**row))
        chosen = next(r for r in rows if r["candidate"] == "default" and r["k"] == default.k)
        result.update(correlation=chosen["correlation"], reduction_kept=chosen["reduction_kept"])
    if args.skip != "time":
        timed = overheads({"default": (default.layers, default.k), **{f"{n}, k={k}": (CANDIDATES[n], k) for n in args.time for k in args.time_k}}, args.pairs, args.batch)
        for name, values in timed.items():
            print(f"step time {values['overhead_ratio']:.4f} (CPU {values['cpu_overhead_ratio']:.4f})  {name}")
        result.update(timed["default"], noise_ratio=timed["noise"]["overhead_ratio"], threads=torch.get_num_threads())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
