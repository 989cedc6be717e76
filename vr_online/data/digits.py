"""scikit-learn's handwritten digits as latent shards: real data without a download.

1,797 images of 8 x 8 in 10 classes become pixel latents of 1 x 8 x 8 in two data sets, `train` (1,500 images)
and `heldout` (297), split by class in proportion and always the same way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import numpy as np
import torch

from vr_online.data.codecs import PixelCodec
from vr_online.data.format import DatasetInfo, LatentNorm
from vr_online.data.writer import ShardStats, ShardWriter, describe, shard_name
from vr_online.errors import UserError

HELDOUT = 297


def load_splits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """`train` and `heldout`: uint8 images (N, 1, 8, 8), where 16 grey levels span [0, 255], and int64 labels (N,).

    Raises:
        UserError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise UserError("the digits come with scikit-learn: pip install 'vr_online[demo]'") from None
    data = load_digits()
    images = np.rint(data.images * (255.0 / 16.0)).astype(np.uint8)[:, None]
    labels = data.target.astype(np.int64)
    train, heldout = train_test_split(np.arange(len(labels)), test_size=HELDOUT, stratify=labels, random_state=0)
    return {"train": (images[train], labels[train]), "heldout": (images[heldout], labels[heldout])}


def write_digits(out: str | Path, shards: int = 8) -> dict[str, DatasetInfo]:
    """Writes `out/train` and `out/heldout`, `shards` tars each, both with the normalisation of `train`."""
    if not 1 <= shards <= HELDOUT:
        raise UserError(f"--shards {shards}: expected 1 to {HELDOUT}")
    splits = load_splits()
    infos: dict[str, DatasetInfo] = {}
    norm: Optional[LatentNorm] = None
    for split, (images, labels) in splits.items():
        infos[split] = _write_split(Path(out) / split, images, labels, shards, norm, split)
        norm = infos["train"].norm
    return infos


def _write_split(
    folder: Path, images: np.ndarray, labels: np.ndarray, shards: int, norm: Optional[LatentNorm], split: str
) -> DatasetInfo:
    codec = PixelCodec()
    latents = codec.encode(torch.from_numpy(images)).numpy()
    stats: dict[str, ShardStats] = {}
    for index, part in enumerate(np.array_split(np.arange(len(labels)), shards)):
        with ShardWriter(folder / shard_name(index), latents.shape[1:]) as shard:
            shard.write_batch([f"{i:08d}" for i in part], latents[part], labels[part])
        stats[shard_name(index)] = shard.stats
    info = describe(
        stats,
        latent_shape=latents.shape[1:],
        moments=False,
        class_names=[str(digit) for digit in range(10)],
        norm=norm,
        codec=codec.id,
        codec_hash=codec.hash,
        source=f"scikit-learn load_digits, {split}",
        preprocessing={"size": 8, "levels": "0..16 scaled to 0..255", "flip": "none"},
    )
    info.save(folder)
    return info
