"""Compares ways to choose t: every arm trained on the same shards, from the same initial weights, in the same data order.

    python tools/ablate.py configs/ablate_digits.yaml --out docs/results/digits --seeds 0,1,2
    python tools/ablate.py configs/ablate_digits.yaml --out /tmp/a --arms uniform,logit_normal_0,online_vr --seeds 0
    python tools/ablate.py --quick                        a smoke run on the digits, under a minute

Each arm is a few keys under `timesteps`, trained and evaluated by the product itself (`vr-online train`), one process a
core. Killed and started again, it continues. Writes report.md, results.json and figures to --out; the runs stay in
--work and can be looked at with TensorBoard. The last line is one JSON object.

For each seed the cost of an arm is the images after which it first reaches the distance that the reference ends with, over
those after which the reference does. An arm that never gets there is read the other way round: its whole run over the images
after which the reference was where the arm ends, which is above 1. Seeds are averaged on the logarithm; the 95 % interval
is Student's t over seeds.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from vr_online import checkpoint
from vr_online.config import Config, load_config

STATIC = {f"logit_normal_{name}": f"logit_normal({m}, 1)" for name, m in (("m075", -0.75), ("0", 0), ("p075", 0.75), ("p15", 1.5))}
ARMS: dict[str, list[str]] = {
    "uniform": ["target=uniform", "proposal=same"],
    **{name: [f"target={spec}", "proposal=same"] for name, spec in STATIC.items()},
    # As narrow as what `learnable` comes to on the two data sets: a control chosen in hindsight, no baseline.
    "logit_normal_0_narrow": ["target=logit_normal(0, 0.5)", "proposal=same"],
    "mode": ["target=mode(1.29)", "proposal=same"],
    "cosmap": ["target=cosmap", "proposal=same"],
    "vr_static": ["target=vr_static({work}/vr_static.npz)", "proposal=same"],
    # The published rules know neither smoothing nor a floor of a fifth.
    "loss_second_moment": ["target=uniform", "proposal=loss_second_moment", "smooth=0", "floor=0.001"],
    "loss_ema": ["target=uniform", "proposal=loss_ema", "smooth=0", "floor=0.001"],
    "curriculum": ["target=logit_normal(0, 1)", "anneal=[{half},{half}]", "proposal=same"],
    "online_vr": ["target=uniform", "proposal=online_vr"],
    "online_vr_half_corrected": ["target=uniform", "proposal=online_vr", "correction=0.5"],
    "online_vr_logit_normal_0": ["target=logit_normal(0, 1)", "proposal=online_vr"],
    "grad_variance_1": ["target=grad_variance(1)", "proposal=same"],
    "grad_variance_2": ["target=grad_variance(2)", "proposal=same"],
    "entropy_rate": ["target=entropy_rate(0.15)", "proposal=same"],
    "information": ["target=information(1)", "proposal=same"],
    "progress": ["target=progress(1)", "proposal=same"],
    "signal": ["target=signal(1)", "proposal=same"],
    "agreement": ["target=agreement(1)", "proposal=same"],
    "frontier": ["target=frontier", "proposal=same"],
    "learnable_online_vr": ["target=learnable", "proposal=online_vr"],
    "learnable_annealed": ["target=learnable", "anneal=[{half},{all}]", "proposal=same"],
    "default": [],
}
_WARM_STEPS = 10  # until every arm has left its warm-up
# Two-sided 95 % quantile of Student's t by degrees of freedom.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


# Running


def run_directory(work: Path, arm: str, seed: int) -> Path:
    return work / f"{arm}-seed{seed}"


def command(config: Path, keys: list[str], seed: int, directory: Path, overrides: list[str]) -> list[str]:
    return [
        sys.executable, "-m", "vr_online.train", "--config", str(config), *overrides, *keys, f"seed={seed}",
        f"name={directory.name}", f"run_dir={directory}",
    ]


def _keys(arm: list[str], work: Path, images: int) -> list[str]:
    """Overrides of an arm; {half} and {all} are the run's images, {work} the folder of the runs."""
    place = {"{work}": str(work), "{half}": str(images // 2), "{all}": str(images)}
    keys = [f"timesteps.{key}" for key in arm]
    return [functools.reduce(lambda text, item: text.replace(*item), place.items(), key) for key in keys]


def _images(config: Config) -> int:
    return config.train.total_steps * config.train.batch_size


def train_one(words: list[str], directory: Path) -> str | None:
    """Trains one arm with one seed to its end; returns what went wrong, or None."""
    directory.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(directory / "log.txt", "a") as log:
        done = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        return f"{directory.name}: status {done.returncode}, see {directory / 'log.txt'}"
    return None


def train_all(config: Path, arms: dict[str, list[str]], seeds: list[int], work: Path, jobs: int, overrides: list[str]) -> list[str]:
    """Trains what is not finished yet, `jobs` at a time, seed by seed so that early results are comparable."""
    settings = load_config(config, overrides)
    total, waiting = settings.train.total_steps, []
    for seed in seeds:
        for name, keys in arms.items():
            directory = run_directory(work, name, seed)
            finished = directory.joinpath("summary.json").exists() and checkpoint.list_checkpoints(directory)[-1:] == [total]
            if not finished:
                waiting.append((command(config, _keys(keys, work, _images(settings)), seed, directory, overrides), directory))
    bar, lock, failures = tqdm(total=len(waiting), unit="run", desc="training"), threading.Lock(), []

    def one(job) -> None:
        failure = train_one(*job)
        with lock:
            bar.update()
            if failure:
                failures.append(failure)
                tqdm.write(failure)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, waiting))
    bar.close()
    return failures


