"""Line-per-record JSON files that survive a crash: append, cut back to a step, read.

A record is one line of strict JSON. Numbers that JSON lacks are the strings "nan", "inf" and "-inf",
which `read_records` turns back. A line torn by a crash is skipped by the reader and removed on resume.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from vr_online.errors import UserError
from vr_online.files import written_aside

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (list, tuple)):
        return [_encode(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    return _SPECIAL.get(value, value) if isinstance(value, str) else value


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Appends one line in a single write. Raises OSError (a full disk, a vanished folder)."""
    line = json.dumps({k: _encode(v) for k, v in record.items()}, allow_nan=False, separators=(",", ":")) + "\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = ("\n" if torn else "").encode() + line.encode()
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def _whole_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield line if line.endswith("\n") else line + "\n", record


def truncate_records(path: Path, step: int) -> None:
    """Drops lines of steps after `step`, and torn ones; the file is replaced in one rename."""
    if not path.exists():
        return
    with written_aside(path) as aside, open(aside, "w", encoding="utf-8") as file:
        for line, record in _whole_lines(path):
            if record["step"] <= step:
                file.write(line)


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records, in the file's order.

    Raises:
        UserError: the file is missing, or holds no whole record.
    """
    try:
        records = [{k: _decode(v) for k, v in record.items()} for _, record in _whole_lines(path)]
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror}); is this the directory of a run?") from None
    if not records:
        raise UserError(f"{path}: holds no record yet; a run writes one every monitor.log_every steps")
    return records
