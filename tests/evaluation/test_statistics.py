import gzip
import io
import json
import lzma
import os
import tarfile
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.shards_on_disk import write_shards
from tests.evaluation.fakes import Identity
from tests.evaluation.networks import pictures, write_pngs
from vr_online.errors import UserError
from vr_online.evaluation.features import build_extractor
from vr_online.evaluation.sources import ImageSource, centre_crop, open_source
from vr_online.evaluation.statistics import Statistics, check_reference, compute_statistics, load_reference, metric_name


class Colours(Identity):
    """Mean colour of each quarter: works on images of any size."""

    name, metric, space, preprocessing, hash = "colours", "fd_colours", "image", {"resize": "none"}, "h1"

    def __call__(self, samples):
        return torch.nn.functional.adaptive_avg_pool2d(samples.float(), 2).flatten(1)


def stats(source, **kwargs):
    return compute_statistics(source, Colours(), progress=False, **kwargs)


@pytest.fixture
def folder(tmp_path):
    return write_pngs(tmp_path / "images", pictures(21, 16, 0))


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, payload in members:
            member = tarfile.TarInfo(name)
            member.size = len(payload)
            tar.addfile(member, io.BytesIO(payload))
    return path


def test_statistics_of_a_folder_equal_numpy(folder):
    found = stats(open_source(str(folder)), batch_size=4, keep_features=True)
    features = Colours()(torch.from_numpy(pictures(21, 16, 0))).double().numpy()
    np.testing.assert_allclose(found.moments.mean, features.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.moments.cov, np.cov(features, rowvar=False), rtol=1e-9)
    np.testing.assert_allclose(found.features, features, rtol=1e-6)
    assert found.moments.n == 21


def test_a_tar_gives_the_same_as_the_folder(folder, tmp_path):
    files = sorted(folder.iterdir())
    write_tar(tmp_path / "b-0.tar", [(f"x/{p.name}", p.read_bytes()) for p in files[:10]] + [("x/0.cls", b"1")])
    write_tar(tmp_path / "b-1.tar", [(f"x/{p.name}", p.read_bytes()) for p in files[10:]])
    assert stats(open_source(str(tmp_path / "b-*.tar"))).hash == stats(open_source(str(folder))).hash


def test_every_spelling_of_an_image_suffix_counts_and_other_files_do_not(folder):
    for path in list(folder.iterdir())[:4]:
        os.rename(path, path.with_suffix(".PNG"))
    Image.new("L", (16, 16)).save(folder / "grey.JPEG")
    (folder / "notes.txt").write_text("no image")
    assert open_source(str(folder)).count == 22
    assert stats(open_source(str(folder))).moments.n == 22


def test_images_of_different_sizes_are_all_counted_once(folder):
    for i, image in enumerate(pictures(5, 24, 1)):
        Image.fromarray(image.transpose(1, 2, 0)).save(folder / f"{i:05d}b.png")
    assert stats(open_source(str(folder)), batch_size=8).moments.n == 26


def test_centre_crop_is_square_and_centred():
    image = Image.new("RGB", (90, 40))
    image.paste((255, 0, 0), (25, 0, 65, 40))
    cropped = np.asarray(centre_crop(image, 10))
    assert cropped.shape == (10, 10, 3)
    assert cropped[:, 2:-2, 0].min() > 250
    assert centre_crop(Image.new("RGB", (7, 9)), 16).size == (16, 16)


def test_crop_and_extractor_are_recorded_and_hashed(folder, tmp_path):
    cropped, whole = stats(open_source(str(folder), 8)), stats(open_source(str(folder)))
    assert cropped.meta["samples"] == {"crop": "adm", "size": 8}
    assert cropped.meta["preprocessing_hash"] != whole.meta["preprocessing_hash"]
    cropped.save(tmp_path / "x.npz")
    again = Statistics.load(tmp_path / "x.npz")
    assert again.meta == cropped.meta and again.hash == cropped.hash and again.protocol == "vr_online"
    check_reference(again, Colours(), 12)


def test_statistics_of_another_extractor_are_refused(folder, tmp_path):
    stats(open_source(str(folder))).save(tmp_path / "x.npz")
    found = Statistics.load(tmp_path / "x.npz")
    other = Colours()
    other.hash = "h2"
    with pytest.raises(UserError, match="hash 'h1' in the file, 'h2' now"):
        check_reference(found, other, 12)
    with pytest.raises(UserError, match="12 features, but colours gives 13"):
        check_reference(found, Colours(), 13)


