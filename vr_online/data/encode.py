"""Encoding labelled images into latent shards: parallel, resumable, and the same bytes however it ran.

Each shard is a function of its slice of the index and of the options alone: batches never cross shards, noise
is keyed by (seed, image), and CPU arithmetic runs on one thread per process. So a shard is either whole or
made again, and the number of processes, their order and interruptions leave no trace in the output.
While work goes on, `OUT/.encode/` holds the job and the statistics of finished shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

import numpy as np
import torch

from vr_online.data.codecs import Codec, Posterior, get_codec
from vr_online.data.format import FILE_NAME, DatasetInfo, LatentNorm
from vr_online.data.images import ImageIndex, Item, load_image
from vr_online.data.parallel import run_tasks
from vr_online.data.writer import ShardStats, ShardWriter, describe, shard_name
from vr_online.errors import UserError
from vr_online.files import write_atomic

WORK_FOLDER = ".encode"
_AUTO_SHARDS, _AUTO_LARGEST = 16, 2048


@dataclass(frozen=True)
class EncodeOptions:
    """What decides the bytes of the shards, beside the images themselves."""

    codec: str
    """`pixel`, `tae:PATH` or `kl:PATH`."""
    size: int
    """Side, in pixels, of the square cut from each image."""
    flip: str = "none"
    """`both` stores each image and its mirror image as two samples; `none` stores the image."""
    posterior: str = "sample"
    """For a stochastic codec: store a `sample`, the `mean`, or the `moments` (mean and standard deviation)."""
    norm: str = "measured"
    """`measured` over the latents; `scale:0.18215` for x_1 = 0.18215 latent; `from:DATASET` copies another's."""
    shuffle: bool = True
    """Permute the images by `seed`, so that each shard holds all classes; Parquet rows keep their order."""
    seed: int = 0
    """Keys the permutation and posterior samples."""
    shard_size: Optional[int] = None
    """Images a shard; None makes at least 16 shards of at most 2,048."""
    batch_size: int = 64
    """Images per pass of the codec; floating-point results may depend on it."""
    precision: str = "fp32"
    """Arithmetic of the codec on a GPU: `fp32`, or `tf32`, which is several times faster and rounds about as
    coarsely as the float16 in which latents are stored."""
    on_error: str = "stop"
    """A corrupt image stops the work, or with `skip` is left out and counted."""
    limit: Optional[int] = None
    """Encode only so many images, the first of the (permuted) order."""


@dataclass(frozen=True)
class _Shard:
    """One task: the images [start, start + len(items)) as the shard `index`."""

    index: int
    start: int
    items: tuple[Item, ...]


@dataclass(frozen=True)
class _Job:
    """All that a worker needs beside its shard."""

    out: str
    options: EncodeOptions
    latent_shape: tuple[int, int, int]
    moments: bool
    decode_threads: int


@dataclass
class EncodeResult:
    """`info` is None while shards of other ranks are missing; `images` were encoded by this call in `seconds`."""

    info: Optional[DatasetInfo]
    images: int
    skipped: list[str] = field(default_factory=list)


def encode(
    index: ImageIndex,
    out: str | Path,
    options: EncodeOptions,
    *,
    source: str = "",
    workers: Optional[int] = None,
    devices: Sequence[str] = ("cpu",),
    decode_threads: int = 4,
    rank: int = 0,
    world_size: int = 1,
    progress: bool = True,
) -> EncodeResult:
    """Encodes `index` into `out`; run again after an interruption it continues.

    Args:
        source: where the images come from, for `dataset.json`.
        workers: processes; None takes one per device, on CPU one per core. Each opens the codec itself.
        devices: torch devices, dealt round-robin to workers.
        decode_threads: threads that open images for each GPU.
        rank, world_size: this call's share of the shards, for several machines on one file system; the call that
            finds all shards done writes `dataset.json`.

    Raises:
        UserError: bad options, a corrupt image (with `on_error: stop`), or `out` belongs to another job.
    """
    _check(options, rank, world_size)
    options = replace(options, shuffle=options.shuffle and index.seekable)
    out = Path(out)
    codec = get_codec(options.codec)
    items = _ordered(index, options)
    job = _Job(str(out), options, _latent_shape(codec, options), _moments(codec, options), 1 if devices[0] == "cpu" else decode_threads)
    description = _describe_job(items, index.class_names, codec, options)
    done = _existing(out, description)
    if done is not None:
        shutil.rmtree(out / WORK_FOLDER, ignore_errors=True)
        return EncodeResult(done, 0)
    norm = parse_norm(options.norm, job.latent_shape[0])
    _start(out, description)
    shards = _split(items, options)
    todo = _unfinished(out, [s for s in shards if s.index % world_size == rank])
    images = sum(len(s.items) for s in todo)
    run_tasks(
        _encode_shard, todo, setup=_Worker, setup_args=(job,), devices=devices, workers=workers,
        total=images, unit="img", label="encoding", progress=progress,
    )
    info, skipped = _finish(out, shards, job, codec, index.class_names, norm, source, description)
    return EncodeResult(info, images, skipped)


