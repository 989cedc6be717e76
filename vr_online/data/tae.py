"""The tiny autoencoders of the TAESD family, written from their description: TAESD and TAEF2.

Both are plain stacks of 3 x 3 convolutions of width 64 and ReLU residual blocks, with three stride-2
reductions on the way in and three nearest-neighbour doublings on the way out. TAEF2 (latents of FLUX.2,
32 channels) adds a pooling branch to the blocks at the lowest resolution. Module positions are those of the
published state dicts, so their keys load unchanged. Images are RGB in [0, 1].
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Mapping

import torch
from torch import nn

from vr_online.data.codecs import Codec
from vr_online.errors import UserError

WIDTH = 64
_SUFFIXES = (".pth", ".pt", ".safetensors")


class ClampedInput(nn.Module):
    """3 tanh(x / 3): bounds a decoder's input smoothly."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / 3) * 3


class Block(nn.Module):
    """relu(conv(x) + x), with `pool(x)` added to x first where the block has a pooling branch."""

    def __init__(self, pooled: bool = False) -> None:
        super().__init__()
        self.conv = nn.Sequential(_conv(), nn.ReLU(), _conv(), nn.ReLU(), _conv())
        self.pool = nn.Sequential(
            nn.Conv2d(WIDTH, 4 * WIDTH, 1, bias=False), nn.GroupNorm(4, 4 * WIDTH), nn.ReLU(), nn.Conv2d(4 * WIDTH, WIDTH, 1, bias=False)
        ) if pooled else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pool is not None:
            x = x + self.pool(x)
        return torch.relu(self.conv(x) + x)


def _conv(inputs: int = WIDTH, outputs: int = WIDTH, **options: object) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


def build_encoder(channels: int, pooled: bool) -> nn.Sequential:
    """(B, 3, 8h, 8w) to (B, channels, h, w)."""
    layers: list[nn.Module] = [_conv(3), Block()]
    for level in range(3):
        layers.append(_conv(stride=2, bias=False))
        layers += [Block(pooled and level == 2) for _ in range(3)]
    return nn.Sequential(*layers, _conv(outputs=channels))


def build_decoder(channels: int, pooled: bool) -> nn.Sequential:
    """(B, channels, h, w) to (B, 3, 8h, 8w)."""
    layers: list[nn.Module] = [ClampedInput(), _conv(channels), nn.ReLU()]
    for level in range(3):
        layers += [Block(pooled and level == 0) for _ in range(3)]
        layers += [nn.Upsample(scale_factor=2), _conv(bias=False)]
    return nn.Sequential(*layers, Block(), _conv(outputs=3))


class TinyCodec(Codec):
    """A tiny autoencoder from its weight files.

    Args:
        path: a folder with one `*encoder*` and one `*decoder*` file (.pth, .pt or .safetensors), or a folder in
            diffusers' `AutoencoderTiny` layout, or the two files with a comma between them.

    Raises:
        UserError: a file is missing, is not a state dict of tensors, or has other keys than the architecture.
    """

    id = "tae"
    factor = 8

    def __init__(self, path: str) -> None:
        self.path = str(path)
        files = _find(self.path)
        self.hash = _hash(files)
        states = _load(files)
        last = _shape(states["encoder"], "14.bias", files[0])
        first = _shape(states["decoder"], "1.weight", files[-1])
        if last[0] != first[1]:
            raise UserError(f"{self.path}: the encoder gives {last[0]} latent channels but the decoder takes {first[1]}; they are no pair")
        self.channels = last[0]
        self.encoder = _fill(build_encoder(self.channels, _pooled(states["encoder"])), states["encoder"], files[0])
        self.decoder = _fill(build_decoder(self.channels, _pooled(states["decoder"])), states["decoder"], files[-1])
        self._device = torch.device("cpu")

    @torch.inference_mode()
    def encode(self, images: torch.Tensor) -> torch.Tensor:
        images = images.to(self._device)
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        return self.encoder(images.float() / 255.0)

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.decoder(latents.to(self._device).float()).clamp(0.0, 1.0)

    def to(self, device: str | torch.device) -> "TinyCodec":
        self._device = torch.device(device)
        self.encoder.to(self._device)
        self.decoder.to(self._device)
        return self


