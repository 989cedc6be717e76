"""Compute and draw timestep densities (t = 0 is noise, t = 1 is data).

The published offline density, for your latents and path; `timesteps.target=vr_static(FILE)` then trains with it:

  vr-online density vr-static --shards data/in256 --path linear --out in256-linear.npz

It needs no network: for points x_t it computes how much the target still varies given x_t, over a reference
subset of the latents. 50,000 latents of 4 x 32 x 32 take under 4 GiB; use a GPU, or fewer with --subset.

Any density, drawn for comparison; the specs are those of `timesteps.target` and `timesteps.proposal`:

  vr-online density show uniform 'logit_normal(0, 1)' 'shift(3)' 'vr_static(in256-linear.npz)' --out densities.png
  vr-online density list
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vr_online.errors import UserError
from vr_online.timesteps import densities, rules


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the actions vr-static, show and list."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    static = actions.add_parser("vr-static", help="offline loss-gradient variance of latents over t")
    static.add_argument("--shards", required=True, help="folder of latent shards, or an .npy / .npz of normalised latents")
    static.add_argument("--path", choices=["linear", "gvp", "vp"], default="linear", help="flow.path of the run")
    static.add_argument("--prediction", choices=["velocity", "noise", "data"], default="velocity", help="flow.prediction of the run")
    static.add_argument("--subset", type=int, default=50_000, help="latents in the reference set (default 50,000)")
    static.add_argument("--bins", type=int, default=32, help="cells of [0, 1]; need not be the run's (default 32)")
    static.add_argument("--queries", type=int, default=64, help="points x_t per bin; the error falls with their root (default 64)")
    static.add_argument("--floor", type=float, default=0.05, help="share of the uniform density in the table, because the "
                        "variance of a finite set vanishes towards the data (default 0.05; 0 leaves it as it is)")
    static.add_argument("--seed", type=int, default=0)
    static.add_argument("--device", help="such as cuda or cpu; default: cuda where there is one")
    static.add_argument("--out", default="vr_static.npz", help="table to write, npz or json; a picture goes beside it")
    static.set_defaults(action_run=_vr_static)
    show = actions.add_parser("show", help="draw densities")
    show.add_argument("specs", nargs="+", metavar="SPEC", help="such as 'logit_normal(0, 1)'")
    show.add_argument("--bins", type=int, default=200)
    show.add_argument("--out", default="densities.png")
    show.set_defaults(action_run=_show)
    actions.add_parser("list", help="name every density, fixed and learned").set_defaults(action_run=_list)


def run(args: argparse.Namespace) -> int | None:
    return args.action_run(args)


def _vr_static(args: argparse.Namespace) -> None:
    import torch

    from vr_online.flow.paths import get_path
    from vr_online.timesteps import vr_static

    for name, least in (("subset", 2), ("bins", 1), ("queries", 2)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} {getattr(args, name)}: must be at least {least}")
    if not 0 <= args.floor < 1:
        raise UserError(f"--floor {args.floor}: must be at least 0 and below 1")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    references = vr_static.load_references(args.shards, args.subset, args.seed)
    found = vr_static.estimate(
        references, get_path(args.path), prediction=args.prediction, bins=args.bins, queries=args.queries, seed=args.seed,
        device=device, progress=True,
    )
    found.save(args.out, args.floor, path=args.path, prediction=args.prediction, references=len(references), queries=args.queries, seed=args.seed)
    picture = Path(args.out).with_suffix(".png")
    _draw_static(found, args.floor, f"vr_static, {args.path} path, {len(references)} latents", picture)
    if found.collapse() is not None:
        print(f"from t = {found.collapse():.3f} on, each point belongs to one latent of the set: no variance there but --floor {args.floor:g}")
    print(f"wrote {args.out} and {picture}; train with timesteps.target='vr_static({args.out})'")


def _draw_static(found, floor: float, title: str, file: Path) -> None:
    figure, axes = _axes(title)
    centers = (found.edges[1:] + found.edges[:-1]) / 2
    density = found.density(floor)
    scale = (1 - floor) * found.density().max() / found.variance.max()
    axes.stairs(density, found.edges, linewidth=1.5)
    axes.errorbar(centers, density, 2 * found.stderr * scale, fmt="none", ecolor="0.4", capsize=2, label="two standard errors")
    axes.legend()
    figure.savefig(file)


def _show(args: argparse.Namespace) -> None:
    import numpy as np

    edges = np.linspace(0, 1, args.bins + 1)
    masses = {spec: densities.bin_masses(spec, args.bins) for spec in args.specs}
    figure, axes = _axes("timestep densities")
    for spec, mass in masses.items():
        axes.stairs(mass * args.bins, edges, label=spec, linewidth=1.5)
    axes.legend()
    figure.savefig(args.out)
    print(f"wrote {args.out}")


def _axes(title: str):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="t (0 noise, 1 data)", ylabel="density", xlim=(0, 1))
    axes.grid(alpha=0.3)
    return figure, axes


def _list(args: argparse.Namespace) -> None:
    def section(title: str, table) -> None:
        print(title)
        for name, entry in table.items():
            form = f"{name}({', '.join(entry.parameters)})" if entry.parameters else name
            print(f"  {form:24s}{entry.help}")

    section("fixed, as timesteps.target or timesteps.proposal:", densities.DENSITIES)
    section("learned, as timesteps.target:", rules.TARGETS)
    section("learned, as timesteps.proposal:", rules.PROPOSALS)
    print(f"  {'same':24s}draw from the target")
