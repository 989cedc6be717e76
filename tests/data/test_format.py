"""`dataset.json` and the latent normalisation."""

import functools
import http.server
import json
import threading

import numpy as np
import pytest
import torch

from vr_online.data.format import DatasetInfo, FormatError, LatentNorm

FIELDS = dict(
    samples=5, shards={"a.tar": 2, "b.tar": 3}, latent_shape=[2, 4, 4], codec="pixel", codec_hash="x",
    norm={"mean": [0.5, -1.0], "std": [2.0, 0.25]}, class_names=["cat", "dog"], class_counts=[4, 1],
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_normalising_and_back_is_the_identity(dtype):
    norm = LatentNorm([0.5, -3.0], [2.0, 0.01])
    latent = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    x_1 = norm.normalize(latent)
    assert x_1.dtype == torch.float32 and not torch.allclose(x_1, latent.float())
    torch.testing.assert_close(norm.denormalize(x_1), latent.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norm.normalize(norm.denormalize(x_1)), x_1, rtol=1e-5, atol=1e-4)


def test_normalising_acts_per_channel():
    norm = LatentNorm([1.0, 10.0], [2.0, 5.0])
    latent = torch.tensor([3.0, 20.0]).view(2, 1, 1).expand(2, 2, 2)
    assert norm.normalize(latent)[0].eq(1.0).all() and norm.normalize(latent)[1].eq(2.0).all()
    assert torch.equal(norm.normalize(latent.unsqueeze(0))[0], norm.normalize(latent))


def test_a_single_scale_is_expressible():
    latent = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(LatentNorm.from_scale(0.18215, 4).normalize(latent), latent * 0.18215)


def test_channels_must_agree():
    with pytest.raises(FormatError, match="2 channels.*have 3"):
        LatentNorm([0, 0], [1, 1]).normalize(torch.zeros(1, 3, 4, 4))


def test_matching_norms_pass_and_others_are_named():
    norm = LatentNorm([0.0, 1.0], [1.0, 2.0])
    norm.check_matches(LatentNorm([0.0, 1.0 + 1e-5], [1.0, 2.0]))
    with pytest.raises(FormatError, match="data.norm disagrees.*channel 1"):
        norm.check_matches(LatentNorm([0.0, 1.0], [1.0, 1.9]))
    with pytest.raises(FormatError, match="1 channels"):
        norm.check_matches(LatentNorm([0.0], [1.0]))


def test_description_survives_the_disk(tmp_path):
    info = DatasetInfo.parse({**FIELDS, "source": "naïve ∑", "preprocessing": {"size": 32}})
    path = info.save(tmp_path)
    assert DatasetInfo.load(tmp_path) == DatasetInfo.load(path) == info
    before = path.read_bytes()
    DatasetInfo.load(tmp_path).save(tmp_path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["dataset.json"]


def test_description_loads_from_a_url(tmp_path):
    info = DatasetInfo.parse(FIELDS)
    info.save(tmp_path)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert DatasetInfo.load(url) == DatasetInfo.load(f"{url}/dataset.json") == info
    finally:
        server.shutdown()
        server.server_close()


def test_stored_shape_and_classes():
    assert DatasetInfo.parse(FIELDS).stored_shape == (2, 4, 4)
    moments = DatasetInfo.parse({**FIELDS, "moments": True})
    assert moments.stored_shape == (4, 4, 4) and moments.latent_shape == (2, 4, 4) and moments.num_classes == 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"samples": 6}, "samples is 6.*add up to 5"),
        ({"version": 99}, "version: format version 99"),
        ({"latent_shape": [3, 4, 4]}, "norm has 2 channels"),
        ({"latent_shape": [2, 4]}, "latent_shape"),
        ({"latent_shape": [2, 0, 4]}, "latent_shape.*positive"),
        ({"shards": {"../a.tar": 5}}, "outside"),
        ({"shards": {"/a.tar": 5}}, "outside"),
        ({"shards": {"a.tar": -1, "b.tar": 6}}, "negative"),
        ({"norm": {"mean": [0, 0], "std": [1, 0]}}, "norm.*positive"),
        ({"norm": {"mean": [0, float("nan")], "std": [1, 1]}}, "norm.*finite"),
        ({"norm": {"mean": [0], "std": [1, 1]}}, "1 channels but std has 2"),
        ({"class_names": []}, "class_names"),
        ({"codec": None}, "codec"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_contradictions_are_refused_by_key(tmp_path, change, message):
    DatasetInfo.parse(FIELDS)
    (tmp_path / "dataset.json").write_text(json.dumps({**FIELDS, **change}))
    with pytest.raises(FormatError, match=message) as error:
        DatasetInfo.load(tmp_path)
    assert str(tmp_path / "dataset.json") in str(error.value)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"3"])
def test_damaged_description_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "dataset.json").write_bytes(content)
    with pytest.raises(FormatError, match="dataset.json"):
        DatasetInfo.load(tmp_path)


def test_no_damage_to_a_description_crashes(tmp_path):
    """Any change of bytes gives a valid description or a `FormatError` that names the file."""
    whole = DatasetInfo.parse(FIELDS).save(tmp_path).read_bytes()
    random, refused = np.random.default_rng(0), 0
    for _ in range(300):
        broken = bytearray(whole)
        for position in random.integers(len(whole), size=2):
            broken[position] = random.integers(256)
        (tmp_path / "dataset.json").write_bytes(broken)
        try:
            info = DatasetInfo.load(tmp_path)
            assert sum(info.shards.values()) == info.samples and min(info.norm.std) > 0
        except FormatError as error:
            assert "dataset.json" in str(error)
            refused += 1
    assert refused > 150


def test_missing_description_says_what_to_do(tmp_path):
    with pytest.raises(FormatError, match="No such file.*shards encode"):
        DatasetInfo.load(tmp_path)
