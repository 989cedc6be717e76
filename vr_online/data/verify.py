"""Reading every byte of a data set and listing what is wrong with it, one line per fault."""

from __future__ import annotations

import functools
import hashlib
import io
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterator, Optional

import numpy as np

from vr_online.data.format import FILE_NAME, LABEL_SUFFIX, LATENT_SUFFIX, DatasetInfo
from vr_online.data.parallel import run_tasks
from vr_online.data.shard import split_name
from vr_online.data.tar import TarError, members
from vr_online.data.writer import npy_bytes
from vr_online.errors import UserError

MAX_FAULTS = 20
"""Faults listed per shard; more are summed up in one line."""
MAX_JSON = 1 << 20
_PICKLES = {"pkl", "pickle", "pyd", "pth", "pt", "joblib", "dill"}
_NOT_FINITE = "its latent has values that are not finite"
_PER_PROCESS = 256 << 20  # bytes that make a further process worth its start


@dataclass
class ShardReport:
    """What reading one shard found."""

    faults: list[str] = field(default_factory=list)
    count: int = 0
    labels: dict[int, int] = field(default_factory=dict)
    keys: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    """A 64-bit hash of each sample's key."""


def verify(folder: str | Path, *, workers: Optional[int] = None, progress: bool = True) -> list[str]:
    """Faults of the data set in `folder`, one line each and naming the file; empty when it is sound.

    Found: missing, unlisted, truncated or altered shards; samples of a wrong shape or type, not finite, without
    or with two of a member, with a label out of range, or with a key used before; pickled members, unsafe paths
    and oversize members; counts that disagree with `dataset.json`.

    Raises:
        FormatError: `dataset.json` itself cannot be used.
    """
    if "://" in str(folder):
        raise UserError(f"{folder}: verify reads local folders; copy the shards here first")
    info = DatasetInfo.load(folder)
    root = Path(folder) if Path(folder).is_dir() else Path(folder).parent
    present = [name for name in info.shards if (root / name).is_file()]
    missing = [name for name in info.shards if name not in set(present)]
    faults = [f"{root / name}: missing; {FILE_NAME} lists it with {info.shards[name]} samples" for name in missing]
    faults += [f"{path}: not listed in {FILE_NAME}" for path in sorted(root.glob("*.tar")) if path.name not in info.shards]
    total = sum((root / name).stat().st_size for name in present)
    reports = run_tasks(
        _verify_task, present, setup=_Context, setup_args=(str(root), info), workers=workers or (None if total > _PER_PROCESS else 1),
        total=total, unit="B", label="verifying", progress=progress,
    )
    for report in reports:
        faults += report.faults
    faults += _duplicates(root, present, reports)
    return faults or _class_counts(info, reports)


def _class_counts(info: DatasetInfo, reports: list[ShardReport]) -> list[str]:
    labels = sum((Counter(r.labels) for r in reports), Counter())
    found = [labels.get(y, 0) for y in range(info.num_classes)]
    if len(info.class_counts) != info.num_classes:
        return []
    pairs = enumerate(zip(info.class_names, found, info.class_counts))
    return [f"{FILE_NAME}: class {y} ({name}) has {n} samples, class_counts says {said}" for y, (name, n, said) in pairs if n != said]


class _Context:
    """What a worker needs to verify any shard."""

    def __init__(self, root: str, info: DatasetInfo, device: str) -> None:
        self.root, self.info = Path(root), info


def _verify_task(context: _Context, name: str, advance: Callable[[int], None]) -> ShardReport:
    return verify_shard(context.root / name, context.info, context.info.shards[name], context.info.shard_sha256.get(name), advance)


def verify_shard(
    path: Path, info: DatasetInfo, count: Optional[int], sha256: Optional[str] = None, advance: Callable[[int], None] = lambda n: None
) -> ShardReport:
    """Reads one shard; never raises for what is in it."""
    report = ShardReport()
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:

            def read(size: int) -> bytes:
                chunk = file.read(size)
                digest.update(chunk)
                advance(len(chunk))
                return chunk

            whole = _check_samples(read, path, info, report)
            while read(1 << 20):
                pass
    except OSError as error:
        report.faults.append(f"{path}: cannot read: {error.strerror or error}")
        return report
    if whole and count is not None and report.count != count:
        report.faults.append(f"{path}: holds {report.count} samples, {FILE_NAME} says {count}")
    if not report.faults and sha256 and digest.hexdigest() != sha256:
        report.faults.append(f"{path}: its bytes are not those that were written (SHA-256 differs from {FILE_NAME})")
    if len(report.faults) > MAX_FAULTS:
        report.faults[MAX_FAULTS:] = [f"{path}: {len(report.faults) - MAX_FAULTS} more faults"]
    return report


