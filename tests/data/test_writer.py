"""Shards as written: their bytes, their statistics, and the digits data set."""

import errno
import hashlib
import os
import tarfile

import numpy as np
import pytest
import torch
import webdataset

from vr_online.data import writer as writer_module
from vr_online.data.codecs import PixelCodec, codec_for
from vr_online.data.digits import load_splits, write_digits
from vr_online.data.format import DatasetInfo, FormatError, crc_tag
from vr_online.data.show import read_dataset
from vr_online.data.writer import ShardStats, ShardWriter, describe
from vr_online.errors import UserError

SHAPE = (2, 4, 4)


def latents(count, channels=2, seed=0):
    return np.random.default_rng(seed).normal(0.3, 2.0, (count, channels, 4, 4)).astype(np.float32)


def write(path, values, **options):
    with ShardWriter(path, SHAPE, **options) as shard:
        shard.write_batch([f"{i:04d}" for i in range(len(values))], values, [i % 3 for i in range(len(values))])
    return shard.stats


def test_bytes_depend_on_the_samples_alone(tmp_path):
    one = write(tmp_path / "x" / "one.tar", latents(7))
    two = write(tmp_path / "two.tar", latents(7))
    other = write(tmp_path / "other.tar", latents(7, seed=1))
    assert (tmp_path / "x" / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
    assert one.sha256 == two.sha256 == hashlib.sha256((tmp_path / "two.tar").read_bytes()).hexdigest() != other.sha256
    with tarfile.open(tmp_path / "two.tar") as tar:
        assert {(m.mtime, m.uid, m.gid, m.mode) for m in tar} == {(0, 0, 0, 0o644)}


def test_batches_and_single_samples_write_the_same(tmp_path):
    whole = write(tmp_path / "a.tar", latents(5))
    with ShardWriter(tmp_path / "b.tar", SHAPE) as shard:
        for i, latent in enumerate(latents(5)):
            shard.write(f"{i:04d}", latent, i % 3)
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    np.testing.assert_allclose(shard.stats.total, whole.total, rtol=1e-12)


def test_webdataset_reads_what_was_written(tmp_path):
    values = latents(6)
    write(tmp_path / "a.tar", values)
    read = list(webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).decode())
    assert [s["__key__"] for s in read] == [f"{i:04d}" for i in range(6)]
    assert [s["cls"] for s in read] == [i % 3 for i in range(6)]
    assert np.array_equal(np.stack([s["latent.npy"] for s in read]), values.astype(np.float16))


def test_headers_carry_the_checksum_of_their_member(tmp_path):
    write(tmp_path / "a.tar", latents(3))
    with tarfile.open(tmp_path / "a.tar") as tar:
        tags = [(m.gname, crc_tag(tar.extractfile(m).read())) for m in tar]
    assert len(tags) == 6 and all(written == expected for written, expected in tags)


