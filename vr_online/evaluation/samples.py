"""Samples that stay on disk when asked for: `samples.npz` (as ADM's evaluator reads it) or a folder of PNGs."""

from __future__ import annotations

import contextlib
import shutil
import zipfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vr_online.evaluation.features import to_uint8
from vr_online.files import written_aside


class SampleKeeper:
    """Stores uint8 images batch by batch, any rank its own, and joins them at the end without holding them all.

    Args:
        folder: `evals/<step>/partial`.
        decode: latents to float images in [0, 1]; None when samples already are uint8 images.
    """

    def __init__(self, folder: Path, decode=None):
        self.folder, self.decode = folder, decode

    def _path(self, batch: int) -> Path:
        return self.folder / f"images-{batch:07d}.npy"

    def keep(self, batch: int, samples: torch.Tensor) -> None:
        """Stores one batch of uint8 images (B, 3, H, W), or of latents; raises `UserError` when it cannot be written."""
        with torch.no_grad():
            images = samples if samples.dtype == torch.uint8 else to_uint8(self.decode(samples))
        array = images.permute(0, 2, 3, 1).contiguous().cpu().numpy()
        with written_aside(self._path(batch)) as aside, open(aside, "wb") as file:
            np.save(file, array)

    def has(self, batches: list[int]) -> bool:
        """Whether all these batches are there."""
        return all(self._path(batch).exists() for batch in batches)

    def join(self, target: Path, n: int, batches: int) -> None:
        """Joins all batches into `target`: an .npz with `arr_0` (n, H, W, 3) uint8, or a folder of PNGs.

        They stay until `clear`, so that whatever fails after this can be tried again.
        """
        with written_aside(target) as aside:
            if target.suffix == ".npz":
                self._join_npz(aside, n, batches)
            else:
                self._join_png(aside, batches)

    def _join_npz(self, path: Path, n: int, batches: int) -> None:
        first = np.load(self._path(0), allow_pickle=False)
        header = {"descr": "|u1", "fortran_order": False, "shape": (n, *first.shape[1:])}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            with archive.open("arr_0.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_2_0(member, header)
                for batch in range(batches):
                    member.write(np.load(self._path(batch), allow_pickle=False).tobytes())

    def _join_png(self, folder: Path, batches: int) -> None:
        folder.mkdir(parents=True)
        number = 0
        for batch in range(batches):
            for image in np.load(self._path(batch), allow_pickle=False):
                Image.fromarray(image).save(folder / f"{number:06d}.png")
                number += 1

    def clear(self) -> None:
        """Removes all batches."""
        for path in self.folder.glob("images-*"):
            path.unlink(missing_ok=True)


def prune_samples(evals: Path, keep: int, variant: str = "") -> None:
    """Removes the kept samples of all but the newest `keep` evaluations with the same settings.

    Args:
        keep: 0 removes nothing: an evaluation that keeps no samples has no say over those that others kept.
        variant: folder below `evals/<step>`, see `results.variant`.
    """
    if keep == 0:
        return
    with contextlib.suppress(OSError):  # another evaluator may remove the same; what stays is removed next time
        kept = [path for name in ("samples.npz", "samples") for path in evals.glob(str(Path("*", variant, name)))]
        for path in sorted(kept, key=lambda p: p.stat().st_mtime)[:-keep]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
