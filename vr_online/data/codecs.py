"""Codecs between images and latents, behind one small interface.

    pixel   the image itself, [0, 255] mapped to [-1, 1]
    tae     the tiny autoencoders, TAESD and TAEF2, from weight files (`vr_online.data.tae`)
    kl      diffusers' `AutoencoderKL` from a folder or a hub id (`vr_online.data.kl`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Optional

import torch

from vr_online.data.format import DatasetInfo, FormatError
from vr_online.errors import UserError


class Posterior(NamedTuple):
    """A diagonal Gaussian over latents: `mean` and `std`, both (B, C, H, W)."""

    mean: torch.Tensor
    std: torch.Tensor


class Codec(ABC):
    """Images to latents and back.

    Attributes:
        id: the name stored in `dataset.json`.
        hash: identifies what decides the latents: the weights, or the mapping itself.
        path: where the weights were found, or None.
        factor: image side over latent side.
        stochastic: `posterior` has a spread, so that moments and samples make sense.
    """

    id: str
    hash: str
    path: Optional[str] = None
    factor: int = 1
    stochastic: bool = False

    @abstractmethod
    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 images (B, 3 or 1, H, W) to float32 latents (B, C, h, w); the posterior's mean where there is one."""

    @abstractmethod
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Raw latents (B, C, h, w), not normalised, to float32 images (B, 3 or 1, H, W) in [0, 1]."""

    def posterior(self, images: torch.Tensor) -> Posterior:
        """The posterior of the latents; of spread zero for a deterministic codec."""
        mean = self.encode(images)
        return Posterior(mean, torch.zeros_like(mean))

    def to(self, device: str | torch.device) -> "Codec":
        """Moves the weights; returns itself."""
        return self


class PixelCodec(Codec):
    """The image is its own latent: (B, c, H, W) uint8 to x / 127.5 - 1, exactly invertible."""

    id = "pixel"
    hash = "pixel: x / 127.5 - 1"

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        return images.float() / 127.5 - 1.0

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return ((latents.float() + 1.0) / 2.0).clamp(0.0, 1.0)


def get_codec(spec: str, *, path: Optional[str] = None, device: str | torch.device = "cpu", **options: Any) -> Codec:
    """The codec of an id or a spec `id:path`.

    Args:
        spec: `pixel`, `tae`, `kl`, or with the weights' place: `tae:weights/taef2`, `kl:stabilityai/sd-vae-ft-ema`.
        path: the weights' place, when the spec does not say it.
        options: passed to the codec.

    Raises:
        UserError: no such codec, or its weights cannot be found or used; the message says what was looked for.
    """
    name, _, place = spec.partition(":")
    place = place or path
    if name == "pixel":
        return PixelCodec()
    if name == "tae":
        from vr_online.data.tae import TinyCodec

        return TinyCodec(_needed(place, name), **options).to(device)
    if name == "kl":
        from vr_online.data.kl import KLCodec

        return KLCodec(_needed(place, name), **options).to(device)
    raise UserError(f"codec {spec!r}: expected pixel, tae:PATH or kl:PATH")


def _needed(place: Optional[str], name: str) -> str:
    if place:
        return place
    hint = "a folder with taef2_encoder.pth and taef2_decoder.pth" if name == "tae" else "an AutoencoderKL folder or hub id"
    raise UserError(f"codec {name}: say where its weights are, as {name}:PATH ({hint})")


def codec_for(info: DatasetInfo, path: Optional[str] = None, device: str | torch.device = "cpu") -> Codec:
    """The codec the shards were written with, its weights checked against the hash in `dataset.json`.

    Args:
        path: the weights' place on this machine; None takes the one recorded when encoding.

    Raises:
        FormatError: the weights differ from those the shards were written with.
    """
    codec = get_codec(info.codec, path=path or info.codec_path, device=device)
    check_codec(info, codec)
    return codec


def check_codec(info: DatasetInfo, codec: Codec) -> None:
    """Raises `FormatError` unless `codec` is the one the shards were written with."""
    if codec.id != info.codec:
        raise FormatError(f"the shards were written with the codec {info.codec}, not {codec.id}")
    if codec.hash != info.codec_hash:
        raise FormatError(
            f"the codec {codec.id} at {codec.path} has other weights (hash {codec.hash[:16]}) than those the shards "
            f"were written with (hash {info.codec_hash[:16]}, then at {info.codec_path}); give the place of the original weights"
        )
