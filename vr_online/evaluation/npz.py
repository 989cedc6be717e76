"""npz files that are absent, old or whole, and are never unpickled."""

from __future__ import annotations

import os
import zipfile
import zlib
from typing import Any

import numpy as np

from vr_online.errors import UserError
from vr_online.files import written_aside


def save_npz(path: str | os.PathLike, **arrays: Any) -> None:
    """`numpy.savez` to a file that is either absent, old or whole; raises `UserError` when it cannot be written."""
    with written_aside(path) as aside, open(aside, "wb") as file:
        np.savez(file, **arrays)


def load_npz(path: str | os.PathLike, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Those of `keys` that an npz holds, never unpickling; raises `UserError` when it is missing or damaged."""
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise UserError(f"{path}: expected an npz file, but it is a single array (.npy), whatever its name says")
        with file:
            return {key: file[key] for key in keys if key in file.files}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; make reference statistics with `vr-online fid stats`") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: not a whole npz file ({error}); make or fetch it again") from None
