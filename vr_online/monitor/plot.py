"""Turn a run's metrics into PNG figures.

Reads `metrics.jsonl`, `bins.jsonl` and `evals/*/result.json` of a run directory and draws

  loss.png      loss, gradient norm, learning rate, skipped steps
  speed.png     images/s, step time, share of time waiting for data, MFU, memory
  variance.png  gradient variance, second moment and loss of each time bin, now and over training
  proposal.png  where t is drawn (p), what the objective is (q), the weights
  sampler.png   predicted and achieved gain, weights, visits and age of the bins
  fid.png       the evaluations so far

A figure whose numbers the run does not record is left out. The run may still be going.

examples:
  vr-online plot runs/demo                      # into runs/demo/figures
  vr-online plot runs/a runs/b --out compare    # several runs in the same axes
  vr-online plot runs/a --x hours --only loss fid
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Sequence

from tqdm import tqdm

from vr_online.errors import UserError
from vr_online.monitor.figures import rasterize
from vr_online.monitor.grid import save_png
from vr_online.monitor.run_figures import FIGURES
from vr_online.monitor.runs import Run, read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run directory, such as runs/demo; several are drawn together")
    add("--out", type=Path, help="folder of the figures (default: RUN/figures; `figures` for several runs)")
    add("--x", choices=("images", "step", "hours"), default="images", help="horizontal axis (default: images)")
    add("--only", nargs="+", choices=tuple(FIGURES), metavar="NAME", help=f"of {', '.join(FIGURES)}")


def read_runs(directories: Sequence[str]) -> list[Run]:
    """Reads runs, named by the end of their path that tells them apart."""
    paths = [Path(directory).resolve() for directory in directories]
    if len(set(paths)) < len(paths):
        raise UserError(f"the same run is given twice: {' '.join(map(str, directories))}")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return [read_run(given, "/".join(path.parts[-depth:])) for given, path in zip(directories, paths)]


def plot(
    directories: Sequence[str], out: Path | None = None, x: str = "images", only: Sequence[str] | None = None
) -> list[Path]:
    """Draws the figures and returns the files written.

    Raises:
        UserError: a run or its metrics are missing, or none of the figures can be drawn.
    """
    runs = read_runs(directories)
    folder = out or (Path(directories[0]) / "figures" if len(runs) == 1 else Path("figures"))
    written = []
    for name in tqdm(only or list(FIGURES), desc="figures", unit="figure", leave=False):
        figure = FIGURES[name](runs, x)
        if figure is not None:
            save_png(folder / f"{name}.png", rasterize(figure))
            written.append(folder / f"{name}.png")
    if not written:
        wanted = ", ".join(only or FIGURES)
        raise UserError(f"{' '.join(map(str, directories))}: records nothing that {wanted} could show")
    return written


def run(args: argparse.Namespace) -> None:
    for path in plot(args.runs, args.out, args.x, args.only):
        print(path)
