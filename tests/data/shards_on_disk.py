"""Small shards written on the fly; sample i's latent holds i, so that what arrives says which sample it is."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

import numpy as np

from vr_online.config import DataConfig
from vr_online.data.format import DatasetInfo
from vr_online.data.writer import ShardWriter

SHAPE = (2, 2, 2)
CLASSES = 10


def latent_of(index: int, channels: int = SHAPE[0]) -> np.ndarray:
    """The index in base 1000 in the first row (float16 is exact to 2048), and something unsymmetric below."""
    latent = np.zeros((channels, *SHAPE[1:]), np.float16)
    latent[0, 0] = index // 1000, index % 1000
    latent[1, 1] = 1, 2
    return latent


def index_of(latents: np.ndarray) -> list[int]:
    """Indices of samples (B, C, H, W), flipped or not flipped alike if they are below 1000."""
    return (latents[:, 0, 0, 0].astype(int) * 1000 + latents[:, 0, 0, 1].astype(int)).tolist()


def write_shards(folder: Path, counts: Sequence[int], moments: bool = False) -> DatasetInfo:
    """Shards of the given counts with `dataset.json`; indices run through."""
    names, index = {}, 0
    for number, count in enumerate(counts):
        name = f"shard-{number:05d}.tar"
        names[name] = count
        with ShardWriter(folder / name, SHAPE, moments) as shard:
            for _ in range(count):
                shard.write(f"{index:08d}", latent_of(index, SHAPE[0] * (2 if moments else 1)), index % CLASSES)
                index += 1
    info = DatasetInfo(
        samples=index, shards=names, latent_shape=SHAPE, moments=moments, codec="pixel", codec_hash="none",
        norm={"mean": [0.0] * SHAPE[0], "std": [1.0] * SHAPE[0]}, class_names=[str(c) for c in range(CLASSES)],
    )
    info.save(folder)
    return info


def data_config(folder: Path, **changes) -> DataConfig:
    return DataConfig(**{"shards": str(folder), "shuffle": 8, "workers": 0, "prefetch": 2, **changes})
