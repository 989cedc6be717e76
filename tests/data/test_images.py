"""Where images come from, and how they are cropped."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vr_online.data.images import center_crop, load_image, open_index
from vr_online.errors import UserError


def picture(seed, width=12, height=10) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(seed) -> bytes:
    buffer = io.BytesIO()
    picture(seed).save(buffer, "PNG")
    return buffer.getvalue()


def add(tar: tarfile.TarFile, name: str, payload: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(payload)
    tar.addfile(info, io.BytesIO(payload))


NAMES = [("cat", "0001.png"), ("cat", "0002.PNG"), ("dog", "0003.png")]


@pytest.fixture
def folder(tmp_path) -> Path:
    for number, (label, name) in enumerate(NAMES):
        (tmp_path / "images" / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / label / name).write_bytes(png(number))
    (tmp_path / "images" / "cat" / "notes.txt").write_text("not an image")
    return tmp_path / "images"


def content(index):
    """What an index delivers, as {(label name, image bytes)}."""
    return {(index.class_names[i.label], load_image(i, 8).tobytes()) for i in index.items}


def test_every_kind_of_source_delivers_the_same(folder, tmp_path):
    expected = content(open_index(str(folder)))
    assert len(expected) == 3 and {name for name, _ in expected} == {"cat", "dog"}

    with tarfile.open(tmp_path / "classes.tar", "w") as tar:
        for number, (label, name) in enumerate(NAMES):
            add(tar, f"./train/{label}/{name}", png(number))
    assert content(open_index(str(tmp_path / "classes.tar"))) == expected

    (tmp_path / "packed.tar.gz").write_bytes(gzip.compress((tmp_path / "classes.tar").read_bytes()))
    packed = open_index(str(tmp_path / "packed.tar.gz"), scratch=tmp_path / "scratch")
    assert content(packed) == expected and not list((tmp_path / "scratch").glob("*.part"))

    (tmp_path / "keyed").mkdir()
    for number, (label, name) in enumerate(NAMES):
        with tarfile.open(tmp_path / "keyed" / f"{number}.tar", "w") as tar:
            add(tar, f"{number}.png", png(number))
            add(tar, f"{number}.cls", b"0" if label == "cat" else b"1\n")
    (tmp_path / "keyed" / "classes.json").write_text('["cat", "dog"]')
    assert content(open_index(str(tmp_path / "keyed"))) == content(open_index(str(tmp_path / "keyed" / "*.tar"))) == expected


def test_parquet_in_the_hugging_face_layout(folder, tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow (extra parquet) is not installed")
    import pyarrow.parquet as parquet

    labels = {"cat": 0, "dog": 1}
    features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    table = arrow.table(
        {"image": [{"bytes": png(n), "path": name} for n, (_, name) in enumerate(NAMES)], "label": [labels[l] for l, _ in NAMES]}
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(table, tmp_path / "train-00000.parquet", row_group_size=2)
    index = open_index(str(tmp_path / "train-00000.parquet"))
    assert content(index) == content(open_index(str(folder))) and not index.seekable
    (tmp_path / "train-00000.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(UserError, match="train-00000.parquet"):
        open_index(str(tmp_path / "train-00000.parquet"))


@pytest.mark.parametrize(
    "name, text",
    [
        ("l.csv", "file,label\ncat/0001.png,b\ncat/0002.PNG,a\ndog/0003.png,b\n"),
        ("l.csv", "cat/0001.png,1\ncat/0002.PNG,0\ndog/0003.png,1\n"),
        ("l.json", '{"cat/0001.png": "b", "cat/0002.PNG": "a", "dog/0003.png": "b"}'),
        ("l.json", '{"labels": [["cat/0001.png", 1], ["cat/0002.PNG", 0], ["dog/0003.png", 1]]}'),
    ],
)
def test_a_labels_file_replaces_class_folders(folder, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    index = open_index(str(folder), labels=str(tmp_path / name))
    assert [i.label for i in index.items] == [1, 0, 1] and len(index.class_names) == 2


def test_include_selects_a_split(tmp_path):
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        for number, split in enumerate(["train", "train", "test"]):
            add(tar, f"{split}/cat/{number}.png", png(number))
    assert len(open_index(str(tmp_path / "all.tar"), include="train/*").items) == 2
    with pytest.raises(UserError, match="no images match 'val/"):
        open_index(str(tmp_path / "all.tar"), include="val/*")


def test_class_names_may_be_given(folder, tmp_path):
    (tmp_path / "names.txt").write_text("Katze\nHund\n")
    assert open_index(str(folder), class_names=str(tmp_path / "names.txt")).class_names == ["Katze", "Hund"]
    (tmp_path / "names.txt").write_text("Katze\n")
    with pytest.raises(UserError, match="class 'cat' is not among the 1 class names"):
        open_index(str(folder), class_names=str(tmp_path / "names.txt"))


def test_given_class_names_fix_the_order_of_the_labels(folder, tmp_path):
    (tmp_path / "names.json").write_text('["dog", "bird", "cat"]')
    index = open_index(str(folder), class_names=str(tmp_path / "names.json"))
    assert [i.label for i in index.items] == [2, 2, 0] and index.class_names == ["dog", "bird", "cat"]


def test_one_tar_per_class_without_folders_inside(tmp_path):
    for wnid, count in (("n02", 2), ("n01", 1)):
        with tarfile.open(tmp_path / f"{wnid}.tar", "w") as tar:
            for number in range(count):
                add(tar, f"{wnid}_{number}.JPEG", png(number))
    index = open_index(str(tmp_path))
    assert index.class_names == ["n01", "n02"] and [i.label for i in index.items] == [0, 1, 1]


def test_an_integer_label_beyond_the_class_names_is_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "1.png", png(0))
        add(tar, "1.cls", b"7")
    (tmp_path / "classes.json").write_text('["cat", "dog"]')
    with pytest.raises(UserError, match="a.tar:1.png: label 7 is out of range.*2 classes"):
        open_index(str(tmp_path / "a.tar"))


def test_unusable_sources_are_named(folder, tmp_path):
    with pytest.raises(UserError, match="nowhere: no such file"):
        open_index(str(tmp_path / "nowhere"))
    (tmp_path / "a.zip").write_bytes(b"")
    with pytest.raises(UserError, match="a.zip: expected a folder"):
        open_index(str(tmp_path / "a.zip"))
    (folder / "loose.png").write_bytes(png(0))
    with pytest.raises(UserError, match="loose.png lies in no class folder"):
        open_index(str(folder))
    (tmp_path / "l.csv").write_text("cat/0001.png,1\n")
    with pytest.raises(UserError, match="l.csv: has no label for cat/0002.PNG"):
        open_index(str(folder), labels=str(tmp_path / "l.csv"))


def test_a_truncated_tar_of_images_is_named(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "cat/1.png", png(0) + bytes(20000))
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[:3000])
    with pytest.raises(UserError, match="a.tar: not a readable tar"):
        open_index(str(tmp_path / "a.tar"))
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(UserError, match="b.tar.gz: cannot unpack"):
        open_index(str(tmp_path / "b.tar.gz"), scratch=tmp_path / "scratch")
    assert not list((tmp_path / "scratch").iterdir())


def test_a_keyed_image_without_a_label_is_named(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "1.png", png(0))
        add(tar, "2.png", png(0))
        add(tar, "1.cls", b"0")
    with pytest.raises(UserError, match="2.png has no label: expected the member 2.cls"):
        open_index(str(tmp_path / "a.tar"))


@pytest.mark.parametrize("width, height", [(8, 8), (8, 20), (33, 16), (100, 75), (5, 6), (17, 16)])
def test_crop_is_square_and_leaves_a_fitting_image_alone(width, height):
    image = picture(0, width, height)
    assert center_crop(image, 8).size == (8, 8)
    if (width, height) == (8, 20):
        assert np.array_equal(np.asarray(center_crop(image, 8)), np.asarray(image)[6:14])


def test_crop_averages_as_boxes_before_the_last_resize():
    image = picture(0, 32, 32)
    boxes = np.asarray(image, float).reshape(8, 4, 8, 4, 3).mean(axis=(1, 3))
    assert np.abs(np.asarray(center_crop(image, 8), float) - boxes).max() <= 2  # PIL rounds after each of the four passes


def test_grey_and_transparent_images_become_rgb(folder):
    path = folder / "cat" / "0001.png"
    picture(0).convert("L").save(path)
    item = open_index(str(folder)).items[0]
    grey = load_image(item, 8)
    assert grey.shape == (3, 8, 8) and np.array_equal(grey[0], grey[2])
    picture(0).convert("RGBA").save(path)
    assert load_image(item, 8).shape == (3, 8, 8)