def test_clean_fid_and_adm_files_are_read_as_they_are(tmp_path):
    mu, sigma = np.ones(4), np.eye(4)
    np.savez(tmp_path / "cifar10_clean_train_32.npz", mu=mu, sigma=sigma)
    np.savez(
        tmp_path / "VIRTUAL.npz",
        arr_0=np.zeros((2, 4, 4, 3), np.uint8),
        mu=mu.astype(np.float32),
        sigma=sigma,
        mu_s=mu,
        sigma_s=sigma,
    )
    plain, adm = Statistics.load(tmp_path / "cifar10_clean_train_32.npz"), Statistics.load(tmp_path / "VIRTUAL.npz")
    assert (plain.protocol, adm.protocol) == ("plain", "adm")
    assert plain.hash == adm.hash

    inception = Colours()
    inception.name, inception.metric, inception.preprocessing = (
        "inception",
        "fid_legacy_tensorflow",
        {"resize": "legacy_tensorflow"},
    )
    check_reference(adm, inception, 4)
    assert metric_name(adm, inception) == "fid_adm" and metric_name(plain, inception) == "fid_legacy_tensorflow"
    inception.metric, inception.preprocessing = "fid_clean", {"resize": "clean"}
    with pytest.raises(UserError, match="evaluation.resize=legacy_tensorflow"):
        check_reference(adm, inception, 4)


@pytest.mark.parametrize(
    "arrays, why",
    [
        ({"mu": np.ones(4)}, "no array sigma"),
        ({"mu": np.ones(4), "sigma": np.eye(3)}, r"\(4,\).*\(3, 3\)"),
        ({"mu": np.ones(4), "sigma": np.full((4, 4), np.nan)}, "not finite"),
        ({"mu": np.ones(4), "sigma": np.triu(np.ones((4, 4)))}, "not symmetric"),
        ({"mu": np.array([{}]), "sigma": np.eye(1)}, "not a whole npz"),
    ],
)
def test_arrays_that_are_no_statistics_are_refused_by_name(tmp_path, arrays, why):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(UserError, match=why) as error:
        Statistics.load(tmp_path / "bad.npz")
    assert "bad.npz" in str(error.value)


