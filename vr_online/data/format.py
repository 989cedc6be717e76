"""The format of latent shards: `dataset.json` and the one latent normalisation.

A data set is a folder of WebDataset tars with `dataset.json` beside them. Per sample a tar holds

    <key>.latent.npy   float16, (C, H, W); with `moments`, (2C, H, W): posterior mean, then standard deviation
    <key>.cls          the label, an ASCII integer

Each member's tar header carries the CRC-32 of its bytes in the group-name field (`crc_tag`), where every
tar reader ignores it and ours can check it; `dataset.json` has the SHA-256 of every shard. Nothing in a
shard is ever unpickled.
"""

from __future__ import annotations

import functools
import json
import os
import zlib
from pathlib import Path
from typing import Any, Optional

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vr_online.errors import UserError
from vr_online.files import write_atomic

FILE_NAME = "dataset.json"
FORMAT_VERSION = 1
LATENT_SUFFIX = "latent.npy"
LABEL_SUFFIX = "cls"


class FormatError(UserError):
    """Shards or a `dataset.json` that do not follow the format."""


def crc_tag(payload: bytes) -> str:
    """What the group-name field of a member's tar header says about its bytes: `crc32:` and 8 hex digits."""
    return f"crc32:{zlib.crc32(payload):08x}"


@functools.lru_cache(maxsize=32)
def _channel_tensor(values: tuple[float, ...], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)


