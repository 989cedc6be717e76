"""Checkpoints: written by all ranks, atomic, free of pickles, of the world size and of the ZeRO stage.

A checkpoint is a folder `<run>/checkpoints/<step>/`:

    weights-RRRRR-of-NNNNN.safetensors   what rank R owned: `<parameter>|master`, `|exp_avg`, `|exp_avg_sq`, `|ema`,
                                         each a flat fp32 piece; where it starts, and the whole shape, in the header
    sampler.safetensors, data.json       timestep sampler and data position
    config.yaml, dataset.json            what was trained, on what
    manifest.json                        step, images, versions, and every file with its size

It is written beside its place as `.<step>.tmp`, synced, and renamed; `checkpoints/latest` is written last. A folder
whose manifest is missing, or that lacks a byte the manifest lists, is not whole and is passed over.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file

from vr_online.engine import MasterWeights
from vr_online.errors import UserError
from vr_online.files import write_atomic
from vr_online.ranks import Ranks

FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")


def save(
    run_dir: Path,
    step: int,
    ranks: Ranks,
    masters: MasterWeights,
    averages: list[torch.Tensor],
    files: dict[str, str],
    sampler: dict[str, Any],
    manifest: dict[str, Any],
) -> Path:
    """Writes the checkpoint of `step`; every rank must call it.

    Args:
        files: name -> text, written by the main rank as they are (config.yaml, dataset.json, data.json).
        sampler: tree of mappings, arrays and JSON values.
        manifest: JSON values to keep in manifest.json.

    Raises:
        UserError: on every rank, when any rank cannot write (a full disk, say). Older checkpoints stay as they were.
    """
    root = run_dir / "checkpoints"
    temporary, final = root / f".{step}.tmp", root / str(step)
    _together(ranks, final, lambda: _fresh_folder(temporary) if ranks.is_main else None)
    name = f"weights-{ranks.rank:05d}-of-{ranks.world_size:05d}.safetensors"
    _together(ranks, final, lambda: _write_fragments(temporary / name, masters, averages), temporary)

    def publish() -> None:
        for file, text in files.items():
            _write_text(temporary / file, text)
        write_state(temporary / "sampler.safetensors", sampler)
        _sync_file(temporary / "sampler.safetensors")
        sizes = {p.name: p.stat().st_size for p in sorted(temporary.iterdir())}
        whole = {"format": FORMAT, "step": step, "world_size": ranks.world_size, **manifest, "files": sizes}
        _write_text(temporary / "manifest.json", json.dumps(whole, indent=1))
        _sync_folder(temporary)
        if final.exists():
            shutil.rmtree(final)
        os.rename(temporary, final)
        _sync_folder(root)
        write_atomic(root / "latest", str(step))

    _together(ranks, final, lambda: publish() if ranks.is_main else None, temporary)
    return final


def _together(ranks: Ranks, target: Path, work, temporary: Path | None = None) -> None:
    """Runs `work` on every rank; where one fails, all raise the same error and the unfinished folder goes."""
    error = None
    try:
        work()
    except (OSError, SafetensorError, UserError) as e:
        error = str(getattr(e, "strerror", None) or e)
    errors = [f"rank {r}: {e}" for r, e in enumerate(ranks.gather(error)) if e]
    if errors:
        if ranks.is_main and temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            f"{target}: the checkpoint could not be written ({'; '.join(errors)}). Earlier checkpoints are untouched. "
            "Free space or correct the permissions, then run the same command again to continue from the newest one"
        )


def _fresh_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _write_fragments(path: Path, masters: MasterWeights, averages: list[torch.Tensor]) -> None:
    kinds = {"master": masters.flats, "ema": averages, **{key: masters.moments(key) for key in MOMENTS}}
    tensors = {
        f"{f.name}|{kind}": f.of(flats).detach().to("cpu", copy=True) for kind, flats in kinds.items() for f in masters.fragments
    }
    header = {f.name: [f.start, f.numel, list(f.shape)] for f in masters.fragments}
    save_file(tensors, path, {"fragments": json.dumps(header), "optimizer_steps": str(masters.optimizer_steps)})
    _sync_file(path)


def _sync_file(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Writes a tree of mappings, arrays and JSON values as one safetensors file."""
    leaves = dict(_leaves(state))
    arrays = {k: np.array(v, order="C") for k, v in leaves.items() if isinstance(v, np.ndarray)}
    values = {k: v for k, v in leaves.items() if k not in arrays}
    save_numpy(arrays, path, {"values": json.dumps(values)})


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def read_state(path: Path) -> dict[str, Any]:
    """Inverse of `write_state`; empty mappings are not kept."""
    with _open(path, "numpy") as file:
        leaves = json.loads(file.metadata()["values"])
        leaves.update({key: file.get_tensor(key) for key in file.keys()})
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *parents, leaf = key.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _open(path: Path, framework: str = "pt"):
    try:
        return safe_open(path, framework)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); the checkpoint is damaged, use another one") from None


