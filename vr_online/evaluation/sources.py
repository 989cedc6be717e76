"""Samples that reference statistics are made from: image folders, image tars and latent shards, streamed.

Every source yields numbered samples in a fixed order; of several ranks each takes every
`world_size`-th, so that together they see each sample once.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import io
import os
import tarfile
from pathlib import Path
from typing import Any, Iterator, Optional

import numpy as np
from PIL import Image

from vr_online.errors import UserError

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm"}
_DAMAGED = (OSError, ValueError, SyntaxError, tarfile.TarError, EOFError)


def centre_crop(image: Image.Image, size: int) -> Image.Image:
    """Resizes the short side to `size` and crops the centre, as ADM prepares ImageNet (Dhariwal & Nichol
    2021, arXiv:2105.05233): halve with a box filter while the short side is at least twice the size, then bicubic."""
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def decode_image(payload: bytes | str, size: Optional[int], where: str) -> np.ndarray:
    """uint8 (3, H, W) of an encoded image or a file's path.

    Raises:
        UserError: it cannot be decoded; the message names it.
    """
    try:
        with Image.open(payload if isinstance(payload, str) else io.BytesIO(payload)) as image:
            image = image.convert("RGB")
            image = centre_crop(image, size) if size else image
            return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
    except _DAMAGED as error:
        raise UserError(f"{where}: cannot be read as an image ({error}); remove or replace it") from None


@dataclasses.dataclass
class ImageSource:
    """Images in files or tars.

    Attributes:
        origin: what the user named.
        files: image paths, or tar paths.
        tars: whether `files` are tars.
        size: side of the centre crop, or None to leave images as they are.
    """

    origin: str
    files: list[str]
    tars: bool
    size: Optional[int] = None
    count: Optional[int] = None

    def __post_init__(self) -> None:
        self.count = None if self.tars else len(self.files)

    def describe(self) -> dict[str, Any]:
        return {"crop": "adm" if self.size else "none", "size": self.size}

    def fingerprint(self) -> str:
        """Changes when a file is added, removed or rewritten."""
        digest = hashlib.sha256()
        for name in self.files:
            state = os.stat(name)
            digest.update(f"{name}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def samples(self, rank: int = 0, world_size: int = 1) -> Iterator[np.ndarray]:
        """uint8 arrays (3, H, W)."""
        if self.tars:
            for i, (where, payload) in enumerate(_tar_members(self.files, tuple(IMAGE_SUFFIXES))):
                if i % world_size == rank:
                    yield decode_image(payload, self.size, where)
        else:
            for name in self.files[rank::world_size]:
                yield decode_image(name, self.size, name)


def _tar_members(files: list[str], suffixes: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    for name in files:
        try:
            with tarfile.open(name, "r|*") as tar:
                for member in tar:
                    if member.isfile() and member.name.lower().endswith(suffixes):
                        yield f"{name}: {member.name}", tar.extractfile(member).read()
        except _DAMAGED as error:
            raise UserError(f"{name}: the tar cannot be read to its end ({error}); fetch or write it again") from None


@dataclasses.dataclass
class LatentSource:
    """Latent shards: a folder with `dataset.json`.

    Latents come out as the model sees them: drawn from the posterior where the shards hold moments (by a
    generator keyed by the sample's number), and normalised.
    """

    origin: str
    folder: Path
    info: Any
    count: Optional[int] = None

    def __post_init__(self) -> None:
        self.count = self.info.samples

    def describe(self) -> dict[str, Any]:
        return {"codec": self.info.codec, "codec_hash": self.info.codec_hash, "moments": self.info.moments}

    def fingerprint(self) -> str:
        return hashlib.sha256(self.info.to_json().encode()).hexdigest()

    def samples(self, rank: int = 0, world_size: int = 1) -> Iterator[np.ndarray]:
        """float32 raw latents (C, H, W), not normalised."""
        files = [str(self.folder / name) for name in self.info.shards]
        for i, (where, payload) in enumerate(_tar_members(files, (".latent.npy",))):
            if i % world_size == rank:
                yield from self._latents(_load_npy(payload, where), i, where)

    def _latents(self, array: np.ndarray, index: int, where: str) -> Iterator[np.ndarray]:
        stored = tuple(self.info.stored_shape)
        if array.shape not in (stored, (2, *stored)):
            raise UserError(f"{where}: latent of shape {array.shape}, but dataset.json says {stored}; write the shard again")
        for flip, latent in enumerate(array[None] if array.ndim == 3 else array):
            latent = latent.astype(np.float32)
            if self.info.moments:
                mean, std = np.split(latent, 2)
                rng = np.random.default_rng((index, flip))
                latent = mean + std * rng.standard_normal(mean.shape, dtype=np.float32)
            yield latent


def _load_npy(payload: bytes, where: str) -> np.ndarray:
    try:
        return np.load(io.BytesIO(payload), allow_pickle=False)
    except _DAMAGED as error:
        raise UserError(f"{where}: not a plain array ({error}); write the shard again") from None


def open_source(origin: str, size: Optional[int] = None) -> ImageSource | LatentSource:
    """What a user named: a folder of latent shards or its dataset.json, a folder of images (searched
    downwards), a tar, a folder of tars, or a quoted pattern of tars such as 'val-*.tar'.

    Raises:
        UserError: nothing usable there.
    """
    path = Path(origin).expanduser()
    if path.name == "dataset.json" or (path / "dataset.json").exists():
        from vr_online.data.format import DatasetInfo

        if size:
            raise UserError(f"{origin}: latent shards decode to their own size; leave --size out")
        return LatentSource(origin, path if path.is_dir() else path.parent, DatasetInfo.load(path))
    if path.is_dir():
        files = sorted(str(p) for p in path.rglob("*") if p.is_file())
        images = [name for name in files if Path(name).suffix.lower() in IMAGE_SUFFIXES]
        tars = [name for name in files if name.endswith(".tar")]
        if images or tars:
            return ImageSource(origin, images or tars, tars=not images, size=size)
    elif matches := sorted(glob.glob(str(path))):
        return ImageSource(origin, matches, tars=True, size=size)
    raise UserError(f"{origin}: no images, tars or latent shards there")
