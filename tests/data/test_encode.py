"""Encoding: the same bytes however it ran, and clear refusals."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vr_online.data import encode as encode_module
from vr_online.data.codecs import Codec, Posterior
from vr_online.data.encode import EncodeOptions, encode, parse_norm
from vr_online.data.format import DatasetInfo
from vr_online.data.images import load_image, open_index
from vr_online.data.show import read_dataset
from vr_online.data.tae import build_decoder, build_encoder
from vr_online.data.verify import verify
from vr_online.errors import UserError

PIXELS = EncodeOptions(codec="pixel", size=8, flip="both", shard_size=5, batch_size=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """23 images of 10 x 9 in 3 classes."""
    root = tmp_path_factory.mktemp("images")
    for number in range(23):
        pixels = np.random.default_rng(number).integers(0, 256, (9, 10, 3), dtype=np.uint8)
        (root / f"class{number % 3}").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(root / f"class{number % 3}" / f"{number:02d}.png")
    return root


def run(folder, out, options=PIXELS, **how):
    return encode(open_index(str(folder)), out, options, source="here", progress=False, **{"workers": 1, **how})


def files(out: Path) -> dict[str, str]:
    return {p.relative_to(out).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in out.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> EncodeOptions:
    """Encoding through a network, whose floating-point results depend on batches and threads."""
    weights = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    torch.save(build_encoder(4, False).state_dict(), weights / "encoder.pth")
    torch.save(build_decoder(4, False).state_dict(), weights / "decoder.pth")
    return EncodeOptions(codec=f"tae:{weights}", size=16, flip="both", shard_size=5, batch_size=2)


@pytest.fixture(scope="module")
def reference(folder, network, tmp_path_factory):
    """The files of an uninterrupted encode by one process."""
    out = tmp_path_factory.mktemp("reference") / "out"
    run(folder, out, network)
    return files(out)


def test_samples_are_the_images_and_their_mirrors(folder, tmp_path):
    result = run(folder, tmp_path / "out")
    expected = {}
    for item in open_index(str(folder)).items:
        image = load_image(item, 8)
        expected[image.tobytes()] = expected[np.ascontiguousarray(image[..., ::-1]).tobytes()] = item.label
    samples = list(read_dataset(tmp_path / "out", result.info))
    got = {np.rint((s.latent.astype(np.float32) + 1) * 127.5).astype(np.uint8).tobytes(): s.label for s in samples}
    assert got == expected and len(samples) == 46 == result.info.samples and result.images == 23
    assert list(result.info.shards.values()) == [10, 10, 10, 10, 6]
    assert result.info.class_names == ["class0", "class1", "class2"] and result.info.class_counts == [16, 16, 14]
    assert verify(tmp_path / "out", progress=False) == []


def test_shards_mix_the_classes(folder, tmp_path):
    info = run(folder, tmp_path / "out", EncodeOptions(codec="pixel", size=8, shard_size=12)).info
    labels = [s.label for s in read_dataset(tmp_path / "out", info)]
    assert set(labels[:12]) == set(labels[12:]) == {0, 1, 2}


def test_the_norm_is_measured_over_what_is_stored(folder, tmp_path):
    info = run(folder, tmp_path / "out").info
    latents = torch.from_numpy(np.stack([s.latent for s in read_dataset(tmp_path / "out", info)]))
    x_1 = info.norm.normalize(latents)
    torch.testing.assert_close(x_1.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(x_1.std(dim=(0, 2, 3), correction=0), torch.ones(3), atol=1e-4, rtol=0)


def test_several_processes_write_the_same_bytes(folder, network, reference, tmp_path):
    run(folder, tmp_path / "out", network, workers=2)
    assert files(tmp_path / "out") == reference


def test_several_ranks_write_the_same_bytes(folder, network, reference, tmp_path):
    first = run(folder, tmp_path / "out", network, rank=1, world_size=2)
    assert first.info is None and not (tmp_path / "out" / "dataset.json").exists()
    assert run(folder, tmp_path / "out", network, rank=0, world_size=2).info is not None
    assert files(tmp_path / "out") == reference


@pytest.mark.parametrize("survive", [0, 1, 3])
def test_an_interrupted_encode_continues_to_the_same_bytes(folder, network, reference, tmp_path, monkeypatch, survive):
    original, calls = encode_module.ShardWriter.write_batch, []

    def break_off(writer, *args):
        calls.append(writer)
        if len({w.path for w in calls}) > survive and len(calls) % 6 == 5:  # in the middle of a shard
            raise KeyboardInterrupt
        return original(writer, *args)

    monkeypatch.setattr(encode_module.ShardWriter, "write_batch", break_off)
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "out", network)
    assert not (tmp_path / "out" / "dataset.json").exists()
    monkeypatch.setattr(encode_module.ShardWriter, "write_batch", original)
    result = run(folder, tmp_path / "out", network)
    assert (result.images < 23) == (survive > 0)
    assert files(tmp_path / "out") == reference


def children_of(pid: int) -> list[str]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return path.read_text().split() if path.exists() else []


def wait_until_gone(pids: list[str], seconds: float = 60) -> None:
    """Workers end when their parent is killed."""

    def runs(pid: str) -> bool:
        try:
            return "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < deadline, f"processes {alive} outlive the one that started them"
        time.sleep(0.05)


def test_killed_processes_leave_an_encode_that_continues(folder, tmp_path):
    root = tmp_path / "many"
    for number in range(300):
        (root / f"c{number % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 40, 3), number % 256, np.uint8)).save(root / f"c{number % 2}" / f"{number}.png")
    command = [sys.executable, "-m", "vr_online.cli", "shards", "encode", str(root)]
    options = ["--codec", "pixel", "--size", "32", "--shard-size", "2", "--workers", "2", "--device", "cpu"]
    job = subprocess.Popen([*command, str(tmp_path / "out"), *options], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while job.poll() is None and not list((tmp_path / "out" / ".encode").glob("shard-*.json")):
        time.sleep(0.005)
    children = children_of(job.pid)
    job.send_signal(signal.SIGKILL)
    job.wait()
    wait_until_gone(children)
    assert not (tmp_path / "out" / "dataset.json").exists(), "the encode was over before it could be killed"
    (tmp_path / "out" / ".shard-00149.tar.1.part").write_bytes(b"left over")
    settings = EncodeOptions(codec="pixel", size=32, shard_size=2)
    resumed = run(root, tmp_path / "out", settings)
    assert resumed.images < 300
    run(root, tmp_path / "whole", settings)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_complete_encode_is_left_alone(folder, network, reference, tmp_path):
    run(folder, tmp_path / "out", network)
    again = run(folder, tmp_path / "out", network)
    assert again.images == 0 and again.info.samples == 46 and files(tmp_path / "out") == reference


@pytest.mark.parametrize("finished", [True, False])
def test_other_options_do_not_mix_with_an_existing_data_set(folder, tmp_path, finished):
    if finished:
        run(folder, tmp_path / "out")
    else:
        run(folder, tmp_path / "out", rank=0, world_size=2)
    with pytest.raises(UserError, match="other options" if finished else "flip was 'both', now 'none'"):
        run(folder, tmp_path / "out", EncodeOptions(codec="pixel", size=8, shard_size=5, batch_size=2))


def test_foreign_tars_are_not_overwritten(folder, tmp_path):
    (tmp_path / "shard-00000.tar").write_bytes(b"precious")
    with pytest.raises(UserError, match="choose an empty folder"):
        run(folder, tmp_path)
    assert (tmp_path / "shard-00000.tar").read_bytes() == b"precious"


@pytest.fixture
def corrupt(folder, tmp_path) -> Path:
    import shutil

    root = tmp_path / "corrupt"
    shutil.copytree(folder, root)
    path = root / "class1" / "04.png"
    path.write_bytes(path.read_bytes()[:60])
    return root


@pytest.mark.parametrize("workers", [1, 2])
def test_a_corrupt_image_stops_the_work_by_name(corrupt, tmp_path, workers):
    with pytest.raises(UserError, match="class1/04.png: not a readable image"):
        run(corrupt, tmp_path / "out", workers=workers)
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_a_corrupt_image_is_skipped_and_counted_on_request(corrupt, tmp_path):
    options = EncodeOptions(codec="pixel", size=8, shard_size=5, batch_size=2, on_error="skip")
    result = run(corrupt, tmp_path / "out", options)
    assert result.info.samples == 22 and result.skipped == ["class1/04.png"] and result.info.preprocessing["skipped"] == 1
    assert verify(tmp_path / "out", progress=False) == []


class Noisy(Codec):
    """A codec with a posterior: mean is the red channel, std its green one."""

    id, hash, stochastic = "noisy", "1", True

    def encode(self, images):
        return self.posterior(images).mean

    def posterior(self, images):
        scaled = images.float() / 255
        return Posterior(scaled[:, :1], 0.1 + scaled[:, 1:2])

    def decode(self, latents):
        return latents


@pytest.fixture
def noisy(monkeypatch):
    monkeypatch.setattr(encode_module, "get_codec", lambda spec, device="cpu": Noisy())


def stored(folder, out, **options):
    info = run(folder, out, EncodeOptions(codec="noisy", size=8, **options)).info
    return info, {s.key: s.latent.astype(np.float32) for s in read_dataset(out, info)}


def test_moments_hold_mean_and_std(folder, tmp_path, noisy):
    info, moments = stored(folder, tmp_path / "moments", posterior="moments")
    _, means = stored(folder, tmp_path / "mean", posterior="mean")
    assert info.moments and info.latent_shape == (1, 8, 8) and info.stored_shape == (2, 8, 8) and len(moments) == 23
    assert all(np.array_equal(moments[k][:1], means[k]) and (moments[k][1:] > 0).all() for k in means)


def test_posterior_samples_are_keyed_by_seed_and_image_alone(folder, tmp_path, noisy):
    _, moments = stored(folder, tmp_path / "moments", posterior="moments")
    _, samples = stored(folder, tmp_path / "a", batch_size=3, shard_size=7)
    _, again = stored(folder, tmp_path / "b", batch_size=64, shard_size=2)
    assert samples.keys() == again.keys() and all(np.array_equal(samples[k], again[k]) for k in samples)
    noise = np.stack([(samples[k] - moments[k][:1]) / moments[k][1:] for k in samples])
    assert abs(noise.mean()) < 0.1 and abs(noise.std() - 1) < 0.1
    assert abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 0.5
    _, other = stored(folder, tmp_path / "c", shuffle=False)
    _, reseeded = stored(folder, tmp_path / "d", shuffle=False, seed=1)
    assert not any(np.array_equal(other[k], reseeded[k]) for k in other)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(posterior="moments"), "--moments: the codec pixel is deterministic"),
        (dict(flip="sideways"), "--flip sideways"),
        (dict(batch_size=0), "--batch-size 0"),
        (dict(precision="fp8"), "--precision fp8"),
        (dict(seed=-1), "--seed -1"),
        (dict(norm="scale:0"), "--norm scale:0"),
        (dict(norm="scale:x"), "--norm scale:x"),
        (dict(norm="wrong"), "expected measured"),
        (dict(norm="from:/nowhere"), "/nowhere"),
        (dict(codec="tae:/nowhere"), "/nowhere"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(folder, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        run(folder, tmp_path / "out", EncodeOptions(**{"codec": "pixel", "size": 8, **options}))
    assert not (tmp_path / "out").exists()


def test_size_must_fit_the_codec(folder, tmp_path):
    torch.save(build_encoder(4, False).state_dict(), tmp_path / "encoder.pth")
    torch.save(build_decoder(4, False).state_dict(), tmp_path / "decoder.pth")
    with pytest.raises(UserError, match="--size 30.*multiple of 8, such as 32"):
        run(folder, tmp_path / "out", EncodeOptions(codec=f"tae:{tmp_path}", size=30))
    info = run(folder, tmp_path / "out", EncodeOptions(codec=f"tae:{tmp_path}", size=16)).info
    assert info.latent_shape == (4, 2, 2) and info.codec_path == str(tmp_path)


def test_norm_may_be_a_scale_or_another_data_sets(folder, tmp_path):
    info = run(folder, tmp_path / "a", EncodeOptions(codec="pixel", size=8, norm="scale:0.5")).info
    assert info.norm.mean == (0, 0, 0) and info.norm.std == (2, 2, 2)
    assert parse_norm(f"from:{tmp_path / 'a'}", 3) == info.norm
    with pytest.raises(UserError, match="3 channels, these latents have 4"):
        parse_norm(f"from:{tmp_path / 'a'}", 4)


def test_limit_takes_a_part_of_every_class(folder, tmp_path):
    info = run(folder, tmp_path / "out", EncodeOptions(codec="pixel", size=8, limit=12)).info
    assert info.samples == 12 and min(info.class_counts) >= 1


def test_default_shards_suffice_for_several_readers(folder, tmp_path):
    info = run(folder, tmp_path / "out", EncodeOptions(codec="pixel", size=8)).info
    assert len(info.shards) >= 8
    assert not list((tmp_path / "out").glob(".*")) and set(files(tmp_path / "out")) == {*info.shards, "dataset.json"}
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["source"] == "here"
    assert DatasetInfo.load(tmp_path / "out") == info and os.path.isdir(tmp_path / "out")
