"""Write, encode, decode, inspect and verify latent shards.

A data set is a folder of WebDataset tars and a `dataset.json` that says what is in them.

  vr-online shards digits --out data/digits
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    digits = subparsers.add_parser("digits", help="write scikit-learn's handwritten digits as pixel latents")
    digits.add_argument("--out", required=True, help="folder; gets train/ (1,500 images) and heldout/ (297)")
    digits.add_argument("--shards", type=int, default=8, help="tars per split, at least ranks x workers (default 8)")
    digits.set_defaults(action_run=_digits)


def run(args: argparse.Namespace) -> int:
    return args.action_run(args) or 0


def _digits(args: argparse.Namespace) -> None:
    from vr_online.data.digits import write_digits

    for split, info in write_digits(args.out, args.shards).items():
        print(f"{args.out}/{split}: {info.samples} samples in {len(info.shards)} shards")