def offline_density(config: Config, work: Path) -> None:
    """The published method's table, once, from the run's own shards."""
    target = work / "vr_static.npz"
    if not target.exists():
        subprocess.run(
            [sys.executable, "-m", "vr_online.cli", "density", "vr-static", "--shards", str(config.data.shards),
             "--path", config.flow.path, "--bins", str(config.timesteps.bins), "--out", str(target)], check=True,
        )


def measure_overheads(config: Path, arms: dict[str, list[str]], work: Path, overrides: list[str], rounds: int) -> dict[str, dict]:
    """Seconds of a train step of each arm over those of the first, {ratio, low, high} with a 95 % interval: all arms live in
    one process and take turns, one step each, so that whatever slows the machine slows them alike."""
    from vr_online.ranks import Ranks
    from vr_online.run import start
    from vr_online.train import train_step

    ranks, seconds, images = Ranks(), {name: [] for name in arms}, _images(load_config(config, overrides))
    with tempfile.TemporaryDirectory() as scratch:
        runs = {
            name: start(load_config(config, [*overrides, *_keys(keys, work, images), f"run_dir={scratch}/{name}", "name=overhead"]), ranks)
            for name, keys in arms.items()
        }
        order = list(runs)
        for i in tqdm(range(_WARM_STEPS + rounds), unit="round", desc="overhead"):
            for name in order[i % len(order) :] + order[: i % len(order)]:
                begin = time.perf_counter()
                train_step(runs[name])
                if i >= _WARM_STEPS:
                    seconds[name].append(time.perf_counter() - begin)
        for run in runs.values():
            run.monitor.close()
            run.stream.close()
    ranks.close()
    reference = np.log(seconds[order[0]])
    return {name: _median_ratio(np.log(seconds[name]) - reference) for name in order}


def _median_ratio(logs: np.ndarray) -> dict:
    """Median of paired log ratios, with its 95 % interval from order statistics."""
    logs, half = np.sort(logs), 0.98 * math.sqrt(len(logs))
    low, high = max(int(len(logs) / 2 - half), 0), min(int(math.ceil(len(logs) / 2 + half)), len(logs) - 1)
    return {"ratio": float(np.exp(np.median(logs))), "low": float(np.exp(logs[low])), "high": float(np.exp(logs[high]))}


# Reading