def test_damaged_and_missing_files_are_refused_by_name(tmp_path):
    np.savez(tmp_path / "x.npz", mu=np.ones(40), sigma=np.eye(40))
    whole = (tmp_path / "x.npz").read_bytes()
    for cut in (0, 50, len(whole) // 2, len(whole) - 30):
        (tmp_path / "cut.npz").write_bytes(whole[:cut])
        with pytest.raises(UserError, match="cut.npz: not a whole npz"):
            Statistics.load(tmp_path / "cut.npz")
    flipped = bytearray(whole)
    flipped[600] ^= 0xFF
    (tmp_path / "cut.npz").write_bytes(flipped)
    with pytest.raises(UserError, match="cut.npz"):
        Statistics.load(tmp_path / "cut.npz")
    with pytest.raises(UserError, match="no such file"):
        Statistics.load(tmp_path / "none.npz")


def test_unreadable_sources_are_refused_by_name(folder, tmp_path):
    with pytest.raises(UserError, match="nothing: no images"):
        open_source(str(tmp_path / "nothing"))
    (folder / "00003.png").write_bytes((folder / "00003.png").read_bytes()[:60])
    with pytest.raises(UserError, match="00003.png"):
        stats(open_source(str(folder)))
    tar = write_tar(tmp_path / "a.tar", [("x.png", b"no image at all")])
    with pytest.raises(UserError, match="a.tar: x.png"):
        stats(open_source(str(tar)))
    whole = write_tar(tmp_path / "b.tar", [("x.png", os.urandom(5000))]).read_bytes()
    (tmp_path / "b.tar").write_bytes(whole[:3000])
    with pytest.raises(UserError, match="b.tar"):
        stats(open_source(str(tmp_path / "b.tar")))


@pytest.mark.parametrize("suffix, compress", [(".tar", bytes), (".tar.gz", gzip.compress), (".tar.xz", lzma.compress)])
def test_a_tar_of_images_cut_between_two_members_is_refused_by_name(folder, tmp_path, suffix, compress):
    plain = write_tar(tmp_path / "whole.tar", [(p.name, p.read_bytes()) for p in sorted(folder.iterdir())])
    with tarfile.open(plain) as tar:
        third = tar.getmembers()[2].offset
    name = f"images{suffix}"
    (tmp_path / name).write_bytes(compress(plain.read_bytes()))
    assert stats(open_source(str(tmp_path / name))).moments.n == 21
    (tmp_path / name).write_bytes(compress(plain.read_bytes()[:third]))
    with pytest.raises(UserError, match=f"{name}: the tar cannot be read to its end"):
        stats(open_source(str(tmp_path / name)))


def damaged_shard(folder, damage):
    """The name of the second of three shards, its bytes put through `damage`."""
    write_shards(folder, [5, 4, 3])
    path = folder / "shard-00001.tar"
    path.write_bytes(damage(path, bytearray(path.read_bytes())))
    return path.name


def cut_between_members(path, payload):
    with tarfile.open(path) as tar:
        return payload[: tar.getmembers()[4].offset]


def flip_a_bit(path, payload):
    with tarfile.open(path) as tar:
        member = next(m for m in tar if m.name.endswith(".npy"))
    payload[member.offset_data + member.size - 1] ^= 1
    return payload


def cut_and_closed(path, payload):
    """Whole as a tar, two samples short of what dataset.json says."""
    return cut_between_members(path, payload) + bytes(1024)


@pytest.mark.parametrize(
    "damage, why",
    [(cut_between_members, "truncated"), (flip_a_bit, "CRC-32"), (cut_and_closed, "holds 2 samples, dataset.json says 4")],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_damaged_latent_shards_are_refused_by_name(tmp_path, damage, why, rank):
    name = damaged_shard(tmp_path, damage)
    with pytest.raises(UserError, match=f"{name}: .*{why}.*shards verify") as error:
        list(open_source(str(tmp_path)).samples(rank, 2))
    assert "on_error" not in str(error.value)


def test_ranks_share_out_the_latents_of_all_shards(tmp_path):
    write_shards(tmp_path, [5, 4, 3], moments=True)
    whole = [x.tolist() for x in open_source(str(tmp_path)).samples()]
    parts = [[x.tolist() for x in open_source(str(tmp_path)).samples(rank, 3)] for rank in range(3)]
    assert len(whole) == 12 and [x for turn in zip(*parts) for x in turn] == whole


def test_latent_shards_are_normalised_as_the_run_does(digits):
    source = open_source(f"{digits}/heldout")
    latent = build_extractor("latent", info=source.info)
    found = compute_statistics(source, latent, progress=False)
    rows = np.stack(list(source.samples()))
    x_1 = (rows - source.info.norm.mean[0]) / source.info.norm.std[0]
    assert found.moments.n == source.info.samples == len(rows)
    np.testing.assert_allclose(found.moments.mean, x_1.reshape(len(rows), -1).mean(0), atol=1e-5)
    with pytest.raises(UserError, match="leave --size out"):
        open_source(f"{digits}/heldout", 32)


def test_latent_shards_decode_to_images_for_image_features(digits):
    from vr_online.data.codecs import codec_for

    source = open_source(f"{digits}/heldout")
    found = compute_statistics(source, Colours(), codec=codec_for(source.info), progress=False, keep_features=True)
    pixels = (np.stack(list(source.samples())) + 1) * 127.5
    np.testing.assert_allclose(found.features[:, 0], pixels[:, 0, :4, :4].mean((1, 2)), atol=0.6)


def test_a_reference_is_computed_once_and_again_when_its_source_changes(folder, tmp_path):
    first = load_reference(str(folder), Colours(), cache=tmp_path / "cache", progress=False)
    (kept,) = (tmp_path / "cache").iterdir()
    stamp = kept.stat().st_mtime_ns
    assert load_reference(str(folder), Colours(), cache=tmp_path / "cache", progress=False).hash == first.hash
    assert kept.stat().st_mtime_ns == stamp
    Image.new("RGB", (16, 16)).save(folder / "new.png")
    assert load_reference(str(folder), Colours(), cache=tmp_path / "cache", progress=False).moments.n == 22


def test_kid_against_a_file_without_features_says_what_to_do(tmp_path):
    np.savez(tmp_path / "x.npz", mu=np.ones(4), sigma=np.eye(4))
    with pytest.raises(UserError, match="--keep-features"):
        load_reference(str(tmp_path / "x.npz"), Colours(), keep_features=True)


class Endless(ImageSource):
    def samples(self, rank=0, world_size=1):
        for i in range(self.count):
            yield np.full((3, 32, 32), i % 256, dtype=np.uint8)


def test_memory_does_not_grow_with_n():
    def peak(n):
        source = Endless("none", [], tars=False)
        source.count = n
        tracemalloc.start()
        stats(source, batch_size=16)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(100)
    assert peak(3000) < peak(300) + 200_000  # 3,000 images are 9 MB


def test_meta_is_json(folder):
    assert json.loads(json.dumps(stats(open_source(str(folder))).meta))["extractor"]["name"] == "colours"
