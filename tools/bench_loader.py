"""How fast latents arrive, against webdataset's default pipeline and against `cat`.

    python tools/bench_loader.py            # a few minutes on two cores
    python tools/bench_loader.py --quick    # under a minute

Four measurements on synthetic shards of 4 x 32 x 32 float16 latents:

    throughput   latents/s of one worker, ours and webdataset's WebDataset(...).shuffle().decode().to_tuple().batched()
                 behind its WebLoader: same shards, batch, buffer and number of workers, alternating in one run; and
                 the bytes of those latents against reading the same files with `cat`. Medians over the rounds.
    start-up     seconds from reading dataset.json to the first batch, with 10,000 shards
    memory       growth of this process and its workers over a million samples of those shards (quick: 60,000)
    wait         share of the time of the demo's train step (configs/demo.yaml) spent waiting for data

The last line is one JSON object; `throughput_ratio` is ours over webdataset's, `cat_fraction` ours over `cat`'s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from vr_online.config import DataConfig, load_config
from vr_online.data.format import DatasetInfo
from vr_online.data.reader import LatentStream
from vr_online.data.writer import ShardWriter, describe, shard_name

SHAPE, CLASSES, BATCH, BUFFER = (4, 32, 32), 1000, 64, 2048
MANY = 10_000
REPO = Path(__file__).resolve().parent.parent


def write_shards(folder: Path, shards: int, samples: int) -> list[Path]:
    """Shards of random latents with their `dataset.json`."""
    rng = np.random.default_rng(0)
    stats = {}
    for number in range(shards):
        with ShardWriter(folder / shard_name(number), SHAPE) as shard:
            latents = rng.standard_normal((samples, *SHAPE), dtype=np.float32)
            shard.write_batch([f"{number:05d}{i:06d}" for i in range(samples)], latents, rng.integers(0, CLASSES, samples))
        stats[shard_name(number)] = shard.stats
    describe(
        stats, latent_shape=SHAPE, moments=False, class_names=[str(c) for c in range(CLASSES)], codec="pixel",
        codec_hash="synthetic", source="synthetic",
    ).save(folder)
    return [folder / name for name in stats]


def link_many(folder: Path, tar: Path, info: DatasetInfo) -> None:
    """A data set of 10,000 shards that are one file under many names."""
    folder.mkdir()
    count = info.shards[tar.name]
    names = [shard_name(number) for number in range(MANY)]
    for name in names:
        os.link(tar, folder / name)
    info.model_copy(update={"shards": dict.fromkeys(names, count), "samples": MANY * count, "shard_sha256": {}}).save(folder)


def config_of(folder: Path, workers: int) -> DataConfig:
    return DataConfig(shards=str(folder), workers=workers, shuffle=BUFFER)


def ours(folder: Path, workers: int):
    return LatentStream(config_of(folder, workers), DatasetInfo.load(folder), batch_size=BATCH)


def webdataset_default(tars: list[Path], workers: int):
    import webdataset as wds

    data = wds.WebDataset([str(tar) for tar in tars], shardshuffle=len(tars)).shuffle(BUFFER).decode()
    data = data.to_tuple("latent.npy", "cls").batched(BATCH).repeat()
    return iter(wds.WebLoader(data, batch_size=None, num_workers=workers))


def latents_per_s(batches, samples: int) -> float:
    start = time.perf_counter()
    for _ in range(samples // BATCH):
        next(batches)
    return samples // BATCH * BATCH / (time.perf_counter() - start)


def cat_bytes_per_s(tars: list[Path]) -> float:
    start = time.perf_counter()
    subprocess.run(["cat", *map(str, tars)], stdout=subprocess.DEVNULL, check=True)
    return sum(tar.stat().st_size for tar in tars) / (time.perf_counter() - start)


def throughput(folder: Path, tars: list[Path], workers: int, rounds: int, samples: int) -> dict:
    """Rounds of ours, webdataset's and `cat`, one after the other."""
    stream, reference = ours(folder, workers), webdataset_default(tars, workers)
    for batches in (stream, reference):  # past the filling of the buffers
        latents_per_s(batches, 2 * BUFFER)
    mine, theirs, cat = [], [], []
    for _ in tqdm(range(rounds), desc="throughput"):
        mine.append(latents_per_s(stream, samples))
        theirs.append(latents_per_s(reference, samples))
        cat.append(cat_bytes_per_s(tars))
    stream.close()
    sample_bytes = sum(tar.stat().st_size for tar in tars) / DatasetInfo.load(folder).samples
    speed = statistics.median(mine)
    return {
        "latents_per_s": round(speed),
        "webdataset_latents_per_s": round(statistics.median(theirs)),
        "throughput_ratio": round(statistics.median(a / b for a, b in zip(mine, theirs)), 2),
        "cat_fraction": round(statistics.median(a * sample_bytes / b for a, b in zip(mine, cat)), 3),
    }


def startup(folder: Path, workers: int) -> float:
    """Seconds to the first batch."""
    start = time.perf_counter()
    with ours(folder, workers) as stream:
        next(stream)
        return time.perf_counter() - start


def resident_mb() -> float:
    """Memory that this process and its children have written, pages they share counted once, in MB.

    Mapped files are left out: what of a library counts as ours depends on who else on the machine has it mapped.
    """
    total = 0
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for process in ["self", *children]:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # ended since
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return total / 1024


def memory_growth(folder: Path, workers: int, samples: int) -> float:
    """MB by which the last tenth of the samples finds more in use than the third, by when buffers and caches are full."""
    readings = []
    with ours(folder, workers) as stream, tqdm(total=samples, desc="memory", unit="latents") as bar:
        while bar.n < samples:
            for _ in range(samples // BATCH // 100):
                next(stream)
                bar.update(BATCH)
            readings.append(resident_mb())
    tenth = len(readings) // 10
    return statistics.median(readings[-tenth:]) - statistics.median(readings[2 * tenth : 3 * tenth])


def demo_wait_share(folder: Path, steps: int) -> float:
    """Share of the demo's train step, on its own data and in one process, spent waiting for a batch."""
    from vr_online.data.digits import write_digits
    from vr_online.ranks import Ranks
    from vr_online.run import start
    from vr_online.train import train_step

    write_digits(folder / "digits")
    ranks = Ranks()
    run = start(load_config(REPO / "configs/demo.yaml", [f"data.shards={folder}/digits/train", f"run_dir={folder}/run"]), ranks)
    for _ in range(3):
        train_step(run)
    waited, began = run.stream.wait_s, time.perf_counter()
    for _ in tqdm(range(steps), desc="demo steps"):
        train_step(run)
    share = (run.stream.wait_s - waited) / (time.perf_counter() - began)
    ranks.close()
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and samples")
    parser.add_argument("--workers", type=int, default=1, help="reader processes of either pipeline; 0 reads in this process")
    args = parser.parse_args()
    rounds, samples, million, steps = (3, 6_400, 60_000, 5) if args.quick else (7, 19_200, 1_000_000, 30)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tars = write_shards(folder / "shards", 8, 500 if args.quick else 2000)
        result = throughput(folder / "shards", tars, args.workers, rounds, samples)
        [one] = write_shards(folder / "one", 1, 100)
        link_many(folder / "many", one, DatasetInfo.load(folder / "one"))
        result["startup_s"] = round(startup(folder / "many", args.workers), 2)
        result["memory_growth_mb"] = round(memory_growth(folder / "many", args.workers, million), 1)
        result["wait_share"] = round(demo_wait_share(folder, steps), 4)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
