"""Write a checkpoint's weights as one file.

    vr-online export runs/demo --out model.safetensors                  averaged weights of the newest checkpoint
    vr-online export runs/demo/checkpoints/2000 --weights raw --out raw.safetensors
    vr-online export runs/demo --format sit --out model.pt              for the official SiT code
    vr-online export runs/demo --format sit --learn-sigma --out model.pt

`safetensors` carries, in its header, what the weights need to be used: path, prediction, direction of time, latent
shape and normalisation, class names, codec and the whole configuration. `sit` is a plain state dict of the official
names, as its sample script loads it; --learn-sigma adds the unused output channels (zeros) that script expects at
256 x 256. Both load again with `vr-online train --init FILE`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Callable

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vr_online import __version__
from vr_online.errors import UserError
from vr_online.evaluation.generation import LoadedModel, load_model
from vr_online.files import written_aside
from vr_online.models.weights import OUTPUT_KEYS

SUFFIXES = {"safetensors": (".safetensors",), "sit": (".pt", ".pth")}

TIME_CONVENTION = "t=0 noise, t=1 data"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="CKPT|RUN", help="checkpoint folder, or run directory (its newest whole checkpoint)")
    parser.add_argument("--step", type=int, help="the run's checkpoint of this step")
    parser.add_argument("--weights", choices=("ema", "raw"), default="ema", help="averaged (default) or raw weights")
    parser.add_argument("--format", choices=tuple(SUFFIXES), default="safetensors", help="safetensors (default), or the official SiT layout")
    parser.add_argument("--learn-sigma", action="store_true", help="add the unused learned-sigma channels (format sit)")
    parser.add_argument("--out", required=True, help="file to write: .safetensors, or .pt for the official layout")


def run(args: argparse.Namespace) -> None:
    path = export(args.source, Path(args.out), weights=args.weights, form=args.format, step=args.step, learn_sigma=args.learn_sigma)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {args.weights} weights")


def export(source: str | Path, out: Path, *, weights: str = "ema", form: str = "safetensors", step: int | None = None,
           learn_sigma: bool = False) -> Path:
    """Writes the weights of a checkpoint or run to `out` and returns it.

    Args:
        weights: `ema` or `raw`.
        form: `safetensors`, or `sit` for an official SiT state dict.
        learn_sigma: add zero channels for the learned sigma; only with `sit`.

    Raises:
        UserError: no whole checkpoint, a suffix that does not fit the form, or a disk that refuses.
    """
    if out.suffix not in SUFFIXES[form]:
        raise UserError(f"--out {out}: a file of the format {form} ends in {' or '.join(SUFFIXES[form])}")
    if learn_sigma and form != "sit":
        raise UserError("--learn-sigma: only with --format sit")
    loaded = load_model(source, weights, step=step)
    state = {name: value.contiguous() for name, value in loaded.model.state_dict().items()}
    if form == "sit":
        state = with_sigma(loaded, state) if learn_sigma else state
        return _write(out, lambda aside: torch.save(state, aside))
    return _write(out, lambda aside: save_file(state, aside, metadata(loaded, weights)))


def metadata(loaded: LoadedModel, weights: str) -> dict[str, str]:
    """The header of an exported safetensors: plain strings, JSON where structured."""
    config, info = loaded.config, loaded.info
    return {
        "format": "pt",
        "architecture": config.model.name,
        "time": TIME_CONVENTION,
        "path": config.flow.path,
        "prediction": config.flow.prediction,
        "weights": weights,
        "step": str(loaded.step),
        "images": str(loaded.step * config.train.batch_size),
        "latent_shape": json.dumps(list(info.latent_shape)),
        "norm": json.dumps({"mean": list(info.norm.mean), "std": list(info.norm.std)}),
        "codec": info.codec,
        "codec_hash": info.codec_hash,
        "num_classes": str(loaded.model.num_classes),
        "class_names": json.dumps(info.class_names),
        "config": json.dumps(config.model_dump()),
        "vr_online": __version__,
    }


def with_sigma(loaded: LoadedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` with zero output channels for the learned sigma; the first half of the output stays as it is."""
    channels, cells = loaded.model.latent_shape[0], loaded.model.size.patch_size**2
    if loaded.model.out_channels != channels:
        return state
    state = dict(state)
    for key in OUTPUT_KEYS:
        mean = state[key].unflatten(0, (cells, channels))
        state[key] = torch.cat([mean, torch.zeros_like(mean)], dim=1).flatten(0, 1).contiguous()
    return state


def _write(out: Path, save: Callable[[Path], None]) -> Path:
    try:
        with written_aside(out) as aside:
            save(aside)
    except (RuntimeError, SafetensorError) as error:  # torch.save wraps a failing disk in a RuntimeError
        raise UserError(f"{out}: cannot write: {error}") from None
    return out
