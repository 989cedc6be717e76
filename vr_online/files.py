"""Files that are either absent, old or whole: written beside their place, synced, renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path
from typing import Iterator

from vr_online.errors import UserError


@contextlib.contextmanager
def written_aside(path: str | os.PathLike, hint: str = "") -> Iterator[Path]:
    """A path in the same folder to write a file or folder to; it takes `path`'s place when the block ends well, and is
    removed when it does not.

    Args:
        hint: what to do when it cannot be written, for the end of the message.

    Raises:
        UserError: for an `OSError` in the block or here (a full disk, missing permission), naming `path`.
    """
    path = Path(path)
    # Not the process id: another machine that shares the folder may have the same.
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        _sync(aside)
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(aside, path)
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror or error}{'; ' + hint if hint else ''}") from None
    finally:
        _remove(aside)


def write_atomic(path: str | os.PathLike, content: str | bytes, hint: str = "") -> None:
    """Writes a small file through `written_aside`."""
    with written_aside(path, hint) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


def _sync(path: Path) -> None:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    for file in files:
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