def read_run(directory: Path, images: int) -> dict | None:
    """Distances over images and over seconds of training, and what the sampler said at the end; None before the end."""
    results = sorted(directory.glob("evals/*/result.json"), key=lambda p: int(p.parent.name))
    results = [json.loads(p.read_text()) for p in results]
    if not results or results[-1]["images"] != images:
        return None
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    bins = [json.loads(line) for line in (directory / "bins.jsonl").read_text().splitlines()]
    chosen = [bins[i] for i in sorted({round(f * (len(bins) - 1)) for f in np.geomspace(0.05, 1, 5)})]
    steps = [0] + [line["step"] for line in lines]
    seconds = np.cumsum([0.0] + [line["speed/step_s"] * (b - a) for line, a, b in zip(lines, steps, steps[1:])])
    return {
        "metric": results[0]["metric"],
        "images": [r["images"] for r in results],
        "distance": [r["value"] for r in results],
        "wall_s": [float(np.interp(r["step"], steps, seconds)) for r in results],
        "images_per_step": lines[-1]["images"] / lines[-1]["step"],
        "step_s": statistics.median(line["speed/step_s"] for line in lines),
        **{name: lines[-1].get(f"sampler/{name}") for name in ("gain", "achieved", "achieved_error", "ess")},
        # Density of the draws at a few times of the run, 1 for uniform.
        "drawn": [{"images": line["images"], "p": [round(len(line["p"]) * p, 3) for p in line["p"]]} for line in chosen],
    }


def first_reached(x: list[float], distance: list[float], wanted: float) -> float | None:
    """Where `distance` first comes down to `wanted`; between evaluations its logarithm is taken to fall linearly."""
    for i, d in enumerate(distance):
        if d <= wanted:
            if i == 0:
                return float(x[0])
            before = math.log(distance[i - 1] / d)
            part = 1.0 if before == 0 else math.log(distance[i - 1] / wanted) / before
            return float(x[i - 1] + part * (x[i] - x[i - 1]))
    return None