def _check(options: EncodeOptions, rank: int, world_size: int) -> None:
    choices = {"flip": ("none", "both"), "posterior": ("sample", "mean", "moments"), "precision": ("fp32", "tf32"), "on_error": ("stop", "skip")}
    for name, valid in choices.items():
        if getattr(options, name) not in valid:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: expected {' or '.join(valid)}")
    for name in ("size", "batch_size", "shard_size", "limit"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected a positive number")
    if options.seed < 0:
        raise UserError(f"--seed {options.seed}: expected a number from 0")
    if not 0 <= rank < world_size:
        raise UserError(f"--rank {rank} --of {world_size}: expected a rank from 0 to {world_size - 1}")


def parse_norm(text: str, channels: int) -> Optional[LatentNorm]:
    """`measured` to None, `scale:X` and `from:DATASET` to a `LatentNorm`; raises `UserError` for anything else."""
    kind, _, value = text.partition(":")
    if text == "measured":
        return None
    if kind == "scale":
        try:
            scale = float(value)
        except ValueError:
            scale = 0.0
        if not 0 < scale < float("inf"):
            raise UserError(f"--norm {text}: expected a positive number, such as scale:0.18215")
        return LatentNorm.from_scale(scale, channels)
    if kind == "from" and value:
        norm = DatasetInfo.load(value).norm
        if norm.channels != channels:
            raise UserError(f"--norm {text}: that data set has {norm.channels} channels, these latents have {channels}")
        return norm
    raise UserError(f"--norm {text}: expected measured, scale:NUMBER or from:DATASET")


def _moments(codec: Codec, options: EncodeOptions) -> bool:
    if options.posterior == "moments" and not codec.stochastic:
        raise UserError(f"--moments: the codec {codec.id} is deterministic and has no posterior; leave it out")
    return options.posterior == "moments"


def _latent_shape(codec: Codec, options: EncodeOptions) -> tuple[int, int, int]:
    if options.size % codec.factor:
        near = max(1, round(options.size / codec.factor)) * codec.factor
        raise UserError(f"--size {options.size}: the codec {codec.id} needs a multiple of {codec.factor}, such as {near}")
    return tuple(codec.encode(torch.zeros(1, 3, options.size, options.size, dtype=torch.uint8)).shape[1:])


def _ordered(index: ImageIndex, options: EncodeOptions) -> list[Item]:
    items = index.items
    if options.shuffle:
        items = [items[i] for i in np.random.Generator(np.random.Philox(options.seed)).permutation(len(items))]
    return items[: options.limit]


def _split(items: Sequence[Item], options: EncodeOptions) -> list[_Shard]:
    size = options.shard_size or max(1, min(_AUTO_LARGEST, -(-len(items) // _AUTO_SHARDS)))
    return [_Shard(i, start, tuple(items[start : start + size])) for i, start in enumerate(range(0, len(items), size))]


# the job on disk

def _describe_job(items: Sequence[Item], class_names: Sequence[str], codec: Codec, options: EncodeOptions) -> dict[str, Any]:
    """What must be equal for two runs to work on the same data set."""
    listing = hashlib.sha256()
    for item in items:
        listing.update(f"{item.name}\t{item.label}\n".encode())
    chosen = asdict(options)
    chosen["codec"] = codec.id  # its place may differ, its hash may not
    return {**chosen, "codec_hash": codec.hash, "images": len(items), "images_sha256": listing.hexdigest(), "class_names": list(class_names)}


def _existing(out: Path, description: dict[str, Any]) -> Optional[DatasetInfo]:
    """The data set in `out` if it is this job's and whole; raises `UserError` if it is another's."""
    if not (out / FILE_NAME).exists():
        if not (out / WORK_FOLDER / "job.json").exists() and any(out.glob("*.tar")):
            raise UserError(f"{out}: holds tars but neither {FILE_NAME} nor an unfinished job; choose an empty folder")
        return None
    info = DatasetInfo.load(out)
    if info.preprocessing.get("job") != _job_hash(description):
        raise UserError(f"{out}: already holds another data set (or this one with other options); choose another folder or delete it")
    return info


def _job_hash(description: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _start(out: Path, description: dict[str, Any]) -> None:
    path = out / WORK_FOLDER / "job.json"
    if not path.exists():
        write_atomic(path, json.dumps(description, indent=1).encode())
        return
    try:
        old = json.loads(path.read_text())
    except ValueError:
        raise UserError(f"{path}: damaged; delete {path.parent} and run again") from None
    for key, value in description.items():
        if old.get(key) != value:
            shown = f"{key} was {old.get(key)!r}, now {value!r}" if key != "class_names" else "the class names differ"
            raise UserError(f"{out}: holds an unfinished job with other options ({shown}); finish that one, or delete {out}")


def _stats_path(out: Path, shard: _Shard) -> Path:
    return out / WORK_FOLDER / f"{shard_name(shard.index)}.json"


def _unfinished(out: Path, shards: Sequence[_Shard]) -> list[_Shard]:
    """Shards to make. Statistics are written after the tar took its name; what interrupted tries left is removed."""
    tars, stats = set(os.listdir(out)), set(os.listdir(out / WORK_FOLDER))
    todo = {s.index: s for s in shards if shard_name(s.index) not in tars or f"{shard_name(s.index)}.json" not in stats}
    names = {f".{shard_name(index)}" for index in todo}
    for name in tars:
        if name.endswith(".part") and name.rsplit(".", 2)[0] in names:
            (out / name).unlink(missing_ok=True)
    return list(todo.values())


def _finish(
    out: Path, shards: Sequence[_Shard], job: _Job, codec: Codec, class_names: Sequence[str],
    norm: Optional[LatentNorm], source: str, description: dict[str, Any],
) -> tuple[Optional[DatasetInfo], list[str]]:
    """Writes `dataset.json` if every rank's shards are there."""
    try:
        trees = [json.loads(_stats_path(out, s).read_text()) for s in shards]
    except FileNotFoundError:  # another rank is still at work, or has just finished the whole
        return (DatasetInfo.load(out), []) if (out / FILE_NAME).exists() else (None, [])
    skipped = [name for tree in trees for name in tree.pop("skipped")]
    stats = {shard_name(s.index): ShardStats(**tree) for s, tree in zip(shards, trees)}
    options = job.options
    preprocessing = {
        "crop": "centre (ADM: box halvings, then bicubic)", "size": options.size, "flip": options.flip,
        "posterior": options.posterior if codec.stochastic else "deterministic", "norm": options.norm,
        "shuffle": options.shuffle, "seed": options.seed, "batch_size": options.batch_size, "precision": options.precision,
        "skipped": len(skipped), "job": _job_hash(description),
    }
    info = describe(
        stats, latent_shape=job.latent_shape, moments=job.moments, class_names=class_names, norm=norm,
        codec=codec.id, codec_hash=codec.hash, codec_path=codec.path, source=source, preprocessing=preprocessing,
    )
    info.save(out)
    shutil.rmtree(out / WORK_FOLDER, ignore_errors=True)
    return info, skipped


# in a worker

class _Worker:
    """The codec on its device, opened once per process."""

    def __init__(self, job: _Job, device: str) -> None:
        self.job = job
        self.device = device
        self.codec = get_codec(job.options.codec, device=device)

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """One CPU thread and fixed cuDNN algorithms: a batch gives the same bits in every process."""
        threads, matmul_tf32 = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
        tf32 = self.job.options.precision == "tf32"
        torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32):
                yield
        finally:
            torch.set_num_threads(threads)
            torch.backends.cuda.matmul.allow_tf32 = matmul_tf32


def _encode_shard(worker: _Worker, shard: _Shard, advance: Any) -> None:
    """Writes one tar, then its statistics."""
    job, out = worker.job, Path(worker.job.out)
    skipped: list[str] = []
    mirrored: list[tuple[list[str], np.ndarray, list[int]]] = []
    with ShardWriter(out / shard_name(shard.index), job.latent_shape, job.moments) as writer, worker.exact():
        for numbers, images, labels in _batches(shard, job, skipped, advance):
            keys = [f"{n:08d}" for n in numbers]
            if numbers:
                writer.write_batch(keys, _latents(worker, images, numbers, 0), labels)
            if numbers and job.options.flip == "both":
                mirrored.append(([f"{k}-flip" for k in keys], _latents(worker, images.flip(-1), numbers, 1), labels))
        for keys, latents, labels in mirrored:  # last, so that the two samples of an image lie apart
            writer.write_batch(keys, latents, labels)
    tree = {**writer.stats.to_dict(), "skipped": skipped}
    write_atomic(_stats_path(out, shard), json.dumps(tree).encode())


def _latents(worker: _Worker, images: torch.Tensor, numbers: Sequence[int], flipped: int) -> np.ndarray:
    """uint8 (B, 3, S, S) to what is stored, (B, C or 2C, h, w) float32."""
    options = worker.job.options
    try:
        if not worker.codec.stochastic:
            return worker.codec.encode(images).cpu().numpy()
        posterior = Posterior(*(part.float().cpu() for part in worker.codec.posterior(images)))
    except torch.cuda.OutOfMemoryError:
        raise UserError(f"--batch-size {options.batch_size}: {worker.device} has too little memory; take a smaller one") from None
    if options.posterior == "moments":
        return torch.cat(posterior, dim=1).numpy()
    if options.posterior == "mean":
        return posterior.mean.numpy()
    shape = posterior.mean.shape[1:]
    keys = [np.random.Philox(key=[options.seed, 2 * n + flipped]) for n in numbers]
    noise = np.stack([np.random.Generator(key).standard_normal(shape, dtype=np.float32) for key in keys])
    return posterior.mean.numpy() + posterior.std.numpy() * noise


def _batches(shard: _Shard, job: _Job, skipped: list[str], advance: Any) -> Iterator[tuple[list[int], torch.Tensor, list[int]]]:
    """(image numbers, uint8 images, labels) batch by batch; the next batch decodes while the codec works."""
    size = job.options.batch_size
    chunks = [range(i, min(i + size, len(shard.items))) for i in range(0, len(shard.items), size)]
    with ThreadPoolExecutor(job.decode_threads) as pool:

        def submit(chunk: range) -> list[Future]:
            return [pool.submit(load_image, shard.items[i], job.options.size) for i in chunk]

        try:
            pending = submit(chunks[0])
            for chunk, following in zip(chunks, [*chunks[1:], range(0)]):
                current, pending = pending, submit(following)
                kept = _collect(chunk, current, job.options.on_error, shard, skipped)
                numbers = [shard.start + i for i, _ in kept]
                images = torch.from_numpy(np.stack([image for _, image in kept])) if kept else torch.empty(0)
                yield numbers, images, [shard.items[i].label for i, _ in kept]
                advance(len(chunk))
        finally:
            pool.shutdown(cancel_futures=True)


def _collect(chunk: range, futures: Sequence[Future], on_error: str, shard: _Shard, skipped: list[str]) -> list[tuple[int, np.ndarray]]:
    kept = []
    for i, future in zip(chunk, futures):
        try:
            kept.append((i, future.result()))
        except UserError:
            if on_error == "stop":
                raise
            skipped.append(shard.items[i].name)
    return kept
