"""Looking into a data set: a printed summary, and a picture of decoded samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator, Optional

import numpy as np
import torch

from vr_online.data.codecs import codec_for
from vr_online.data.format import FILE_NAME, DatasetInfo
from vr_online.data.shard import Expected, Sample, read_samples
from vr_online.data.sources import open_source
from vr_online.errors import UserError

_BATCH = 64


def decode_grid(
    folder: str | Path, image: str | Path, *, n: int = 64, columns: int = 8, by_class: bool = False, codec_path: Optional[str] = None
) -> int:
    """Decodes up to `n` samples (of moments, the mean) through the data set's codec into one picture.

    Args:
        by_class: one class a row, `columns` samples of each, instead of the first `n` in the order of the shards.
        codec_path: the place of the codec's weights, if not the one recorded.

    Returns:
        The number of samples shown.
    """
    from torchvision.utils import make_grid, save_image

    info = DatasetInfo.load(folder)
    codec = codec_for(info, codec_path)
    samples = _pick(read_dataset(folder, info), n, columns if by_class else None)
    if not samples:
        raise UserError(f"{folder}: holds no samples to show")
    latents = torch.from_numpy(np.stack([_latent(s, info) for s in samples]))
    pictures = torch.cat([codec.decode(latents[i : i + _BATCH]) for i in range(0, len(latents), _BATCH)])
    try:
        Path(image).parent.mkdir(parents=True, exist_ok=True)
        save_image(make_grid(pictures, nrow=columns, padding=1), image)
    except (OSError, ValueError) as error:
        raise UserError(f"{image}: cannot write the picture: {error}") from None
    return len(samples)


def read_dataset(folder: str | Path, info: DatasetInfo) -> Iterator[Sample]:
    """Every sample of the folder, `dataset.json` or URL of either, in the order of the shards; raises `ShardError`
    at a broken one."""
    root = str(folder).removesuffix(FILE_NAME).rstrip("/") or "."
    for name, count in info.shards.items():
        location = f"{root}/{name}"
        source = open_source(location)
        try:
            for _, sample in read_samples(source.read, Expected.of(info), location, count):
                yield sample
        finally:
            source.close()


def _latent(sample: Sample, info: DatasetInfo) -> np.ndarray:
    """(C, H, W): of both flips the first, of moments the mean."""
    stored = sample.latent[0] if sample.latent.ndim == 4 else sample.latent
    return stored[: info.latent_shape[0]]


def _pick(samples: Iterator[Sample], n: int, per_class: Optional[int]) -> list[Sample]:
    """The first n samples, or rows of `per_class` samples for as many classes as n holds."""
    picked: dict[int, list[Sample]] = {}
    rows = n if per_class is None else max(1, n // per_class)
    if per_class is None:
        return [s for s, _ in zip(samples, range(n))]
    for sample in samples:
        row = picked.setdefault(sample.label, []) if sample.label < rows else []
        if sample.label < rows and len(row) < per_class:
            row.append(sample)
        if len(picked) == rows and all(len(r) == per_class for r in picked.values()):
            break
    return [s for label in sorted(picked) if len(picked[label]) == per_class for s in picked[label]]


def summary(info: DatasetInfo) -> str:
    """What `vr-online shards info` prints: counts, shapes, codec, normalisation and a class histogram."""
    lines = [
        f"samples        {info.samples} in {len(info.shards)} shards",
        f"latent         {' x '.join(map(str, info.latent_shape))} float16" + (" (posterior mean and std stored)" if info.moments else ""),
        f"codec          {info.codec}, hash {info.codec_hash[:20]}" + (f", from {info.codec_path}" if info.codec_path else ""),
        f"source         {info.source or 'not recorded'}",
        f"preprocessing  {', '.join(f'{k} {v}' for k, v in info.preprocessing.items() if k != 'job') or 'not recorded'}",
        f"mean           {_numbers(info.norm.mean)}",
        f"std            {_numbers(info.norm.std)}",
        f"classes        {info.num_classes}",
    ]
    return "\n".join(lines + list(_histogram(info)))


def _numbers(values: Any, most: int = 8) -> str:
    shown = "  ".join(f"{v:.4g}" for v in values[:most])
    return shown + (f"  ... ({len(values)} channels)" if len(values) > most else "")


def _histogram(info: DatasetInfo, most: int = 20, width: int = 40) -> Iterator[str]:
    """One bar a class; of many classes the extremes stand for all."""
    counts = list(enumerate(info.class_counts))
    if not counts:
        return
    top = max(1, *info.class_counts)
    if len(counts) > most:
        yield f"  {len(counts)} classes, from {min(info.class_counts)} to {top} samples; the {most} largest:"
        counts = sorted(counts, key=lambda pair: -pair[1])[:most]
    for y, n in counts:
        yield f"  {y:>5} {info.class_names[y][:24]:<24} {n:>9} {'#' * round(width * n / top)}"
