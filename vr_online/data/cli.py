"""Write, encode, decode, inspect and verify latent shards.

A data set is a folder of WebDataset tars with a `dataset.json` that says what is in them: latent shape,
codec, normalisation, class names, counts. Training reads nothing else.

  vr-online shards digits --out data/digits
  vr-online shards encode imagenet/train data/in256 --codec kl:stabilityai/sd-vae-ft-ema --size 256 --flip both --norm scale:0.18215
  vr-online shards encode cifar10.tar.gz data/cifar10 --include 'train/*' --codec tae:weights/taef2 --size 32
  vr-online shards info data/in256
  vr-online shards verify data/in256
  vr-online shards decode data/in256 grid.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_ENCODE_HELP = """\
Encode labelled images into latent shards.

SRC is one of
  a folder with one sub-folder per class (or with --labels, any folder of images);
  tars, as a folder, file or quoted glob: WebDataset style (key.jpg with key.cls), class folders inside, or
  one tar per class; also .tar.gz;
  Parquet files in Hugging Face's image layout (needs the extra `parquet`).

Interrupted, the same command continues where it was; the result is the same to the byte, whatever the number
of processes. On several machines that share OUT, give each --rank I --of N.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_digits(_action(actions, "digits", _digits, "write scikit-learn's handwritten digits as pixel latents"))
    _add_encode(_action(actions, "encode", _encode, "encode images into latent shards", _ENCODE_HELP))
    _add_decode(_action(actions, "decode", _decode, "decode some samples into one picture"))
    info = _action(actions, "info", _info, "print counts, shapes, codec, normalisation and a class histogram")
    info.add_argument("shards", metavar="SHARDS", help="folder or dataset.json, or the URL of either")
    verify = _action(actions, "verify", _verify, "read everything and list every fault, one a line; status 1 if there is any")
    verify.add_argument("shards", metavar="SHARDS", help="folder of the data set")
    verify.add_argument("--workers", type=int, help="processes (default: as the size asks for)")


def run(args: argparse.Namespace) -> int:
    return args.action_run(args) or 0


def _action(actions, name: str, function, summary: str, description: str | None = None) -> argparse.ArgumentParser:
    parser = actions.add_parser(
        name, help=summary, description=description or summary.capitalize() + ".", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(action_run=function)
    return parser


def _add_digits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, help="folder; gets train/ (1,500 images) and heldout/ (297)")
    parser.add_argument("--shards", type=int, default=8, help="tars per split, at least ranks x workers (default 8)")


def _add_encode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="images; see above")
    parser.add_argument("out", metavar="OUT", help="folder for the shards")
    parser.add_argument(
        "--codec", required=True, help="pixel, tae:PATH (TAESD or TAEF2 weights) or kl:FOLDER-OR-HUB-ID (needs the extra `kl`)"
    )
    parser.add_argument("--size", type=int, required=True, help="side of the centre crop, in pixels")
    parser.add_argument("--flip", choices=["none", "both"], default="none", help="both: store each image and its mirror image")
    parser.add_argument("--moments", action="store_true", help="store the posterior's mean and std, sampled afresh in every epoch")
    parser.add_argument("--posterior", choices=["sample", "mean"], default="sample", help="without --moments: store a sample or the mean")
    parser.add_argument("--norm", default="measured", help="measured (default), scale:0.18215 or from:DATASET")
    source = parser.add_argument_group("source")
    source.add_argument("--labels", help="CSV (file,label) or JSON with the label of each image, instead of class folders")
    source.add_argument("--class-names", help="JSON list or text file of class names, in the order of the labels")
    source.add_argument("--include", default="*", help="pattern on the names inside SRC, such as 'train/*'")
    source.add_argument("--limit", type=int, help="only so many images")
    source.add_argument("--no-shuffle", action="store_true", help="keep the order of SRC (Parquet always does)")
    source.add_argument("--on-error", choices=["stop", "skip"], default="stop", help="at a corrupt image: stop, or skip and count it")
    work = parser.add_argument_group("work")
    work.add_argument("--shard-size", type=int, help="images per shard (default: at least 16 shards of at most 2048)")
    work.add_argument("--batch-size", type=int, default=64, help="images per pass of the codec (default 64)")
    work.add_argument("--seed", type=int, default=0, help="keys the order and posterior samples")
    work.add_argument("--workers", type=int, help="processes (default: one per GPU, or per core without one)")
    work.add_argument("--precision", choices=["fp32", "tf32"], default="fp32", help="tf32: several times faster on a GPU, rounds like float16")
    work.add_argument("--decode-threads", type=int, default=4, help="threads that open images for each GPU (default 4)")
    work.add_argument("--device", default="auto", help="auto, cpu, cuda or a list such as cuda:0,cuda:1")
    work.add_argument("--rank", type=int, default=0, help="this machine's number")
    work.add_argument("--of", type=int, default=1, help="machines that share the work")


