"""Weights from files into a SiT: official SiT checkpoints, safetensors and checkpoints of this project."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

import torch
from torch import Tensor

from vr_online.errors import UserError
from vr_online.models.sit import SiT

OUTPUT_KEYS = ("final_layer.linear.weight", "final_layer.linear.bias")
CLASS_KEY = "y_embedder.embedding_table.weight"
POSITION_KEY = "pos_embed"


def read_state(path: str | Path, kind: str = "ema") -> dict[str, Tensor]:
    """A state dict of official names from `path`.

    `path` is a `.safetensors`; a `.pt` / `.pth` / `.bin` that holds a state dict or a training checkpoint with
    `ema` and `model` entries; or a checkpoint folder or run of this project. `kind` (`ema` or `raw`) chooses where
    there is a choice. Nothing is unpickled but tensors and plain settings.

    Raises:
        UserError: the file is missing, unreadable or holds no state dict.
    """
    path = Path(path)
    if path.is_dir():
        from vr_online import checkpoint

        return checkpoint.load_weights(checkpoint.find(path), kind)
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected an official SiT .pt, a .safetensors or a checkpoint folder")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    return _state_of(_read_torch(path), kind, path)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); fetch or export it again") from None


def _read_torch(path: Path) -> object:
    # Official training checkpoints carry their argparse.Namespace, which is data and nothing more.
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not a checkpoint of plain tensors ({reason}); expected an official SiT .pt file") from None


def _state_of(loaded: object, kind: str, path: Path) -> dict[str, Tensor]:
    if isinstance(loaded, dict):
        order = ("ema", "model") if kind == "ema" else ("model", "ema")
        loaded = next((loaded[key] for key in order if isinstance(loaded.get(key), dict)), loaded)
    if not isinstance(loaded, dict) or not loaded or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise UserError(f"{path}: holds no state dict; expected tensors by name, or a dict with `ema` or `model`")
    return {name.removeprefix("module."): value for name, value in loaded.items()}


def load_init(model: SiT, path: str | Path, kind: str = "ema") -> None:
    """Copies the weights in `path` (see `read_state`) into `model`.

    A file with learned-sigma channels loads into a model without them: the unused half is left out. Positions of
    another latent size are recomputed, not read.

    Raises:
        UserError: the file is unusable, or a key is missing, unknown or of another shape; the message names it.
    """
    load_state(model, read_state(path, kind), str(path))


def load_state(model: SiT, state: dict[str, Tensor], origin: str) -> None:
    """Copies `state` into `model`; `origin` names it in errors. Raises `UserError` as `load_init` does."""
    own = model.state_dict()
    state = _without_sigma(model, dict(state))
    positions = state.get(POSITION_KEY)
    if positions is None or positions.shape != own[POSITION_KEY].shape:
        state[POSITION_KEY] = own[POSITION_KEY]
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unknown:
        raise UserError(f"{origin}: does not fit the model: {_listed('missing', missing)}{_listed('unknown', unknown)}"
                        "check model.name (depth) and that the file is a SiT")
    for name, value in state.items():
        if value.shape != own[name].shape:
            shapes = f"{name} has shape {tuple(value.shape)}, the model wants {tuple(own[name].shape)}"
            raise UserError(f"{origin}: {shapes}; {_remedy(name, value, own[name])}")
    model.load_state_dict(state)


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} {', '.join(names[:3])}{more}; " if names else ""


def _remedy(name: str, value: Tensor, own: Tensor) -> str:
    if name == CLASS_KEY and value.shape[1:] == own.shape[1:]:
        return f"it was trained on {value.shape[0] - 1} classes: set model.num_classes: {value.shape[0] - 1}"
    if name in OUTPUT_KEYS and 2 * value.shape[0] == own.shape[0]:
        return "it has no learned-sigma channels: set model.learn_sigma: false"
    return "check model.name (width, patch size) and the latent channels of the data"


def _without_sigma(model: SiT, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drops the second half of each patch's output channels where `state` has them and `model` has not."""
    channels, cells = model.latent_shape[0], model.size.patch_size**2
    for key in OUTPUT_KEYS if model.out_channels == channels else ():
        if key in state and state[key].shape[0] == cells * 2 * channels:
            halves = state[key].unflatten(0, (cells, 2, channels))
            state[key] = halves[:, 0].flatten(0, 1).clone()
    return state
