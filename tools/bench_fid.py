"""Times a whole evaluation two ways: ours, in memory, against writing PNGs and calling clean-fid on the folder.

Both get the same generated images, the same network and the same reference images, and alternate in one run.
The images stand for decoded samples; making them costs both routes the same and is left out. The network is
a random Inception-v3-shaped TorchScript file (`--layers inception`), a small one (`--layers small`), or your
own file (`--inception PATH`). What clean-fid is given: its dataset loader with `--workers` processes, its own
wrapper of the network, statistics of the reference precomputed (as are ours), and its matrix square root.

    python tools/bench_fid.py --quick
    python tools/bench_fid.py --n 1000 --layers inception

The last line is JSON: `throughput_ratio` (our images/s over theirs, median of the rounds), `value_difference`
(relative), the seconds of each round, and `memory_growth_mib` of our route from n / 10 to n samples.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import tempfile
import time
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.evaluation.networks import inception_v3_layers, pictures, small_layers, write_inception  # noqa: E402
from vr_online.evaluation.features import build_extractor  # noqa: E402
from vr_online.evaluation.measure import measure  # noqa: E402
from vr_online.evaluation.sources import ImageSource  # noqa: E402
from vr_online.evaluation.statistics import Statistics, compute_statistics  # noqa: E402


class Images:
    """Hands out the images of an array as samples."""

    evaluations = 0

    def __init__(self, images: np.ndarray):
        self.images = torch.from_numpy(images)

    def __call__(self, first: int, last: int) -> torch.Tensor:
        return self.images[first:last]


class ArraySource(ImageSource):
    """The images of an array as a source of reference statistics."""

    def __init__(self, images: np.ndarray):
        super().__init__("array", [], tars=False)
        self.images, self.count = images, len(images)

    def samples(self, rank: int = 0, world_size: int = 1):
        yield from self.images[rank::world_size]


def ours(images: np.ndarray, extractor, reference: Statistics, batch_size: int) -> float:
    return measure(Images(images), extractor, reference, n=len(images), batch_size=batch_size, progress=False).value


def theirs(
    images: np.ndarray, network: Path, reference: Statistics, mode: str, batch_size: int, workers: int, device: torch.device
) -> float:
    """PNGs to a folder, then what clean-fid does with a folder and statistics."""
    from cleanfid import fid
    from cleanfid.inception_torchscript import InceptionV3W

    with tempfile.TemporaryDirectory() as folder:
        for i, image in enumerate(images):
            Image.fromarray(image.transpose(1, 2, 0)).save(Path(folder, f"{i:06d}.png"))
        model = InceptionV3W(str(network.parent), download=False, resize_inside=mode == "legacy_tensorflow").to(device)
        features = fid.get_folder_features(
            folder, model, num_workers=workers, batch_size=batch_size, device=device, mode=mode, verbose=False
        )
        mean, cov = np.mean(features, axis=0), np.cov(features, rowvar=False)
        return float(fid.frechet_distance(mean, cov, reference.moments.mean, reference.moments.cov))


def allow_new_scipy() -> None:
    """SciPy 1.18 removed the argument that clean-fid calls its matrix square root with."""
    from cleanfid import fid

    root = fid.linalg.sqrtm
    if "disp" not in inspect.signature(root).parameters:
        fid.linalg.sqrtm = lambda matrix, disp=True: (root(matrix), 0.0)


def growth(images: np.ndarray, extractor, reference: Statistics, batch_size: int) -> float:
    """MiB by which the peak of our host memory at n exceeds that at n / 10."""

    def peak(n: int) -> int:
        tracemalloc.start()
        ours(images[:n], extractor, reference, batch_size)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    return (peak(len(images)) - peak(max(2 * batch_size, len(images) // 10))) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=400, help="images (default 400)")
    parser.add_argument("--size", type=int, default=256, help="their side (default 256)")
    parser.add_argument("--rounds", type=int, default=3, help="times each route runs (default 3)")
    parser.add_argument("--mode", default="clean", choices=("clean", "legacy_tensorflow", "legacy_pytorch"))
    parser.add_argument("--layers", default="inception", choices=("inception", "small"), help="random network to use")
    parser.add_argument("--inception", type=Path, help="a real Inception file instead, named inception-2015-12-05.pt")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2, help="clean-fid's loader processes (default 2)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="64 images, a small network, one round: under a minute")
    args = parser.parse_args()
    if args.quick:
        args.n, args.rounds, args.layers = 64, 1, "small"
    warnings.simplefilter("ignore")
    allow_new_scipy()
    print(json.dumps(bench(args)))


def bench(args: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        network = args.inception or write_inception(
            Path(folder), inception_v3_layers() if args.layers == "inception" else small_layers()
        )
        device = torch.device(args.device)
        extractor = build_extractor(f"inception({network})", resize=args.mode, device=device)
        images = pictures(args.n, args.size, seed=0)
        reference = compute_statistics(
            ArraySource(pictures(args.n, args.size, seed=1, contrast=45)), extractor, batch_size=args.batch_size
        )
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        values = {}
        for _ in tqdm(range(args.rounds), desc="rounds", unit="round"):
            for name, route in (
                ("ours", lambda: ours(images, extractor, reference, args.batch_size)),
                ("theirs", lambda: theirs(images, network, reference, args.mode, args.batch_size, args.workers, device)),
            ):
                start = time.perf_counter()
                values[name] = route()
                times[name].append(time.perf_counter() - start)
                tqdm.write(f"{name}: {times[name][-1]:.2f} s, {args.n / times[name][-1]:.1f} images/s, {values[name]:.6g}")
        return {
            "throughput_ratio": round(statistics.median(times["theirs"]) / statistics.median(times["ours"]), 3),
            "value_difference": abs(values["ours"] - values["theirs"]) / abs(values["theirs"]),
            "ours_s": [round(t, 3) for t in times["ours"]],
            "theirs_s": [round(t, 3) for t in times["theirs"]],
            "memory_growth_mib": None if args.quick else round(growth(images, extractor, reference, args.batch_size), 2),
            **{key: getattr(args, key) for key in ("n", "size", "mode", "layers", "batch_size", "workers", "device")},
        }


if __name__ == "__main__":
    main()