def test_statistics_are_those_of_the_stored_values(tmp_path):
    values = latents(50) + np.array([100.0, 0.0]).reshape(2, 1, 1)
    norm = write(tmp_path / "a.tar", values).norm()
    stored = values.astype(np.float16).astype(np.float64)
    np.testing.assert_allclose(norm.mean, stored.mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(norm.std, stored.std(axis=(0, 2, 3)), rtol=1e-9)


def test_statistics_of_moments_are_those_of_posterior_draws(tmp_path):
    mean, std = latents(400), np.abs(latents(400, seed=1)) * 0.3
    norm = write(tmp_path / "a.tar", np.concatenate([mean, std], axis=1), moments=True).norm()
    draws = mean + std * np.random.default_rng(2).standard_normal((64, *mean.shape))
    np.testing.assert_allclose(norm.mean, draws.mean(axis=(0, 1, 3, 4)), atol=0.01)
    np.testing.assert_allclose(norm.std, draws.std(axis=(0, 1, 3, 4)), rtol=0.01)
    assert norm.std[0] > mean.std(axis=(0, 2, 3))[0] * 1.005


def test_merged_statistics_equal_one_pass(tmp_path):
    values = latents(30)
    whole, first, second = ShardStats(2), ShardStats(2), ShardStats(2)
    for stats, part in ((whole, values), (first, values[:11]), (second, values[11:])):
        stats.add(part, [1] * len(part), moments=False)
    merged = first.merged(second)
    assert merged.count == 30 and merged.labels == {1: 30}
    np.testing.assert_allclose(merged.norm().std, whole.norm().std, rtol=1e-12)
    assert ShardStats(**merged.to_dict()) == merged


def test_a_constant_channel_gets_unit_std():
    stats = ShardStats(2)
    values = latents(9)
    values[:, 1] = 0.7
    stats.add(values, [0] * 9, moments=False)
    assert stats.norm().std[1] == 1.0 and stats.norm().std[0] != 1.0


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("a", np.zeros((2, 4, 5)), "shape"),
        ("a", np.full(SHAPE, np.nan), "not finite"),
        ("a", np.full(SHAPE, 1e6), "not finite in float16"),
        ("first", np.zeros(SHAPE), "'first' stands twice"),
        ("a.b", np.zeros(SHAPE), "without a dot"),
        ("", np.zeros(SHAPE), "without a dot"),
    ],
)
def test_a_bad_sample_is_refused_and_leaves_no_shard(tmp_path, key, value, message):
    with pytest.raises(FormatError, match=message):
        with ShardWriter(tmp_path / "a.tar", SHAPE) as shard:
            shard.write("first", np.zeros(SHAPE), 0)
            shard.write(key, value, 0)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_shard_survives_a_failed_write(tmp_path):
    write(tmp_path / "a.tar", latents(3))
    before = (tmp_path / "a.tar").read_bytes()
    with pytest.raises(RuntimeError):
        with ShardWriter(tmp_path / "a.tar", SHAPE) as shard:
            shard.write("x", np.zeros(SHAPE), 0)
            raise RuntimeError("power cut")
    assert (tmp_path / "a.tar").read_bytes() == before


@pytest.mark.parametrize("room", [0, 700, 3000])
def test_a_full_disk_is_named_and_leaves_no_shard(tmp_path, monkeypatch, room):
    def write_limited(sink, payload):
        if sink.tell() + len(payload) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(sink, payload)

    original = writer_module._HashingFile.write
    monkeypatch.setattr(writer_module._HashingFile, "write", write_limited)
    with pytest.raises(UserError, match="a.tar: cannot write: No space left"):
        write(tmp_path / "a.tar", latents(9))
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        with ShardWriter(tmp_path / "file" / "a.tar", SHAPE):
            pass


def test_a_label_without_a_name_is_refused(tmp_path):
    stats = write(tmp_path / "a.tar", latents(3))
    with pytest.raises(FormatError, match="label 2 is out of range: there are 2 class names"):
        describe({"a.tar": stats}, latent_shape=SHAPE, moments=False, class_names=["x", "y"], codec="pixel", codec_hash="")


def test_digits_come_back_exactly(digits):
    for split, (images, labels) in load_splits().items():
        info = DatasetInfo.load(digits / split)
        samples = list(read_dataset(digits / split, info))
        assert [s.label for s in samples] == labels.tolist() and info.num_classes == 10
        decoded = codec_for(info).decode(torch.from_numpy(np.stack([s.latent for s in samples])))
        assert np.array_equal(np.rint(decoded.numpy() * 16), np.rint(images / 255 * 16))


def test_digit_splits_are_disjoint_stratified_and_share_their_norm(digits):
    train, heldout = (DatasetInfo.load(digits / split) for split in ("train", "heldout"))
    assert (train.samples, heldout.samples) == (1500, 297) and len(train.shards) == 8
    assert train.norm == heldout.norm
    shares = np.array(train.class_counts) / 1500 - np.array(heldout.class_counts) / 297
    assert np.abs(shares).max() < 0.01
    x_1 = train.norm.normalize(PixelCodec().encode(torch.from_numpy(load_splits()["train"][0])))
    assert abs(x_1.mean()) < 1e-3 and abs(x_1.std() - 1) < 1e-3


def test_digits_are_written_the_same_every_time(digits, tmp_path):
    write_digits(tmp_path)
    files = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    assert len(files) == 18
    assert all((tmp_path / f).read_bytes() == (digits / f).read_bytes() for f in files)


@pytest.mark.parametrize("shards", [0, 298])
def test_an_impossible_number_of_digit_shards_is_refused(tmp_path, shards):
    with pytest.raises(UserError, match="--shards"):
        write_digits(tmp_path, shards)
