"""Contact sheets of images, large enough to read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Optional, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vr_online.files import written_aside

_READABLE = 48  # pixels below which an image is enlarged
_GAP = 2
_INK = (40, 40, 40)


def _check(images: np.ndarray, columns: int) -> np.ndarray:
    images = np.asarray(images)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3) or not len(images):
        raise ValueError(f"expected uint8 images (N, H, W, 1 or 3) with N > 0, got {images.dtype} {images.shape}")
    if columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns}")
    return np.repeat(images, 3, axis=-1) if images.shape[-1] == 1 else images


def _label_layout(labels: Optional[Sequence[str]], n: int, rows: int, font) -> tuple[int, int]:
    """(left margin for a label per row, strip above each image for a label per image), in pixels."""
    if labels is None:
        return 0, 0
    if len(labels) == rows:
        return max(math.ceil(font.getlength(str(label))) for label in labels) + 8, 0
    if len(labels) == n:
        return 0, 14
    raise ValueError(f"labels must be one per row ({rows}) or one per image ({n}), got {len(labels)}")


def image_grid(
    images: np.ndarray, columns: int, labels: Optional[Sequence[str]] = None, scale: Optional[int] = None
) -> np.ndarray:
    """Lays images out row by row on white.

    Args:
        images: (N, H, W, 1 or 3) uint8.
        columns: images a row.
        labels: one per row (written at its left) or one per image (written above it).
        scale: whole factor of nearest-neighbour enlargement; None enlarges images under 48 pixels.

    Returns:
        (rows * height, columns * width, 3) uint8, margins included.
    """
    images = _check(images, columns)
    scale = scale or max(1, math.ceil(_READABLE / max(images.shape[1:3])))
    images = images.repeat(scale, axis=1).repeat(scale, axis=2)
    n, height, width, _ = images.shape
    rows, font = math.ceil(n / columns), ImageFont.load_default()
    left, strip = _label_layout(labels, n, rows, font)
    cell_h, cell_w = height + strip + _GAP, width + _GAP
    canvas = np.full((rows * cell_h + _GAP, left + columns * cell_w + _GAP, 3), 255, dtype=np.uint8)
    for i, image in enumerate(images):
        y, x = (i // columns) * cell_h + _GAP + strip, left + (i % columns) * cell_w + _GAP
        canvas[y : y + height, x : x + width] = image
    if labels is not None:
        sheet = Image.fromarray(canvas)
        draw = ImageDraw.Draw(sheet)
        for i, label in enumerate(labels):
            if strip:
                place, anchor = (left + (i % columns) * cell_w + _GAP, (i // columns) * cell_h + _GAP), "la"
            else:
                place, anchor = (left - 4, i * cell_h + _GAP + height // 2), "rm"
            draw.text(place, str(label), fill=_INK, font=font, anchor=anchor)
        canvas = np.asarray(sheet)
    return canvas


def save_png(path: str | Path, image: np.ndarray) -> None:
    """Writes a (H, W, 3) uint8 image, making the folder; a reader never sees half a file."""
    with written_aside(path) as aside:
        Image.fromarray(image).save(aside, format="PNG")
