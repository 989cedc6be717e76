"""Samples that reference statistics are made from: image folders, image tars and latent shards, streamed.

Every source yields numbered samples in a fixed order; of several ranks each takes every
`world_size`-th, so that together they see each sample once.
"""

from __future__ import annotations

import bz2
import dataclasses
import glob
import gzip
import hashlib
import io
import lzma
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Optional

import numpy as np
from PIL import Image

from vr_online.data.shard import ADVICE, Expected, Sample, ShardError, read_samples
from vr_online.data.sources import open_source as open_shard
from vr_online.data.sources import scheme
from vr_online.data.tar import TarError, members
from vr_online.errors import UserError

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm"}
_DAMAGED = (OSError, ValueError, SyntaxError, EOFError)
_BROKEN_TAR = (TarError, OSError, EOFError, zlib.error, lzma.LZMAError)
_COMPRESSIONS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
_MAX_IMAGE = 1 << 30


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
    """(tar and member, its bytes); a tar that breaks off is refused, be it between two members."""
    for name in files:
        try:
            with _open_tar(name) as file:
                for member, payload in members(file.read, lambda member: member.lower().endswith(suffixes), _MAX_IMAGE):
                    if payload is not None:
                        yield f"{name}: {member}", payload
        except _BROKEN_TAR as error:
            raise UserError(f"{name}: the tar cannot be read to its end ({error}); fetch or write it again") from None


def _open_tar(name: str) -> BinaryIO:
    """The tar's own bytes, whatever it is compressed with."""
    with open(name, "rb") as file:
        start = file.read(8)
    opens = [opener for magic, opener in _COMPRESSIONS.items() if start.startswith(magic)]
    return (opens[0] if opens else open)(name, "rb")


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
        """float32 raw latents (C, H, W), not normalised.

        Raises:
            UserError: naming the shard: damaged, cut off, or not what `dataset.json` says of it.
        """
        first = 0
        for name, count in self.info.shards.items():
            mine = (first + np.arange(count)) % world_size == rank
            for ordinal, sample in _shard_samples(self.folder / name, Expected.of(self.info), count, mine):
                yield from self._latents(sample.latent, first + ordinal)
            first += count

    def _latents(self, stored: np.ndarray, index: int) -> Iterator[np.ndarray]:
        for flip, latent in enumerate(stored[None] if stored.ndim == 3 else stored):
            latent = latent.astype(np.float32)
            if self.info.moments:
                mean, std = np.split(latent, 2)
                rng = np.random.default_rng((index, flip))
                latent = mean + std * rng.standard_normal(mean.shape, dtype=np.float32)
            yield latent


def _shard_samples(path: Path, expected: Expected, count: int, wanted: np.ndarray) -> Iterator[tuple[int, Sample]]:
    try:
        source = open_shard(str(path))
        try:
            yield from read_samples(source.read, expected, str(path), count, wanted)
        finally:
            source.close()
    except ShardError as error:
        mend = "Look at the data set with `vr-online shards verify` and write this shard again"  # nothing is skipped here
        raise UserError(str(error).replace(ADVICE, mend)) from None


def open_source(origin: str, size: Optional[int] = None) -> ImageSource | LatentSource:
    """What a user named: a folder of latent shards or its dataset.json, a folder of images (searched
    downwards), a tar, a folder of tars, or a quoted pattern of tars such as 'val-*.tar'.

    Raises:
        UserError: nothing usable there.
    """
    if scheme(origin):
        raise UserError(f"{origin}: references are read from local files; copy it here, or give an npz that `vr-online fid stats` made")
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


def is_whole_folder(origin: str) -> bool:
    """Whether `origin`, a folder or its dataset.json, is local and has every shard that its dataset.json lists."""
    if scheme(origin):
        return False
    path = Path(origin).expanduser()
    folder = path.parent if path.name == "dataset.json" else path
    if not (folder / "dataset.json").is_file():
        return False
    from vr_online.data.format import DatasetInfo

    return all((folder / name).is_file() for name in DatasetInfo.load(folder).shards)
