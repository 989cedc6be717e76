"""Samples of one shard: members grouped by key, decoded, and checked against `dataset.json`.

Shards are data: nothing is unpickled, and a member that other readers would unpickle is an error.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional

import numpy as np

from vr_online.data.tar import MAX_MEMBER, TarError, members
from vr_online.errors import UserError

LATENT = "latent.npy"
LABEL = "cls"
DTYPE = np.dtype("<f2")
_BITS = np.dtype("<u2")
_PICKLED = {"pkl", "pickle", "pyd", "pth", "pt", "joblib", "dill"}
_MAX_NPY_HEADER = 1 << 16


class ShardError(UserError):
    """A shard that cannot be read or holds something else than `dataset.json` says."""


@dataclass(frozen=True)
class Expected:
    """What every sample of a data set must look like: the stored shape (2C, H, W with moments) and the classes."""

    shape: tuple[int, int, int]
    num_classes: int

    @classmethod
    def of(cls, info: Any) -> "Expected":
        """From a `DatasetInfo`."""
        return cls(tuple(info.stored_shape), info.num_classes)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * DTYPE.itemsize


@dataclass
class Sample:
    """One sample; `latent` is a read-only float16 array of the stored shape, or with both flips (2, *shape)."""

    __slots__ = ("key", "latent", "label")
    key: str
    latent: np.ndarray
    label: int


class _Decoder:
    """Arrays from `.npy` bytes. All members of a shard share one header, so it is parsed once."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._headers: dict[bytes, tuple[int, ...]] = {}

    def __call__(self, payload: bytes) -> np.ndarray:
        shape = self._headers.get(payload[:128])
        start = 128
        if shape is None:
            shape, start = self._parse(payload)
        if len(payload) - start != DTYPE.itemsize * math.prod(shape):
            raise TarError(f"{LATENT} has {len(payload) - start} bytes of data, its header {shape} asks for {2 * math.prod(shape)}")
        # All bits of the exponent set means infinite or NaN; integers are quicker to scan than halves.
        bits = np.frombuffer(payload, _BITS, offset=start)
        if (bits & 0x7FFF).max() >= 0x7C00:
            raise TarError(f"{LATENT} holds a value that is not finite")
        return bits.view(DTYPE).reshape(shape)

    def _parse(self, payload: bytes) -> tuple[tuple[int, ...], int]:
        file = io.BytesIO(payload[:_MAX_NPY_HEADER])
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(file)
        except Exception as error:
            raise TarError(f"{LATENT} is not an array file ({error})") from None
        if dtype.hasobject:
            raise TarError(f"{LATENT} holds pickled objects, which are refused")
        if dtype != DTYPE or fortran:
            raise TarError(f"{LATENT} has dtype {dtype}{' in Fortran order' if fortran else ''}, expected float16 in C order")
        if shape not in (self._expected.shape, (2, *self._expected.shape)):
            raise TarError(f"{LATENT} has shape {shape}, expected {self._expected.shape} as in dataset.json")
        if file.tell() == 128:
            self._headers[payload[:128]] = shape
        return shape, file.tell()


def _label(payload: bytes, num_classes: int) -> int:
    text = payload.strip()
    if not text.isdigit() or len(text) > 18:
        raise TarError(f"label {payload[:32]!r} is not an ASCII integer")
    label = int(text)
    if label >= num_classes:
        raise TarError(f"label {label} is out of range: dataset.json has {num_classes} classes, so 0 to {num_classes - 1}")
    return label


def split_name(name: str) -> tuple[str, str]:
    """WebDataset's rule: the key goes up to the first dot of the base name, the rest is the extension."""
    dot = name.find(".", name.rfind("/") + 1)
    return (name, "") if dot < 0 else (name[:dot], name[dot + 1 :])


def _is_part(name: str) -> bool:
    """Whether a member's bytes are needed, judged quickly; `_groups` judges again by its extension."""
    return name.endswith((LATENT, LABEL))


def _groups(read: Callable[[int], bytes], max_size: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Consecutive members of one key; only the two kinds of member that make a sample keep their bytes."""
    key: Optional[str] = None
    parts: dict[str, bytes] = {}
    for name, payload in members(read, _is_part, max_size):
        member_key, extension = split_name(name)
        wanted = extension == LATENT or extension == LABEL
        if not wanted and extension.rpartition(".")[2].lower() in _PICKLED:
            raise TarError(f"the member {name!r} is a pickle; nothing in a shard is unpickled, so it is refused")
        if not member_key or member_key.endswith("/"):
            continue  # hidden files such as ._name belong to no sample
        if member_key != key:
            if parts:
                yield key, parts
            key, parts = member_key, {}
        if wanted:
            if extension in parts:
                raise TarError(f"sample {key}: the member {name!r} stands twice")
            parts[extension] = payload
    if parts:
        yield key, parts


def read_samples(
    read: Callable[[int], bytes], expected: Expected, shard: str, count: Optional[int] = None, wanted: Optional[np.ndarray] = None
) -> Iterator[tuple[int, Sample]]:
    """Yields (ordinal, sample) for the samples of one shard, in the order of the tar.

    Args:
        read: `read(n)` of the open shard.
        expected: shape and classes of every sample.
        shard: its name, for messages.
        count: samples it must hold; None for any number.
        wanted: boolean array (count,); where False a sample is passed over without being decoded.

    Raises:
        ShardError: naming the shard, the sample and what was expected.
    """
    decode = _Decoder(expected)
    ordinal = -1
    try:
        for ordinal, (key, parts) in enumerate(_groups(read, max(MAX_MEMBER, 4 * expected.nbytes))):
            if count is not None and ordinal >= count:
                raise TarError(f"more than the {count} samples that dataset.json says")
            if wanted is not None and not wanted[ordinal]:
                continue
            yield ordinal, _sample(key, parts, decode, expected)
    except TarError as error:
        raise ShardError(f"{shard}: {error}. {ADVICE}") from None
    if count is not None and ordinal + 1 != count:
        raise ShardError(f"{shard}: it holds {ordinal + 1} samples, dataset.json says {count}. {ADVICE}")


ADVICE = "Check the shards with `vr-online shards verify`, write this one again, or set data.on_error=skip"


def _sample(key: str, parts: dict[str, bytes], decode: _Decoder, expected: Expected) -> Sample:
    try:
        for member in (LATENT, LABEL):
            if member not in parts:
                raise TarError(f"the member {key}.{member} is missing")
        return Sample(key, decode(parts[LATENT]), _label(parts[LABEL], expected.num_classes))
    except TarError as error:
        raise TarError(f"sample {key}: {error}") from None
