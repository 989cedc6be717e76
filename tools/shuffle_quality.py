"""How well the stream shuffles: the order samples leave in against the order they are stored in.

    python tools/shuffle_quality.py                                  # ImageNet-like: 1,281,167 samples in 1,282 shards
    python tools/shuffle_quality.py --shards data/digits/train       # the counts of real shards
    python tools/shuffle_quality.py --samples 100000 --per-shard 1000 --lanes 8

For several buffers it prints, over one epoch of one lane,

    correlation    of stored and streamed order: 0 is a perfect shuffle
    neighbours     mean distance, in the stream, of samples stored next to one another, as a share of what a perfect
                   shuffle gives (a third of the lane's epoch); shards stored by class need this to be large
    batch_classes  distinct classes in a batch of 64 when shards are stored by class (1,000 classes), as a share of
                   what a perfect shuffle gives: the harm a small buffer does. Write shards in shuffled order.

beside a perfect shuffle and webdataset's reservoir buffer of the same size fed with the same shard order. Only
indices are computed. The last line is one JSON object for the default buffer.
"""

from __future__ import annotations

import argparse
import json
import random

import numpy as np
from tqdm import tqdm

from vr_online.config import DataConfig
from vr_online.data.format import DatasetInfo
from vr_online.data.order import LanePlan, Layout, Order

BATCH, CLASSES = 64, 1000


def stored_index(plan: LanePlan, starts: np.ndarray) -> np.ndarray:
    """Place in the data set of each sample a lane reads, in reading order."""
    return np.concatenate([starts[piece.shard] + np.arange(piece.count) for piece in plan.pieces])


def reservoir(read: np.ndarray, size: int) -> np.ndarray:
    """webdataset's shuffle: a list of `size` samples, of which a random one leaves for each that comes."""
    from webdataset.filters import shuffle

    return np.fromiter(shuffle(bufsize=size, initial=size, rng=random.Random(0))(iter(read.tolist())), np.int64, len(read))


def quality(order: np.ndarray, samples: int) -> dict[str, float]:
    """The three figures for stored indices in streamed order, out of a data set of `samples`."""
    place = np.argsort(order)
    ranked = np.sort(order)
    beside = np.diff(ranked) == 1
    classes = order * CLASSES // samples
    batches = classes[: len(order) // BATCH * BATCH].reshape(-1, BATCH)
    perfect = np.random.default_rng(0).permutation(classes)[: batches.size].reshape(-1, BATCH)
    return {
        "correlation": round(float(np.corrcoef(np.arange(len(order)), order)[0, 1]), 4),
        "neighbours": round(float(np.abs(np.diff(place))[beside].mean() / (len(order) / 3)), 4),
        "batch_classes": round(distinct(batches) / distinct(perfect), 4),
    }


def distinct(batches: np.ndarray) -> float:
    """Mean number of distinct values in a row."""
    return float((np.diff(np.sort(batches, axis=1), axis=1) != 0).sum(axis=1).mean() + 1)


def counts_of(args: argparse.Namespace) -> list[int]:
    if args.shards:
        return list(DatasetInfo.load(args.shards).shards.values())
    whole, rest = divmod(args.samples, args.per_shard)
    return [args.per_shard] * whole + ([rest] if rest else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100,000 samples")
    parser.add_argument("--shards", help="folder whose dataset.json gives the counts")
    parser.add_argument("--samples", type=int, default=1_281_167)
    parser.add_argument("--per-shard", type=int, default=1000)
    parser.add_argument("--lanes", type=int, default=8, help="ranks x workers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.quick:
        args.samples = 100_000
    counts = counts_of(args)
    starts = np.concatenate([[0], np.cumsum(counts)])
    default = DataConfig().shuffle
    rows = {}
    for shuffle in tqdm([1, 256, 1024, default, 16_384], desc="buffers"):
        plan = Order(counts, Layout(args.lanes, shuffle, args.seed)).plan(0, 0)
        read = stored_index(plan, starts)
        rows[f"buffer {shuffle}"] = quality(read[np.fromiter(plan.leaving(), np.int64, plan.size)], int(starts[-1]))
        if shuffle == default:
            rows[f"webdataset's buffer of {shuffle}"] = quality(reservoir(read, shuffle), int(starts[-1]))
    rows["perfect"] = quality(np.random.default_rng(1).permutation(read), int(starts[-1]))
    print(f"{'':28s}{'correlation':>14s}{'neighbours':>14s}{'batch_classes':>15s}")
    for name, row in rows.items():
        print(f"{name:28s}" + "".join(f"{value:>14.4f}" for value in row.values()))
    print(json.dumps({"shuffle": default, "lanes": args.lanes, **rows[f"buffer {default}"]}))


if __name__ == "__main__":
    main()