def _find(path: str) -> list[Path]:
    """The weight files: [encoder, decoder], or the one file of diffusers' layout."""
    if "," in path:
        files = [Path(part.strip()) for part in path.split(",")]
        if len(files) != 2:
            raise UserError(f"tae:{path}: expected two files, encoder then decoder, with one comma between them")
    elif (Path(path) / "diffusion_pytorch_model.safetensors").is_file():
        files = [Path(path) / "diffusion_pytorch_model.safetensors"]
    else:
        files = [_one(Path(path), part) for part in ("encoder", "decoder")]
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: no such weight file for the codec tae")
    return files


def _one(folder: Path, part: str) -> Path:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; the codec tae wants one with *encoder* and *decoder* weights, or ENCODER,DECODER")
    found = sorted(p for p in folder.iterdir() if part in p.name and p.suffix in _SUFFIXES)
    if len(found) != 1:
        names = ", ".join(p.name for p in found) or "none"
        raise UserError(f"{folder}: expected exactly one *{part}* file ({', '.join(_SUFFIXES)}), found {names}; name both as ENCODER,DECODER")
    return found[0]


def _hash(files: list[Path]) -> str:
    """SHA-256 over the files' own hashes, so that names and places do not matter."""
    digests = [hashlib.sha256(file.read_bytes()).digest() for file in files]
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _load(files: list[Path]) -> dict[str, dict[str, torch.Tensor]]:
    if len(files) == 2:
        return {"encoder": _read(files[0]), "decoder": _read(files[1])}
    whole = _read(files[0])
    return {"encoder": _renumber(whole, "encoder.layers.", 0), "decoder": _renumber(whole, "decoder.layers.", 1)}


def _renumber(state: Mapping[str, torch.Tensor], prefix: str, shift: int) -> dict[str, torch.Tensor]:
    """Keys of diffusers' layout to positions here; its decoder has no module for the clamp, hence a shift of one."""
    renamed = {}
    for key, value in state.items():
        if key.startswith(prefix):
            position, _, rest = key[len(prefix):].partition(".")
            renamed[f"{int(position) + shift}.{rest}"] = value
    return renamed


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the readers raise their own types for each kind of damage
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{file}: not a state dict of tensors ({reason}); is the file whole?") from None
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise UserError(f"{file}: expected a state dict of tensors, such as taef2_encoder.pth holds")
    return state


def _shape(state: Mapping[str, torch.Tensor], key: str, file: Path) -> torch.Size:
    if key not in state:
        shown = ", ".join(list(state)[:4])
        raise UserError(f"{file}: has no key {key!r} (it has {shown or 'none'}, ...), which TAESD and TAEF2 have; are the files swapped?")
    return state[key].shape


def _pooled(state: Mapping[str, torch.Tensor]) -> bool:
    return any(".pool." in key for key in state)


def _fill(module: nn.Sequential, state: Mapping[str, torch.Tensor], file: Path) -> nn.Sequential:
    expected = module.state_dict()
    for key, value in expected.items():
        if key not in state:
            raise UserError(f"{file}: the key {key!r} of shape {tuple(value.shape)} is missing; is this TAESD or TAEF2?")
        if state[key].shape != value.shape:
            raise UserError(f"{file}: {key!r} has shape {tuple(state[key].shape)}, expected {tuple(value.shape)}")
    unknown = sorted(set(state) - set(expected))
    if unknown:
        raise UserError(f"{file}: unknown key {unknown[0]!r}; expected only those of TAESD or TAEF2, from {next(iter(expected))!r} on")
    module.load_state_dict({key: value.float() for key, value in state.items()})
    return module.eval().requires_grad_(False)
