"""Writing latent shards: tars that depend on nothing but their samples, with statistics in the same pass."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tarfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Sequence

import numpy as np

from vr_online.data.format import LABEL_SUFFIX, LATENT_SUFFIX, DatasetInfo, FormatError, LatentNorm, crc_tag
from vr_online.errors import UserError

_FLOAT16_MAX = float(np.finfo(np.float16).max)


@dataclass
class ShardStats:
    """What a pass over samples leaves: counts, and float64 sums per channel of the *stored* values.

    With moments, `total` sums the means and `squares` sums mean^2 + std^2, so that the variance is that of
    draws from the posteriors: var(means) + mean(std^2).
    """

    channels: int
    count: int = 0
    values: int = 0
    total: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    labels: dict[int, int] = field(default_factory=dict)
    sha256: str = ""

    def __post_init__(self) -> None:
        self.total = list(self.total) or [0.0] * self.channels
        self.squares = list(self.squares) or [0.0] * self.channels
        self.labels = {int(k): int(v) for k, v in self.labels.items()}

    def add(self, latents: np.ndarray, labels: Sequence[int], moments: bool) -> None:
        """Adds a batch (B, C, H, W), or (B, 2C, H, W) with moments."""
        wide = latents.astype(np.float64)
        mean, std = (wide[:, : self.channels], wide[:, self.channels :]) if moments else (wide, None)
        squares = np.square(mean) if std is None else np.square(mean) + np.square(std)
        self.total = (np.asarray(self.total) + mean.sum(axis=(0, 2, 3))).tolist()
        self.squares = (np.asarray(self.squares) + squares.sum(axis=(0, 2, 3))).tolist()
        self.count += len(latents)
        self.values += mean[:, 0].size
        self.labels = dict(Counter(self.labels) + Counter(int(y) for y in labels))

    def merged(self, other: "ShardStats") -> "ShardStats":
        """The statistics of both passes together; `sha256` is dropped."""
        return ShardStats(
            channels=self.channels,
            count=self.count + other.count,
            values=self.values + other.values,
            total=[a + b for a, b in zip(self.total, other.total)],
            squares=[a + b for a, b in zip(self.squares, other.squares)],
            labels=dict(Counter(self.labels) + Counter(other.labels)),
        )

    def norm(self) -> LatentNorm:
        """Per-channel mean and standard deviation; a constant channel gets std 1."""
        if self.values == 0:
            raise FormatError("no samples were written, so there is no latent mean and std")
        mean = np.asarray(self.total) / self.values
        variance = np.asarray(self.squares) / self.values - np.square(mean)
        tiny = 1e-12 * (1.0 + np.square(mean))  # what cancellation may leave of a constant channel
        std = np.where(variance > tiny, np.sqrt(np.maximum(variance, 0.0)), 1.0)
        return LatentNorm(mean.tolist(), std.tolist())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class ShardWriter:
    """One shard, written aside and renamed into place when it is whole.

    The bytes are a function of the samples alone: fixed member order, owner, mode and time zero.

        with ShardWriter("out/shard-00000.tar", (4, 32, 32)) as shard:
            shard.write("00000000", latent, label)
        shard.stats.count, shard.stats.sha256

    Args:
        path: the tar.
        latent_shape: (C, H, W) of a latent.
        moments: arrays are (2C, H, W), mean then standard deviation.

    Raises:
        FormatError: a sample has the wrong shape, a non-finite value, a bad key or one written before.
    """

    def __init__(self, path: str | os.PathLike, latent_shape: Sequence[int], moments: bool = False) -> None:
        self.path = Path(path)
        channels, height, width = latent_shape
        self.stored_shape = (2 * channels if moments else channels, height, width)
        self.moments = moments
        self.stats = ShardStats(channels)
        self._keys: set[str] = set()
        self._aside = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        self._tar: Optional[tarfile.TarFile] = None

    def __enter__(self) -> "ShardWriter":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._aside, "wb")
        except OSError as error:
            raise UserError(f"{self.path}: cannot write: {error.strerror}") from None
        self._sink = _HashingFile(self._file)
        self._tar = tarfile.open(fileobj=self._sink, mode="w", format=tarfile.USTAR_FORMAT)
        return self

    def write(self, key: str, latent: np.ndarray, label: int) -> None:
        """Appends one sample; see `write_batch`."""
        self.write_batch([key], np.asarray(latent)[None], [label])

    def write_batch(self, keys: Sequence[str], latents: np.ndarray, labels: Sequence[int]) -> None:
        """Appends samples: latents (B, C, H, W) of any floating type are stored as float16, labels as integers."""
        stored = self._checked(keys, np.asarray(latents))
        self.stats.add(stored, labels, self.moments)
        try:
            for key, latent, label in zip(keys, stored, labels):
                self._member(f"{key}.{LATENT_SUFFIX}", npy_bytes(latent))
                self._member(f"{key}.{LABEL_SUFFIX}", str(int(label)).encode())
        except OSError as error:
            raise UserError(f"{self.path}: cannot write: {error.strerror}; free some space and run again") from None

    def _checked(self, keys: Sequence[str], latents: np.ndarray) -> np.ndarray:
        if latents.shape[1:] != self.stored_shape:
            raise FormatError(f"{self.path}: sample {keys[0]} has shape {latents.shape[1:]}, expected {self.stored_shape}")
        for key, latent in zip(keys, latents):
            if key in self._keys or not key or "." in key or key.startswith("/"):
                why = "stands twice" if key in self._keys else "must be a relative name without a dot"
                raise FormatError(f"{self.path}: the key {key!r} {why}")
            if not np.all(np.abs(latent) <= _FLOAT16_MAX):
                raise FormatError(f"{self.path}: sample {key} has a value that is not finite in float16; are codec and --size right?")
            self._keys.add(key)
        return latents.astype(np.float16)

    def _member(self, name: str, payload: bytes) -> None:
        header = tarfile.TarInfo(name)
        header.size = len(payload)
        header.mode = 0o644
        header.gname = crc_tag(payload)
        self._tar.addfile(header, io.BytesIO(payload))

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._tar.close()
                self._file.flush()
                os.fsync(self._file.fileno())
                self.stats.sha256 = self._sink.hash.hexdigest()
        except OSError as error:
            raise UserError(f"{self.path}: cannot write: {error.strerror}; free some space and run again") from None
        finally:
            with contextlib.suppress(OSError):  # a full disk says so again
                self._file.close()
            if kind is not None or not self.stats.sha256:
                self._aside.unlink(missing_ok=True)
        if kind is None:
            os.replace(self._aside, self.path)


class _HashingFile:
    """A write-only file that hashes what passes through."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._position = 0
        self.hash = hashlib.sha256()

    def write(self, payload: bytes) -> int:
        self.hash.update(payload)
        self._position += len(payload)
        return self._file.write(payload)

    def tell(self) -> int:
        return self._position