def cost_ratio(arm: dict[int, dict], reference: dict[int, dict], clock: str = "images") -> dict:
    """What the arm needs over what the reference needs for the same distance: geometric mean over seeds, 95 % interval.

    Args:
        arm, reference: by seed, lists `distance` and `clock` over evaluations.
    """
    logs = [math.log(_one_ratio(arm[seed], reference[seed], clock)) for seed in sorted(arm.keys() & reference.keys())]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return {"ratio": math.exp(mean), "low": None, "high": None}
    half = T95.get(len(logs) - 1, 1.96) * statistics.stdev(logs) / math.sqrt(len(logs))
    return {"ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}


def _one_ratio(arm: dict, reference: dict, clock: str) -> float:
    goal = reference["distance"][-1]
    reached = first_reached(arm[clock], arm["distance"], goal)
    if reached is not None:
        return reached / first_reached(reference[clock], reference["distance"], goal)
    return arm[clock][-1] / first_reached(reference[clock], reference["distance"], arm["distance"][-1])


def overheads(args: argparse.Namespace, arms: dict[str, list[str]], work: Path) -> dict[str, dict]:
    """Measured once all arms are trained, when the machine is quiet; kept beside the runs, so that a later arm is measured
    against uniform alone."""
    kept = work / "overhead.json"
    known = json.loads(kept.read_text()) if kept.exists() else {}
    missing = {name: keys for name, keys in arms.items() if name not in known}
    if args.rounds and missing:
        known |= measure_overheads(args.config, {"uniform": arms["uniform"], **missing}, work, args.overrides, args.rounds)
        kept.write_text(json.dumps(known))
    return known


def summarise(
    work: Path, arms: dict[str, list[str]], seeds: list[int], default: str, overhead: dict[str, dict], config: Config
) -> dict:
    """The content of results.json."""
    images, as_shipped = _images(config), [f"target={config.timesteps.target}", f"proposal={config.timesteps.proposal}"]
    runs = {name: {s: r for s in seeds if (r := read_run(run_directory(work, name, s), images))} for name in arms}
    runs = {name: by_seed for name, by_seed in runs.items() if by_seed}
    # Runs of hours share a machine with changing load; the steps measured in turns do not.
    step = statistics.median(r["step_s"] for r in runs["uniform"].values())
    for name in runs.keys() & overhead.keys():
        for run in runs[name].values():
            run["wall_s"] = [n / run["images_per_step"] * step * overhead[name]["ratio"] for n in run["images"]]
    final = {name: statistics.fmean(r["distance"][-1] for r in by_seed.values()) for name, by_seed in runs.items()}
    static = [name for name in STATIC if name in runs]
    best = min(static, key=final.get) if static else "uniform"
    default = default if default in runs else best
    table = {}
    for name, by_seed in runs.items():
        ends = [r["distance"][-1] for r in by_seed.values()]
        table[name] = {
            "keys": arms[name] or as_shipped, "seeds": sorted(by_seed),
            **{key: [by_seed[s][key] for s in sorted(by_seed)] for key in ("images", "distance", "wall_s", "step_s", "gain", "achieved", "achieved_error", "ess")},
            "drawn": by_seed[min(by_seed)]["drawn"],
            "final_mean": final[name], "final_std": statistics.stdev(ends) if len(ends) > 1 else None,
            "vs_uniform": cost_ratio(by_seed, runs["uniform"]), "vs_uniform_wall": cost_ratio(by_seed, runs["uniform"], "wall_s"),
            "vs_best_static": cost_ratio(by_seed, runs[best]), "overhead": overhead.get(name),
        }
    return {
        "metric": next(iter(next(iter(runs.values())).values()))["metric"], "seeds": seeds, "arms": table, "default": default,
        "best_static": best, "default_vs_uniform": table[default]["vs_uniform"], "default_vs_best_static": table[default]["vs_best_static"],
    }


# Writing


def shown(ratio: dict | None) -> str:
    if ratio is None:
        return ""
    interval = f" ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio["low"] is not None else ""
    return f"{ratio['ratio']:.2f}{interval}"


def write_report(results: dict, out: Path, words: str) -> None:
    arms = sorted(results["arms"].items(), key=lambda item: item[1]["final_mean"])
    default, best = results["default"], results["best_static"]
    lines = [
        f"# {results['dataset']}: {results['metric']} by way of choosing t", "", f"    {words}", "",
        f"The default, `{default}`, reaches uniform's final distance in {shown(results['default_vs_uniform'])} of its images, and that "
        f"of the best logit-normal, `{best}`, in {shown(results['default_vs_best_static'])} of its images.", "",
        "Final distance: mean and standard deviation over seeds. Images and seconds: what the arm needs for the same distance, as a "
        "share of what the reference needs; below 1 is better; in brackets the 95 % interval over seeds. Step: time of a train step over "
        "uniform's, measured in turns in one process, which the seconds of training are taken from. Gain: variance of the minibatch gradient over that of plain draws from the target, "
        "predicted by the estimator, and measured in the same run from half-batches. In the keys {half} is half the run's images, {work} the "
        "folder of the runs.", "",
        f"| arm | keys under `timesteps` | seeds | final distance | images, uniform 1 | seconds, uniform 1 | images, `{best}` 1 | step | gain "
        "predicted | gain measured |", "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, arm in arms:
        spread = f" ± {arm['final_std']:.3g}" if arm["final_std"] is not None else ""
        step = f"{arm['overhead']['ratio']:.3f}" if arm["overhead"] else ""
        lines.append(
            f"| {'**' + name + '**' if name == default else name} | `{'; '.join(arm['keys'])}` | {len(arm['seeds'])} | {arm['final_mean']:.4g}{spread} | "
            f"{shown(arm['vs_uniform'])} | {shown(arm['vs_uniform_wall'])} | {shown(arm['vs_best_static'])} | {step} | "
            f"{_mean(arm['gain'])} | {_mean(arm['achieved'], arm['achieved_error'])} |"
        )
    lines += ["", "![distance over images](distance_images.png)", "", "![distance over seconds](distance_seconds.png)", "", "![gain, predicted and measured](gain.png)", "",
        "![densities of t that the arms draw](density.png)", "",
    ]
    (out / "report.md").write_text("\n".join(lines))


def _mean(values: list, errors: list | None = None) -> str:
    known = [v for v in values if isinstance(v, float)]
    if not known:
        return ""
    error = math.sqrt(sum(e * e for e in errors if isinstance(e, float))) / len(known) if errors else 0
    return f"{statistics.fmean(known):.3f}" + (f" ± {error:.3f}" if error else "")


def styles(results: dict) -> dict[str, dict]:
    """Line of each arm: the default, uniform and the best static density stand out, the others differ in colour or dashes."""
    import matplotlib.pyplot as plt

    colours = plt.get_cmap("tab10").colors
    others = [name for name in results["arms"] if name not in (results["default"], "uniform", results["best_static"])]
    lines = {name: {"color": colours[i % 10], "linestyle": ("-", "--", ":")[i // 10 % 3], "linewidth": 1} for i, name in enumerate(others)}
    lines |= {results["best_static"]: {"color": "0.35", "linestyle": "--", "linewidth": 2.5}, "uniform": {"color": "0.6", "linewidth": 2.5}}
    return lines | {results["default"]: {"color": "black", "linewidth": 2.5}}


def draw(results: dict, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = styles(results)
    uniform = results["arms"]["uniform"]
    start = next(i for i, n in enumerate(uniform["images"][0]) if n >= uniform["images"][0][-1] / 4)  # all fall steeply before
    top = 1.15 * np.mean(uniform["distance"], axis=0)[start]
    for clock, unit, file in (("images", "images", "distance_images.png"), ("wall_s", "seconds of training", "distance_seconds.png")):
        figure, axis = plt.subplots(figsize=(11, 6), constrained_layout=True)
        low = math.inf
        for name, arm in sorted(results["arms"].items(), key=lambda item: item[1]["final_mean"]):
            x, y = np.mean(arm[clock], axis=0)[start:], np.array(arm["distance"])[:, start:]
            axis.plot(x, y.mean(0), marker="o", markersize=3, label=name, **lines[name])
            if len(y) > 1:
                axis.fill_between(x, y.min(0), y.max(0), color=lines[name]["color"], alpha=0.12, linewidth=0)
            low = min(low, y.min())
        axis.set(xlabel=unit, ylabel=results["metric"], title=f"{results['dataset']}: mean and range over seeds, best first", ylim=(0.98 * low, top))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        figure.savefig(out / file, dpi=110)
        plt.close(figure)
    draw_gain(results, out)
    draw_densities(results, out)


def draw_gain(results: dict, out: Path) -> None:
    """Predicted against measured variance ratio, a point a run."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 6), constrained_layout=True)
    for name, arm in results["arms"].items():
        points = [p for p in zip(arm["gain"], arm["achieved"], arm["achieved_error"]) if all(isinstance(v, float) for v in p)]
        if points:
            x, y, error = zip(*points)
            axis.errorbar(x, y, error, fmt="o", markersize=4, label=name)
    low, high = axis.get_xlim()
    axis.plot([low, high], [low, high], color="0.6", linewidth=1, zorder=0)
    axis.set(xlabel="predicted", ylabel="measured", title=f"{results['dataset']}: variance of the minibatch gradient\nover that of plain draws from the target")
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)
    figure.savefig(out / "gain.png", dpi=110)
    plt.close(figure)


def draw_densities(results: dict, out: Path) -> None:
    """Left, what each arm draws at the end; right, the default over the run."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 7), constrained_layout=True, sharey=True)
    for name, line in styles(results).items():
        p = results["arms"][name]["drawn"][-1]["p"]
        left.stairs(p, np.linspace(0, 1, len(p) + 1), label=name, **line)
    default = results["arms"][results["default"]]["drawn"]
    for colour, at in zip(plt.get_cmap("viridis")(np.linspace(0, 0.9, len(default))), default):
        right.stairs(at["p"], np.linspace(0, 1, len(at["p"]) + 1), label=f"{at['images']:,} images", color=colour)
    left.set(title="every arm at the end", xlabel="t (0 noise, 1 data)", ylabel="density drawn")
    right.set(title=f"{results['default']} over the run", xlabel="t (0 noise, 1 data)")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, ncol=4, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    figure.suptitle(results["dataset"])
    figure.savefig(out / "density.png", dpi=110)
    plt.close(figure)


# Command line


def quick_setting(folder: Path) -> tuple[Path, list[str]]:
    """Digits and a tiny model, for the smoke run."""
    from vr_online.data.digits import write_digits

    write_digits(folder / "digits")
    config = folder / "quick.yaml"
    config.write_text(
        f"""data: {{shards: {folder}/digits/train, workers: 0}}
model: {{name: custom, depth: 1, hidden_size: 32, num_heads: 2, patch_size: 4}}
timesteps: {{bins: 8}}
train: {{steps: 20, batch_size: 32}}
optimizer: {{lr: 1e-3}}
checkpoint: {{every: 20, keep: 1}}
monitor: {{log_every: 10}}
evaluation: {{every: 10, features: latent, reference: {folder}/digits/heldout, n: 64, steps: 3, keep: 0}}
"""
    )
    return config, []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, help="YAML with an evaluation section; its timesteps are the arms' base")
    parser.add_argument("--arms", default=None, help=f"comma-separated; default all of: {', '.join(ARMS)}")
    parser.add_argument("--arm", action="append", default=[], metavar="NAME:KEY=VALUE[;KEY=VALUE]", help="an arm of your own")
    parser.add_argument("--default", default="default", help="arm that the summary compares (default %(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default %(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the report")
    parser.add_argument("--work", type=Path, default=None, help="folder of the runs (default runs/ablate/<config's name>)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, one core each (default: all cores)")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of the overhead's measurement, a step of each arm; 0 for none (default %(default)s)")
    parser.add_argument("--report-only", action="store_true", help="train nothing, report what is there")
    parser.add_argument("--quick", action="store_true", help="smoke run on the digits")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="for every arm")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if args.quick:
            args.config, args.overrides = quick_setting(Path(scratch))
            args.arms, args.seeds, args.rounds = args.arms or "uniform,online_vr", "0", 10
            args.work, args.out = Path(scratch) / "runs", args.out or Path(scratch) / "out"
        if args.config is None or args.out is None:
            parser.error("give a configuration and --out, or --quick")
        results = ablate(args)
        if args.quick:
            shutil.rmtree(args.work, ignore_errors=True)
    print(json.dumps({k: results[k] for k in ("dataset", "seeds", "default", "best_static", "default_vs_uniform", "default_vs_best_static")}))


def ablate(args: argparse.Namespace) -> dict:
    own = dict(text.split(":", 1) for text in args.arm)
    known = {**ARMS, **{name: keys.split(";") for name, keys in own.items()}}
    names = args.arms.split(",") if args.arms else list(known)
    if unknown := [n for n in names if n not in known]:
        sys.exit(f"unknown arms {', '.join(unknown)}; known: {', '.join(known)}")
    arms = {n: known[n] for n in dict.fromkeys(["uniform", *names])}
    seeds = [int(s) for s in args.seeds.split(",")]
    work = args.work or Path("runs/ablate") / args.config.stem
    work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    config = load_config(args.config, args.overrides)
    if not args.report_only:
        if "vr_static" in arms:
            offline_density(config, work)
        failures = train_all(args.config, arms, seeds, work, args.jobs, args.overrides)
        if failures:
            sys.exit("\n".join(["some runs failed; run the same command to continue:", *failures]))
    results = {
        "dataset": args.config.stem.removeprefix("ablate_"),
        **summarise(work, arms, seeds, args.default, overheads(args, arms, work), config),
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=1))
    write_report(results, args.out, "python " + shlex.join(word for word in sys.argv if word != "--report-only"))
    draw(results, args.out)
    return results


if __name__ == "__main__":
    main()
