"""Generate images from a checkpoint.

    vr-online sample runs/demo                                   16 images of the newest checkpoint to samples.png
    vr-online sample runs/demo --classes 3,7 --n 32 --cfg 2      classes by number, name or range (0-4)
    vr-online sample runs/demo/checkpoints/2000 --out images/    one PNG an image
    vr-online sample runs/demo --n 10000 --out samples.npz       arr_0: (n, h, w, 3) uint8, arr_1: labels
    vr-online sample runs/demo --solver euler_maruyama --steps 250 --diffusion sigma

Whatever is not said here is as the checkpoint's own `evaluation` section has it. Image k is drawn from seed + k: it is
the same for any --n, --batch-size and device.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Sequence

import numpy as np
import torch
from tqdm import tqdm

from vr_online.errors import UserError
from vr_online.evaluation.generation import LoadedModel, Sampler, decode_images, load_model
from vr_online.evaluation.precision import full_float32
from vr_online.files import written_aside

if TYPE_CHECKING:
    from vr_online.config import EvaluationConfig

# option -> key of the evaluation section it overrides
OVERRIDES = {
    "solver": "solver", "steps": "steps", "cfg": "cfg", "interval": "cfg_interval", "diffusion": "diffusion",
    "last_step": "last_step", "last_step_size": "last_step_size", "labels": "labels", "dtype": "dtype", "seed": "seed",
    "batch_size": "batch_size", "rtol": "rtol", "atol": "atol", "weights": "weights", "codec": "codec_path",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="CKPT|RUN", help="checkpoint folder, or run directory (its newest whole checkpoint)")
    parser.add_argument("--step", type=int, help="the run's checkpoint of this step")
    parser.add_argument("--weights", choices=("ema", "raw"), help="averaged or raw weights")
    parser.add_argument("--classes", help="comma-separated class numbers, ranges or names; images take them in turn")
    parser.add_argument("--n", type=int, help="number of images (default: 16, or 8 a class)")
    parser.add_argument("--out", default="samples.png", help="grid as .png or .jpg, all images as .npz, or a folder of PNGs")
    parser.add_argument("--columns", type=int, default=8, help="images a row of a grid")
    parser.add_argument("--solver", choices=("euler", "heun", "dopri5", "euler_maruyama"))
    parser.add_argument("--steps", type=int, help="steps of a fixed-step solver")
    parser.add_argument("--cfg", type=float, help="guidance scale; 1 is none")
    parser.add_argument("--interval", type=float, nargs=2, metavar=("T0", "T1"), help="times between which guidance acts (0 noise, 1 data)")
    parser.add_argument("--diffusion", help="SDE coefficient: constant, sbdm, sigma, linear, decreasing, increasing-decreasing")
    parser.add_argument("--last-step", choices=("mean", "tweedie", "euler", "none"), help="the SDE's last step")
    parser.add_argument("--last-step-size", type=float, help="its length")
    parser.add_argument("--rtol", type=float, help="relative tolerance of dopri5")
    parser.add_argument("--atol", type=float, help="absolute tolerance of dopri5")
    parser.add_argument("--labels", choices=("balanced", "random"), help="classes when --classes is not given")
    parser.add_argument("--dtype", choices=("float32", "float64"), help="precision of the integrator's state")
    parser.add_argument("--seed", type=int, help="image k is drawn from seed + k")
    parser.add_argument("--batch-size", type=int, help="images per forward pass")
    parser.add_argument("--codec", metavar="PATH", help="the codec's weights (default: evaluation.codec_path)")
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: cuda where there is one)")


def run(args: argparse.Namespace) -> None:
    out = _checked_target(Path(args.out))
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_model(args.source, args.weights or _weights_of(args), step=args.step, device=device)
    settings = settings_for(loaded.config.evaluation, args)
    classes = parse_classes(args.classes, loaded.info.class_names) if args.classes else None
    n = args.n if args.n is not None else (8 * len(classes) if classes else 16)
    if n < 1 or args.columns < 1:
        raise UserError(f"--n {n} and --columns {args.columns}: both must be at least 1")
    images, labels = generate(loaded, settings, n, classes, device)
    write(out, images, labels, args.columns, loaded.info.class_names)
    print(f"{n} images of step {loaded.step} ({settings.weights} weights): {out}")


def _weights_of(args: argparse.Namespace) -> str:
    from vr_online import checkpoint
    from vr_online.config import load_config

    return load_config(checkpoint.find(args.source, args.step) / "config.yaml").evaluation.weights


def settings_for(base: "EvaluationConfig", args: argparse.Namespace) -> "EvaluationConfig":
    """The checkpoint's evaluation settings with the given options in their place; raises `UserError` naming a bad one."""
    from pydantic import ValidationError

    changes = {key: getattr(args, option) for option, key in OVERRIDES.items() if getattr(args, option) is not None}
    try:
        return type(base).model_validate({**base.model_dump(), **changes})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"evaluation.{key}: {first['msg']} (got {first['input']!r})") from None