class LatentNorm(BaseModel):
    """Per-channel normalisation between stored latents and what the model sees: x_1 = (latent - mean) / std.

    Args:
        mean, std: one number per channel; every std is positive.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: tuple[float, ...] = Field(min_length=1)
    std: tuple[float, ...] = Field(min_length=1)

    def __init__(self, mean: Any, std: Any) -> None:
        super().__init__(mean=mean, std=std)

    @model_validator(mode="after")
    def _usable(self) -> "LatentNorm":
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} channels but std has {len(self.std)}")
        if not all(abs(m) < float("inf") for m in self.mean):
            raise ValueError(f"every mean must be finite, got {self.mean}")
        if not all(0 < s < float("inf") for s in self.std):
            raise ValueError(f"every std must be positive and finite, got {self.std}")
        return self

    @classmethod
    def from_scale(cls, scale: float, channels: int) -> "LatentNorm":
        """The usual single factor, x_1 = scale * latent (0.18215 for sd-vae)."""
        return cls([0.0] * channels, [1.0 / scale] * channels)

    @property
    def channels(self) -> int:
        return len(self.mean)

    def _tensors(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if like.shape[-3] != self.channels:
            raise FormatError(f"the normalisation has {self.channels} channels, the latents {tuple(like.shape)} have {like.shape[-3]}")
        return _channel_tensor(self.mean, str(like.device)), _channel_tensor(self.std, str(like.device))

    def normalize(self, latent: torch.Tensor) -> torch.Tensor:
        """Stored latents (..., C, H, W) of any floating type to x_1, in float32 on their device."""
        mean, std = self._tensors(latent)
        return (latent.float() - mean) / std

    def denormalize(self, x_1: torch.Tensor) -> torch.Tensor:
        """The inverse of `normalize`: what a codec decodes, in float32."""
        mean, std = self._tensors(x_1)
        return x_1.float() * std + mean

    def check_matches(self, other: "LatentNorm", where: str = "data.norm", tolerance: float = 1e-3) -> None:
        """Raises `FormatError` naming the first channel where the two differ by more than `tolerance` standard deviations."""
        if self.channels != other.channels:
            raise FormatError(f"{where} has {other.channels} channels, the shards have {self.channels}")
        for c, (m, s, om, os_) in enumerate(zip(self.mean, self.std, other.mean, other.std)):
            if max(abs(m - om), abs(s - os_)) > tolerance * s:
                raise FormatError(
                    f"{where} disagrees with the shards' normalisation in channel {c}: mean {om:g}, std {os_:g} against "
                    f"mean {m:g}, std {s:g} in {FILE_NAME}; remove {where}, or encode the shards again with --norm"
                )


class DatasetInfo(BaseModel):
    """What `dataset.json` says about the shards beside it."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    version: int = FORMAT_VERSION
    """Version of this format."""
    samples: int = Field(ge=0)
    """Samples in all shards."""
    shards: dict[str, int]
    """File name of each shard, relative to this file, and its number of samples."""
    latent_shape: tuple[int, int, int]
    """(C, H, W) of a latent; with `moments` a stored array has 2C channels."""
    moments: bool = False
    """Arrays hold the posterior's mean and standard deviation instead of a latent."""
    codec: str
    """Id of the codec that made the latents: `pixel`, `tae` or `kl`."""
    codec_hash: str
    """Identifies the codec's weights; decoding with others is refused."""
    codec_path: Optional[str] = None
    """Where the codec's weights lay when encoding, as given there."""
    norm: LatentNorm
    """Normalisation between stored latents and the model's x_1."""
    class_names: list[str] = Field(min_length=1)
    """Name of each label."""
    source: str = ""
    """Where the images came from."""
    preprocessing: dict[str, Any] = {}
    """How images became the codec's input: size, crop, flips, posterior, seed."""
    class_counts: list[int] = []
    """Samples of each label."""
    shard_sha256: dict[str, str] = {}
    """SHA-256 of each shard's bytes; `vr-online shards verify` compares."""

    @field_validator("version")
    @classmethod
    def _version(cls, version: int) -> int:
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {version} is not {FORMAT_VERSION}, the one this release reads")
        return version

    @field_validator("latent_shape")
    @classmethod
    def _shape(cls, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        if min(shape) < 1:
            raise ValueError(f"every size of latent_shape {list(shape)} must be positive")
        return shape

    @field_validator("shards")
    @classmethod
    def _shard_names(cls, shards: dict[str, int]) -> dict[str, int]:
        for name, count in shards.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"shard {name!r} lies outside the data set's folder")
            if count < 0:
                raise ValueError(f"shard {name!r} has the negative count {count}")
        return shards

    @model_validator(mode="after")
    def _agrees(self) -> "DatasetInfo":
        if sum(self.shards.values()) != self.samples:
            raise ValueError(f"samples is {self.samples}, but the counts of shards add up to {sum(self.shards.values())}")
        if self.norm.channels != self.latent_shape[0]:
            raise ValueError(f"norm has {self.norm.channels} channels, latent_shape {list(self.latent_shape)} has {self.latent_shape[0]}")
        return self

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """Shape of a stored array: (C, H, W), or (2C, H, W) with moments."""
        channels, height, width = self.latent_shape
        return (2 * channels if self.moments else channels, height, width)

    @classmethod
    def load(cls, source: str | os.PathLike) -> "DatasetInfo":
        """Reads and checks `dataset.json`.

        Args:
            source: the file, the folder that holds it, or the URL of either.

        Raises:
            FormatError: the file is missing, is not JSON, or contradicts itself or the format.
        """
        payload, origin = _read(source)
        try:
            tree = json.loads(payload.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            raise FormatError(f"{origin}: not valid JSON ({error}); make it again with `vr-online shards encode`") from None
        return cls.parse(tree, origin)

    @classmethod
    def parse(cls, tree: Any, origin: str = FILE_NAME) -> "DatasetInfo":
        """Checks a decoded `dataset.json`; raises `FormatError` naming each wrong key."""
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            lines = [
                f"{'.'.join(map(str, item['loc'])) or '(whole file)'}: {item['msg'].removeprefix('Value error, ')}"
                for item in error.errors()
            ]
            raise FormatError(f"{origin}: " + "\n  ".join(["does not describe a data set:"] + lines)) from None

    def to_json(self) -> str:
        """The text of `dataset.json`; equal data sets give equal bytes."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"

    def save(self, folder: str | os.PathLike) -> Path:
        """Writes `folder/dataset.json` aside and renames it into place."""
        path = Path(folder) / FILE_NAME
        write_atomic(path, self.to_json())
        return path


def _read(source: str | os.PathLike) -> tuple[bytes, str]:
    location = os.fspath(source)
    if "://" in location:
        url = location if location.endswith(".json") else f"{location.rstrip('/')}/{FILE_NAME}"
        from vr_online.data.sources import read_bytes

        return read_bytes(url), url
    path = Path(location)
    path = path / FILE_NAME if path.is_dir() else path
    try:
        return path.read_bytes(), str(path)
    except OSError as error:
        raise FormatError(
            f"{path}: cannot read the description of the data set: {error.strerror}; "
            "make shards with `vr-online shards encode`, or point data.shards at their folder"
        ) from None
