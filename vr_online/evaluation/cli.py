"""Evaluate checkpoints, make reference statistics, compare runs.

Evaluate checkpoints of a run, on any machine that sees its folder. Settings are those of the run's
configuration (section `evaluation`) unless key=value says otherwise; results go to RUN/evals/STEP/result.json,
to the run's TensorBoard and to RUN/figures/fid.png. A killed evaluation continues where it was.

  vr-online fid runs/a                               the newest checkpoint
  vr-online fid runs/a --steps 10000,20000           these
  vr-online fid runs/a --all                         all that have no result yet
  vr-online fid runs/a --watch                       each new one as it appears; start as many watchers as you like
  vr-online fid runs/a n=50000 solver=dopri5 cfg=1.5 with other settings (kept apart from the run's own results)
  deepspeed --num_gpus 8 --module vr_online.evaluation.cli runs/a --all

Make reference statistics from a folder of images, image tars or latent shards:

  vr-online fid stats data/imagenet/val --out in256.npz --features 'inception(weights/inception-2015-12-05.pt)' --size 256
  vr-online fid stats data/digits/heldout --out heldout.npz --features latent

Table runs by their last (or best) evaluation; numbers that are not comparable are not ranked:

  vr-online fid compare runs/a runs/b --best

More on each: vr-online fid RUN --help, vr-online fid stats --help, vr-online fid compare --help
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, Optional

from vr_online.errors import UserError

EVALUATE_HELP = """Evaluate checkpoints of a run.

