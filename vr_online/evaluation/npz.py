"""npz files that are absent, old or whole, and are never unpickled."""

from __future__ import annotations

import os
import uuid
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from vr_online.errors import UserError


def save_npz(path: str | os.PathLike, **arrays: Any) -> None:
    """`numpy.savez` to a file that is either absent, old or whole; raises `UserError` when it cannot be written."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot write: {error.strerror or error}") from None


def load_npz(path: str | os.PathLike, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Those of `keys` that an npz holds, never unpickling; raises `UserError` when it is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in keys if key in file.files}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; make reference statistics with `vr-online fid stats`") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not a whole npz file ({error}); make or fetch it again") from None