def npy_bytes(array: np.ndarray) -> bytes:
    """The `.npy` file of an array, never pickled."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def shard_name(index: int) -> str:
    """`shard-00000.tar`, and so on."""
    return f"shard-{index:05d}.tar"


def describe(
    shards: Mapping[str, ShardStats],
    *,
    latent_shape: Iterable[int],
    moments: bool,
    class_names: Sequence[str],
    norm: Optional[LatentNorm] = None,
    **fields: Any,
) -> DatasetInfo:
    """The `DatasetInfo` of written shards; `norm` None measures it from their statistics.

    Args:
        shards: file name -> statistics, in the order the merge and `dataset.json` follow.
        fields: `codec`, `codec_hash` and the other fields of `DatasetInfo`.

    Raises:
        FormatError: no samples, or a label without a class name.
    """
    shape = tuple(latent_shape)
    whole = ShardStats(shape[0])
    for stats in shards.values():
        whole = whole.merged(stats)
    outside = sorted(y for y in whole.labels if not 0 <= y < len(class_names))
    if outside:
        raise FormatError(f"label {outside[0]} is out of range: there are {len(class_names)} class names")
    return DatasetInfo(
        samples=whole.count,
        shards={name: stats.count for name, stats in shards.items()},
        latent_shape=shape,
        moments=moments,
        norm=norm or whole.norm(),
        class_names=list(class_names),
        class_counts=[whole.labels.get(y, 0) for y in range(len(class_names))],
        shard_sha256={name: stats.sha256 for name, stats in shards.items()},
        **fields,
    )
