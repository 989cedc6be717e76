import numpy as np
import pytest
from PIL import Image

from vr_online.monitor import image_grid, save_png


def ramp(n, h=8, w=8, c=1):
    return (np.arange(n * h * w * c) % 200).reshape(n, h, w, c).astype(np.uint8)


def test_every_image_stands_where_its_index_says_enlarged_but_unchanged():
    images = ramp(7, 5, 6, 3)
    grid = image_grid(images, columns=3, scale=2)
    assert grid.dtype == np.uint8 and grid.shape == (3 * 12 + 2, 3 * 14 + 2, 3)
    for i in range(7):
        y, x = (i // 3) * 12 + 2, (i % 3) * 14 + 2
        assert np.array_equal(grid[y : y + 10 : 2, x : x + 12 : 2], images[i])
        assert np.array_equal(grid[y + 1 : y + 10 : 2, x + 1 : x + 12 : 2], images[i])


def test_tiny_images_become_readable_and_large_ones_stay():
    assert image_grid(ramp(1, 8, 8), 1).shape[0] >= 48
    assert image_grid(ramp(1, 64, 64), 1).shape[0] == 64 + 4


def test_one_channel_is_grey():
    grid = image_grid(ramp(2), 2)
    assert np.array_equal(grid[..., 0], grid[..., 1]) and np.array_equal(grid[..., 0], grid[..., 2])


@pytest.mark.parametrize("count", [2, 6])
def test_labels_leave_the_images_whole(count):
    images = np.zeros((6, 16, 16, 1), dtype=np.uint8)
    bare = image_grid(images, 3)
    labelled = image_grid(images, 3, labels=[f"class {i}" for i in range(count)])
    assert labelled.size > bare.size
    assert (labelled == 0).all(axis=-1).sum() == (bare == 0).all(axis=-1).sum()
    assert ((labelled > 0) & (labelled < 255)).any()  # the text


@pytest.mark.parametrize("bad", [np.zeros((2, 8, 8, 1)), np.zeros((8, 8, 3), np.uint8), np.zeros((0, 8, 8, 3), np.uint8)])
def test_other_arrays_are_refused(bad):
    with pytest.raises(ValueError, match="expected uint8 images"):
        image_grid(bad, 2)


def test_labels_of_another_number_are_refused():
    with pytest.raises(ValueError, match=r"one per row \(2\) or one per image \(6\), got 4"):
        image_grid(ramp(6), 3, labels=list("abcd"))


def test_saved_png_reads_back(tmp_path):
    grid = image_grid(ramp(4), 2)
    save_png(tmp_path / "deep" / "grid.png", grid)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "deep" / "grid.png")), grid)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["grid.png"]