key=value is any key of the section `evaluation` (n=1000, solver=heun, steps=25, cfg=1.5, features=effnet_lite0,
reference=x.npz, 'metrics=[fd, kid]', ...), or a full key such as data.shards=PATH.
"""
STATS_HELP = "Make reference statistics. How images were prepared, and a hash of it, is written into the file."
COMPARE_HELP = "Table runs, best first. Exits with status 2, naming what differs, when the numbers are not comparable."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="RUN | stats SRC | compare RUN...", help="see above")


def run(args: argparse.Namespace) -> int:
    words = args.arguments
    actions = {"stats": (_stats_parser, _stats), "compare": (_compare_parser, _compare)}
    if not words:
        raise UserError("say what to evaluate: vr-online fid RUN, vr-online fid stats SRC or vr-online fid compare RUN...")
    make, act = actions.get(words[0], (_evaluate_parser, _evaluate))
    return act(make().parse_intermixed_args(words[1:] if words[0] in actions else words)) or 0


def _parser(usage: str, text: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"vr-online fid {usage}".rstrip(), description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU where there is one)")
    parser.add_argument(
        "--download", action="store_true", help="let clean-fid fetch a missing Inception to the path in `features`"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _evaluate_parser() -> argparse.ArgumentParser:
    parser = _parser("", EVALUATE_HELP)
    parser.add_argument("run", metavar="RUN", help="run directory, or one checkpoint folder of it")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="other settings than the run's")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--steps", metavar="A,B,...", help="evaluate these steps (default: the newest checkpoint)")
    which.add_argument("--all", action="store_true", help="evaluate every checkpoint that has no result")
    which.add_argument("--watch", action="store_true", help="evaluate every checkpoint as it appears, to the run's last")
    parser.add_argument("--force", action="store_true", help="evaluate again where there is a result")
    parser.add_argument(
        "--interval", type=float, default=30, metavar="S", help="seconds between two looks of --watch (default 30)"
    )
    parser.add_argument("--give-up", type=float, metavar="S", help="end --watch after S seconds without a new checkpoint")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher passes it
    _add_device(parser)
    return parser


def _stats_parser() -> argparse.ArgumentParser:
    parser = _parser("stats", STATS_HELP)
    parser.add_argument(
        "source", metavar="SRC", help="folder of images or of tars, tar, 'pattern*.tar', or latent shards (decoded)"
    )
    parser.add_argument("--out", required=True, help="npz to write")
    parser.add_argument(
        "--features", default="latent", help="latent, inception(PATH), effnet_lite0, torchscript(PATH) (default: latent)"
    )
    parser.add_argument(
        "--resize",
        default="clean",
        choices=("clean", "legacy_tensorflow", "legacy_pytorch"),
        help="for inception (default: clean)",
    )
    parser.add_argument("--size", type=int, help="centre-crop images to SIZE x SIZE first, as ADM does (default: leave them)")
    parser.add_argument(
        "--keep-features", action="store_true", help="also keep every feature vector, for KID and precision / recall"
    )
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--codec-path", help="weights of the shards' codec (default: where they were when encoding)")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    _add_device(parser)
    return parser


def _compare_parser() -> argparse.ArgumentParser:
    parser = _parser("compare", COMPARE_HELP)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("--best", action="store_true", help="each run's best evaluation instead of its last")
    parser.add_argument("--step", type=int, help="only evaluations of this step")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="field=value",
        help="choose among several settings, such as --where n=50000",
    )
    return parser


def _evaluate(args: argparse.Namespace) -> int:
    path, run_step = _run_dir(args.run)
    steps = _steps(args.steps) if args.steps else ([run_step] if run_step is not None else None)
    group, device, close = _start(args.device)
    from vr_online.evaluation.offline import Offline

    try:
        offline = Offline(path, tuple(args.overrides), group, device, args.download, args.force, progress=not args.quiet)
        if args.watch:
            failures = offline.watch(_report, args.interval, args.give_up)
        else:
            failures = offline.evaluate_all(_checkpoints(path) if args.all else steps or [None], _report)
    finally:
        close()
    if failures and group.is_main:
        print(f"{len(failures)} of the evaluations failed", file=sys.stderr)
    return 2 if failures else 0


def _run_dir(given: str) -> tuple[Path, Optional[int]]:
    """The run directory, and the step where a checkpoint folder was given."""
    path = Path(given)
    if not path.is_dir():
        raise UserError(f"{given}: no such run directory")
    if path.resolve().parent.name == "checkpoints" and path.resolve().name.isdigit():
        return path.resolve().parent.parent, int(path.resolve().name)
    return path, None


def _steps(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise UserError(f"--steps {text}: expected whole numbers with commas, such as 1000,2000") from None


def _checkpoints(path: Path) -> list[int]:
    from vr_online.checkpoint import list_checkpoints

    steps = list_checkpoints(path)
    if not steps:
        raise UserError(f"{path}: no whole checkpoint under checkpoints/")
    return steps


def _report(result: dict[str, Any]) -> None:
    from tqdm import tqdm

    numbers = "  ".join(f"{name} {value:.5g}" for name, value in result["metrics"].items())
    how = f"n {result['n']}, {result['solver']}, nfe {result['nfe']:g}, cfg {result['cfg']:g}, {result['weights']}"
    tqdm.write(f"step {result['step']}: {numbers}  ({how})")


def _start(device: Optional[str]) -> tuple[Any, Any, Any]:
    """The group of ranks the launcher started (or this process alone), its device, and what closes it."""
    import torch

    from vr_online.evaluation.group import Group

    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        from vr_online.ranks import Ranks

        ranks = Ranks()
        return Group.current(), torch.device(device) if device else ranks.device, ranks.close
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device}: cannot be used ({str(error).splitlines()[0]})") from None
    return Group(), chosen, lambda: None


def _stats(args: argparse.Namespace) -> None:
    group, device, close = _start(args.device)
    from vr_online.evaluation.features import build_extractor
    from vr_online.evaluation.sources import open_source
    from vr_online.evaluation.statistics import compute_statistics, source_codec

    try:
        source = open_source(args.source, args.size)
        extractor = build_extractor(
            args.features, resize=args.resize, device=device, info=getattr(source, "info", None), download=args.download
        )
        statistics = compute_statistics(
            source,
            extractor,
            codec=source_codec(source, extractor, args.codec_path),
            batch_size=args.batch_size,
            keep_features=args.keep_features,
            group=group,
            progress=not args.quiet,
        )
        if group.is_main:
            statistics.save(args.out)
            found = statistics.moments
            print(f"{args.out}: {found.n} samples, {found.dim} features of {extractor.name}, hash {statistics.hash[:16]}")
    finally:
        close()


def _compare(args: argparse.Namespace) -> None:
    from vr_online.evaluation.compare import compare

    print(compare(args.runs, "best" if args.best else "last", args.step, args.where))


def main(argv: Optional[list[str]] = None) -> int:
    """What `python -m vr_online.evaluation.cli` and the deepspeed launcher run."""
    words = sys.argv[1:] if argv is None else argv
    # The launcher puts --local_rank first; the word that says what to do must come first for us.
    flags = [word for word in words if word.startswith("--local_rank")]
    words = [word for word in words if word not in flags] + flags
    try:
        if not words or words[0] in ("-h", "--help"):
            print(__doc__)
            return 0
        return run(argparse.Namespace(arguments=words))
    except UserError as error:
        print(f"vr-online fid: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
