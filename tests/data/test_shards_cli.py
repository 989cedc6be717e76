"""`vr-online shards` as a person uses it: what it prints, and its exit status."""

import numpy as np
import pytest
from PIL import Image

from vr_online.cli import main
from vr_online.data.format import DatasetInfo


@pytest.fixture
def images(tmp_path):
    for number in range(12):
        folder = tmp_path / "images" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 20 * number, np.uint8)).save(folder / f"{number}.png")
    return tmp_path / "images"


def shards(*words) -> int:
    return main(["shards", *map(str, words)])


def encode(images, out, *more) -> int:
    return shards("encode", images, out, "--codec", "pixel", "--size", 8, "--workers", 1, "--device", "cpu", *more)


def test_the_help_of_every_action_teaches(capsys):
    for words in (["--help"], ["encode", "--help"], ["decode", "--help"], ["info", "--help"], ["verify", "--help"], ["digits", "--help"]):
        with pytest.raises(SystemExit) as stop:
            shards(*words)
        assert stop.value.code == 0 and len(capsys.readouterr().out) > 150
    with pytest.raises(SystemExit):
        shards("--help")
    assert "vr-online shards encode imagenet/train" in capsys.readouterr().out


def test_digits_from_the_command_line(tmp_path, capsys):
    assert shards("digits", "--out", tmp_path, "--shards", 3) == 0
    assert "1500 samples in 3 shards" in capsys.readouterr().out
    assert DatasetInfo.load(tmp_path / "heldout").samples == 297


def test_encode_info_decode_verify(images, tmp_path, capsys):
    out = tmp_path / "out"
    assert encode(images, out, "--flip", "both", "--shard-size", 4) == 0
    printed = capsys.readouterr()
    assert "24 samples in 3 shards, 0 images skipped" in printed.out and "images/s" in printed.out
    assert "12 images in 2 classes" in printed.err and "encoding" in printed.err
    assert encode(images, out, "--flip", "both", "--shard-size", 4) == 0
    assert "already complete" in capsys.readouterr().out

    assert shards("info", out) == 0
    text = capsys.readouterr().out
    for part in ("24 in 3 shards", "3 x 8 x 8 float16", "pixel", "cat", "dog", "flip both", "12 #"):
        assert part in text

    assert shards("decode", out, tmp_path / "grid.png", "--n", 6, "--columns", 3) == 0
    assert Image.open(tmp_path / "grid.png").size == (3 * 9 + 1, 2 * 9 + 1)

    assert shards("verify", out) == 0
    assert "sound" in capsys.readouterr().out


def test_unshuffled_classes_are_pointed_out(images, tmp_path, capsys):
    encode(images, tmp_path / "a")
    assert "sorted by class" not in capsys.readouterr().err
    encode(images, tmp_path / "b", "--no-shuffle")
    assert "sorted by class" in capsys.readouterr().err
    assert DatasetInfo.load(tmp_path / "b").preprocessing["shuffle"] is False


def test_decode_shows_one_class_a_row(images, tmp_path):
    assert encode(images, tmp_path / "out") == 0
    assert shards("decode", tmp_path / "out", tmp_path / "grid.png", "--by-class", "--n", 8, "--columns", 4) == 0
    grid = np.asarray(Image.open(tmp_path / "grid.png").convert("L")).astype(int)
    shown = [[grid[4 + 9 * row, 4 + 9 * column] for column in range(4)] for row in range(2)]
    assert all(v % 40 == 0 for v in shown[0]) and all(v % 40 == 20 for v in shown[1])  # cats are the even numbers


def test_verify_prints_one_line_a_fault_and_fails(images, tmp_path, capsys):
    encode(images, tmp_path / "out", "--shard-size", 4)
    (tmp_path / "out" / "shard-00000.tar").write_bytes(b"x")
    (tmp_path / "out" / "shard-00001.tar").unlink()
    capsys.readouterr()
    assert shards("verify", tmp_path / "out") == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "2 faults" in lines[2]
    assert "shard-00001.tar: missing" in lines[0] and "shard-00000.tar: truncated" in lines[1]


@pytest.mark.parametrize(
    "words, message",
    [
        (["info", "nowhere"], "nowhere"),
        (["verify", "nowhere"], "nowhere"),
        (["verify", "http://localhost/x"], "copy the shards here"),
        (["decode", "nowhere", "x.png"], "nowhere"),
        (["encode", "nowhere", "out", "--codec", "pixel", "--size", "8"], "nowhere: no such file"),
        (["digits", "--out", "x", "--shards", "0"], "--shards 0"),
    ],
)
def test_mistakes_end_in_one_line_and_status_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shards(*words) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error and "Traceback" not in error


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "cuda:x"])
def test_an_unknown_device_is_refused(images, tmp_path, capsys, device):
    assert encode(images, tmp_path / "out", "--device", device) == 2
    assert device in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_deterministic_codec_has_no_moments(images, tmp_path, capsys):
    assert encode(images, tmp_path / "out", "--moments") == 2
    assert "--moments" in capsys.readouterr().err