def parse_classes(text: str, names: Sequence[str]) -> list[int]:
    """Class indices from `3,7`, `0-4` or names, in the order given.

    Raises:
        UserError: a class does not exist.
    """
    classes: list[int] = []
    for item in (part.strip() for part in text.split(",")):
        low, dash, high = item.partition("-")
        if item.isdigit():
            classes.append(int(item))
        elif item in names:
            classes.append(list(names).index(item))
        elif dash and low.isdigit() and high.isdigit() and int(low) <= int(high):
            classes += range(int(low), int(high) + 1)
        else:
            valid = f"numbers from 0 to {len(names) - 1}, ranges such as 0-4, or names such as {names[0]!r}"
            raise UserError(f"--classes: {item!r} is no class; give {valid}")
    wrong = [c for c in classes if c >= len(names)]
    if wrong:
        raise UserError(f"--classes: {wrong[0]} is out of range; the data has classes 0 to {len(names) - 1}")
    return classes


def generate(loaded: LoadedModel, settings: "EvaluationConfig", n: int, classes: Optional[Sequence[int]] = None,
             device: str = "cpu") -> tuple[np.ndarray, np.ndarray]:
    """Images (n, h, w, 3 or 1) uint8 and labels (n,) int64 of samples 0 to n - 1, with a progress bar.

    Args:
        classes: taken in turn; None follows `settings.labels`.
    """
    from vr_online.data.codecs import codec_for

    codec = codec_for(loaded.info, settings.codec_path, device)
    sampler = Sampler(
        loaded.model, loaded.flow, settings, loaded.info.norm, loaded.model.num_classes, known_classes=loaded.info.num_classes
    )
    labels = torch.tensor([classes[k % len(classes)] for k in range(n)]) if classes else sampler.labels(0, n)
    with full_float32(), tqdm(total=n, unit="image", desc="sampling") as bar:
        images = [decode_images(codec, latents) for latents in sampler.batches(0, n, labels, bar)]
    return np.concatenate(images), labels.numpy()


GRID_SUFFIXES = (".png", ".jpg", ".jpeg")


def _checked_target(out: Path) -> Path:
    if out.suffix not in (*GRID_SUFFIXES, ".npz", ""):
        raise UserError(f"--out {out}: expected a grid (.png, .jpg), an .npz or a folder")
    if out.suffix == "" and out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; a name without a suffix means a folder")
    return out


def write(out: Path, images: np.ndarray, labels: np.ndarray, columns: int, names: Sequence[str]) -> None:
    """Writes a grid, an npz or a folder, by the suffix of `out`. Raises `UserError` when the disk refuses."""
    try:
        (out if out.suffix == "" else out.parent).mkdir(parents=True, exist_ok=True)
        if out.suffix == ".npz":
            _write_npz(out, images, labels)
        elif out.suffix == "":
            _write_folder(out, images, labels)
        else:
            _write_grid(out, images, labels, columns, names)
    except OSError as error:
        raise UserError(f"{out}: cannot write: {error.strerror or error}") from None


def _write_npz(out: Path, images: np.ndarray, labels: np.ndarray) -> None:
    images = np.repeat(images, 3, axis=-1) if images.shape[-1] == 1 else images  # ADM's evaluator wants three channels
    with written_aside(out) as aside, open(aside, "wb") as file:
        np.savez(file, arr_0=images, arr_1=labels)


def _write_folder(out: Path, images: np.ndarray, labels: np.ndarray) -> None:
    from PIL import Image

    for k, (image, label) in enumerate(zip(images, labels)):
        Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(out / f"{k:06d}-class{label}.png")


def _write_grid(out: Path, images: np.ndarray, labels: np.ndarray, columns: int, names: Sequence[str]) -> None:
    from PIL import Image

    from vr_online.monitor.grid import image_grid

    order = np.argsort(labels, kind="stable")
    grid = image_grid(images[order], columns, labels=[names[c] if c < len(names) else str(c) for c in labels[order]])
    Image.fromarray(grid).save(out)