# Finding checkpoints


def is_whole(path: Path) -> bool:
    """Whether every file that the manifest lists is there with its size."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        return all((path / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def list_checkpoints(run_dir: str | os.PathLike) -> list[int]:
    """Steps of the whole checkpoints of a run, ascending."""
    root = Path(run_dir) / "checkpoints"
    if not root.is_dir():
        return []
    return sorted(int(p.name) for p in root.iterdir() if p.name.isdigit() and is_whole(p))


def find(path: str | os.PathLike, step: int | None = None) -> Path:
    """A checkpoint folder from itself or from its run (the newest whole one, or that of `step`).

    Raises:
        UserError: nothing is there, or it is not whole.
    """
    path = Path(path)
    if (path / "manifest.json").exists():
        if not is_whole(path):
            raise UserError(f"{path}: this checkpoint is not whole (a file of its manifest is missing or short); use another one")
        return path
    steps = list_checkpoints(path)
    if not steps or (step is not None and step not in steps):
        wanted = "a whole checkpoint" if step is None else f"a whole checkpoint of step {step}"
        there = f" (there are steps {', '.join(map(str, steps))})" if steps else ""
        raise UserError(f"{path}: expected a run directory with {wanted} under checkpoints/, or a checkpoint folder{there}")
    return path / "checkpoints" / str(steps[-1] if step is None else step)


def manifest_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "manifest.json").read_text())


def prune(run_dir: Path, keep: int, keep_every: int | None, protected: set[int] = frozenset()) -> None:
    """Removes all but the newest `keep` checkpoints, the multiples of `keep_every` and the `protected` steps."""
    for step in list_checkpoints(run_dir)[:-keep]:
        if step not in protected and not (keep_every and step % keep_every == 0):
            shutil.rmtree(run_dir / "checkpoints" / str(step), ignore_errors=True)


def remove_unfinished(run_dir: Path) -> None:
    """Removes what a killed run left half written."""
    for path in (run_dir / "checkpoints").glob(".*.tmp"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


# Reading weights


class Pieces:
    """Named fp32 tensors spread over a checkpoint's weight files, whatever world size and ZeRO stage wrote them."""

    def __init__(self, path: Path):
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[tuple[Any, int, int]]] = {}
        self.optimizer_steps = 0
        files = sorted(path.glob("weights-*-of-*.safetensors"))
        if not files:
            raise UserError(f"{path}: no weights-*.safetensors in this folder; expected a checkpoint folder")
        for file in map(_open, files):
            header = file.metadata()
            self.optimizer_steps = int(header["optimizer_steps"])
            for name, (start, numel, shape) in json.loads(header["fragments"]).items():
                self.shapes[name] = tuple(shape)
                self._pieces.setdefault(name, []).append((file, start, numel))

    def read(self, name: str, kind: str, start: int, out: torch.Tensor) -> None:
        """Fills `out` (1-D) with the elements of `name` from `start` on."""
        end, filled = start + out.numel(), 0
        for file, piece_start, numel in self._pieces[name]:
            low, high = max(start, piece_start), min(end, piece_start + numel)
            if low < high:
                part = file.get_slice(f"{name}|{kind}")[low - piece_start : high - piece_start]
                out[low - start : high - start].copy_(part)
                filled += high - low
        if filled != out.numel():
            raise UserError(f"{self.path}: {name} is incomplete ({filled} of {out.numel()} elements); a weights file is missing")

    def whole(self, name: str, kind: str) -> torch.Tensor:
        shape = self.shapes[name]
        flat = torch.empty(int(np.prod(shape)), dtype=torch.float32)
        self.read(name, kind, 0, flat)
        return flat.view(shape)


def load_weights(path: str | os.PathLike, kind: str = "ema") -> dict[str, torch.Tensor]:
    """The trained parameters of a checkpoint folder as whole fp32 CPU tensors.

    Args:
        kind: `ema` for the average, `raw` for the master weights.
    """
    pieces = Pieces(Path(path))
    return {name: pieces.whole(name, {"raw": "master", "ema": "ema"}[kind]) for name in pieces.shapes}


@torch.no_grad()
def restore(path: Path, masters: MasterWeights, averages: list[torch.Tensor]) -> None:
    """Fills this rank's master weights, moments and average, whatever ranks and ZeRO stage wrote them.

    Raises:
        UserError: the checkpoint is of a model with other parameters.
    """
    pieces = Pieces(path)
    for kind in ("master", *MOMENTS):
        for name, shape, start, values in masters.held(kind):
            if pieces.shapes.get(name) != shape:
                raise UserError(
                    f"{path}: {name} is {pieces.shapes.get(name, 'missing')} in the checkpoint and {shape} in the model; "
                    "resume with the configuration the run began with, or choose another run directory"
                )
            pieces.read(name, kind, start, values)
    for f in masters.fragments:
        pieces.read(f.name, "ema", f.start, f.of(averages))
    masters.optimizer_steps = pieces.optimizer_steps