def _add_decode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", metavar="SHARDS", help="folder of the data set")
    parser.add_argument("image", metavar="PNG", help="picture to write")
    parser.add_argument("--n", type=int, default=64, help="samples (default 64)")
    parser.add_argument("--columns", type=int, default=8, help="pictures a row (default 8)")
    parser.add_argument("--by-class", action="store_true", help="one class a row instead of the order of the shards")
    parser.add_argument("--codec-path", help="where the codec's weights are, if not where they were when encoding")


def _digits(args: argparse.Namespace) -> None:
    from vr_online.data.digits import write_digits

    for split, info in write_digits(args.out, args.shards).items():
        print(f"{args.out}/{split}: {info.samples} samples in {len(info.shards)} shards")


def _encode(args: argparse.Namespace) -> None:
    import time

    from vr_online.data.encode import WORK_FOLDER, EncodeOptions, encode
    from vr_online.data.images import open_index

    options = EncodeOptions(
        codec=args.codec, size=args.size, flip=args.flip, posterior="moments" if args.moments else args.posterior, norm=args.norm,
        shuffle=not args.no_shuffle, seed=args.seed, shard_size=args.shard_size, batch_size=args.batch_size,
        precision=args.precision, on_error=args.on_error, limit=args.limit,
    )
    index = open_index(
        args.source, labels=args.labels, class_names=args.class_names, include=args.include, scratch=Path(args.out) / WORK_FOLDER
    )
    print(f"{args.source}: {len(index.items)} images in {len(index.class_names)} classes", file=sys.stderr)
    if (args.no_shuffle or not index.seekable) and _sorted_by_class(index.items):
        print("note: the images come sorted by class and stay so, hence shards hold one class each; shuffle them first", file=sys.stderr)
    start = time.perf_counter()
    result = encode(
        index, args.out, options, source=args.source, workers=args.workers, devices=_devices(args.device),
        decode_threads=max(1, args.decode_threads), rank=args.rank, world_size=args.of,
    )
    seconds = time.perf_counter() - start
    for name in result.skipped[:20]:
        print(f"skipped {name}", file=sys.stderr)
    if result.info is None:
        print(f"{args.out}: this share is done; dataset.json follows when all {args.of} are")
        return
    speed = f", {result.images / seconds:.1f} images/s" if result.images else ", already complete"
    print(f"{args.out}: {result.info.samples} samples in {len(result.info.shards)} shards, {len(result.skipped)} images skipped{speed}")


def _sorted_by_class(items) -> bool:
    labels = [item.label for item in items]
    return len(set(labels)) > 1 and labels == sorted(labels)


def _devices(text: str) -> list[str]:
    import torch

    from vr_online.errors import UserError

    count = torch.cuda.device_count()
    if text in ("auto", "cuda"):
        if text == "cuda" and not count:
            raise UserError("--device cuda: this machine has no CUDA device")
        return [f"cuda:{i}" for i in range(count)] or ["cpu"]
    for device in text.split(","):
        kind, _, number = device.partition(":")
        if not (device == "cpu" or (kind == "cuda" and number.isdigit() and int(number) < count)):
            raise UserError(f"--device {text}: {device!r} is not cpu or one of this machine's {count} CUDA devices")
    return text.split(",")


def _decode(args: argparse.Namespace) -> None:
    from vr_online.data.show import decode_grid

    count = decode_grid(args.shards, args.image, n=args.n, columns=args.columns, by_class=args.by_class, codec_path=args.codec_path)
    print(f"{args.image}: {count} samples")


def _info(args: argparse.Namespace) -> None:
    from vr_online.data.format import DatasetInfo
    from vr_online.data.show import summary

    print(summary(DatasetInfo.load(args.shards)))


def _verify(args: argparse.Namespace) -> int:
    from vr_online.data.verify import verify

    faults = verify(args.shards, workers=args.workers)
    for fault in faults:
        print(fault)
    print(f"{args.shards}: {len(faults)} faults" if faults else f"{args.shards}: sound")
    return 1 if faults else 0
