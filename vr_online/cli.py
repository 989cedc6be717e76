"""`vr-online`: the console script. Each command's module is imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys

from vr_online import __version__
from vr_online.errors import UserError

# command -> (module with add_arguments(parser) and run(args) -> exit status or None, one line of help)
COMMANDS = {
    "shards": ("vr_online.data.cli", "write, encode, decode, inspect and verify latent shards"),
    "train": ("vr_online.train", "train on this machine's one process (use the deepspeed launcher for more)"),
    "fid": ("vr_online.evaluation.cli", "evaluate checkpoints, make reference statistics, compare runs"),
    "sample": ("vr_online.evaluation.sample_cli", "generate images from a checkpoint"),
    "export": ("vr_online.export", "write a checkpoint's weights as one safetensors or official SiT file"),
    "density": ("vr_online.timesteps.cli", "compute and draw timestep densities, the published offline one included"),
    "plot": ("vr_online.monitor.plot", "turn a run's metrics into PNG figures"),
    "doctor": ("vr_online.doctor", "check that this machine can run the trainer, and say what is missing"),
}


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser; only the arguments of `command` are filled in, so that help for one imports one module."""
    parser = argparse.ArgumentParser(prog="vr-online", description=__import__("vr_online").__doc__)
    parser.add_argument("--version", action="version", version=f"vr-online {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        if name == command:
            loaded = importlib.import_module(module)
            sub = subparsers.add_parser(
                name, help=summary, description=loaded.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
            )
            loaded.add_arguments(sub)
            sub.set_defaults(run=loaded.run)
        else:
            subparsers.add_parser(name, help=summary, add_help=False)
    return parser


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    command = next((a for a in argv if a in COMMANDS), None)
    args = build_parser(command).parse_args(argv)
    try:
        return args.run(args) or 0
    except UserError as error:
        print(f"vr-online {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