def _check_samples(read: Callable[[int], bytes], path: Path, info: DatasetInfo, report: ShardReport) -> bool:
    """Checks sample by sample; False where the tar breaks off, so that its count says nothing."""
    limit = 4 * int(np.prod(info.stored_shape)) * 2 + MAX_JSON
    hashes: list[int] = []
    seen: set[str] = set()
    try:
        for key, parts in _samples(read, limit, path, report):
            report.count += 1
            if key in seen:
                report.faults.append(f"{path}: the key {key!r} stands twice")
            seen.add(key)
            hashes.append(_key_hash(key))
            report.faults += [f"{path}: sample {key}: {fault}" for fault in _sample_faults(parts, info, report.labels)]
    except TarError as error:
        report.faults.append(f"{path}: {error}")
        return False
    finally:
        report.keys = np.array(hashes, np.uint64)
    return True


def _samples(read: Callable[[int], bytes], limit: int, path: Path, report: ShardReport) -> Iterator[tuple[str, dict[str, bytes]]]:
    """(key, {extension: bytes}); a change of key ends a sample."""
    key: Optional[str] = None
    parts: dict[str, bytes] = {}
    for name, payload in members(read, None, limit):
        member_key, extension = split_name(name)
        if extension.rpartition(".")[2].lower() in _PICKLES:
            report.faults.append(f"{path}: the member {name!r} is a pickle, which is never decoded; remove it")
        if key is not None and member_key != key:
            yield key, parts
            parts = {}
        key = member_key
        if extension in parts:
            report.faults.append(f"{path}: the member {name!r} stands twice")
        parts[extension] = payload
    if key is not None:
        yield key, parts


def _sample_faults(parts: dict[str, bytes], info: DatasetInfo, labels: dict[int, int]) -> Iterator[str]:
    for extension in (LATENT_SUFFIX, LABEL_SUFFIX):
        if extension not in parts:
            yield f"has no .{extension} member (it has {', '.join(sorted(parts))})"
    if LATENT_SUFFIX in parts:
        fault = latent_fault(parts[LATENT_SUFFIX], info.stored_shape)
        if fault:
            yield fault
    if LABEL_SUFFIX in parts:
        text = parts[LABEL_SUFFIX].strip()
        if not text.isdigit() or len(text) > 18:
            yield f"its label {text[:20]!r} is not an integer"
        elif int(text) >= info.num_classes:
            yield f"its label {int(text)} is out of range, there are {info.num_classes} classes"
        else:
            labels[int(text)] = labels.get(int(text), 0) + 1


def latent_fault(payload: bytes, shape: tuple[int, ...]) -> Optional[str]:
    """What is wrong with the bytes of a latent member, or None; nothing is unpickled."""
    header, size = _usual(shape)
    if len(payload) == size and payload.startswith(header):
        latent = np.frombuffer(payload, np.float16, offset=len(header))
        return None if np.isfinite(latent).all() else _NOT_FINITE
    try:
        latent = np.lib.format.read_array(io.BytesIO(payload), allow_pickle=False)
    except Exception as error:  # numpy's parser raises many types on damaged headers
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = "holds pickled objects, which are never decoded" if "Object arrays" in reason else f"is not an array file ({reason[:200]})"
        return f"its latent {what}"
    if latent.dtype != np.float16:
        return f"its latent has dtype {latent.dtype}, expected float16"
    if latent.shape not in (shape, (2, *shape)):
        return f"its latent has shape {latent.shape}, expected {shape}"
    if not np.isfinite(latent).all():
        return _NOT_FINITE
    return None


@functools.lru_cache(maxsize=8)
def _usual(shape: tuple[int, ...]) -> tuple[bytes, int]:
    """Header and length of the file our writer makes of a latent: nothing to parse where a member has both."""
    usual = npy_bytes(np.zeros(shape, np.float16))
    return usual[: -2 * int(np.prod(shape))], len(usual)


# keys over all shards

def _key_hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def _duplicates(root: Path, names: list[str], reports: list[ShardReport]) -> list[str]:
    """Keys that two shards share (a repetition inside one shard is already listed)."""
    unique = [np.unique(r.keys) for r in reports]
    if not unique:
        return []
    hashes, owners = np.concatenate(unique), np.repeat(np.arange(len(unique)), [len(u) for u in unique])
    order = np.argsort(hashes, kind="stable")
    hashes, owners = hashes[order], owners[order]
    clashes = np.flatnonzero(hashes[1:] == hashes[:-1])
    pairs = Counter((names[owners[i]], names[owners[i + 1]]) for i in clashes)
    return [f"{root / second}: {count} keys stand in {first} too" for (first, second), count in sorted(pairs.items())]
