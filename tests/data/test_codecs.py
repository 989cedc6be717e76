"""Codecs: round trips, agreement with the libraries they stand for, and what they refuse."""

import io
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vr_online.data.codecs import PixelCodec, check_codec, codec_for, get_codec
from vr_online.data.encode import EncodeOptions, encode
from vr_online.data.format import DatasetInfo, FormatError
from vr_online.data.images import open_index
from vr_online.data.show import decode_grid, read_dataset
from vr_online.data.tae import build_decoder, build_encoder
from vr_online.data.verify import verify
from vr_online.errors import UserError

SHARED = Path(os.environ.get("VR_ONLINE_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_taef2 = pytest.mark.skipif(
    not (SHARED / "taef2").is_dir(), reason=f"no TAEF2 weights in {SHARED}; VR_ONLINE_SHARED_DATA names another folder"
)


def random_images(count=2, size=16, seed=0):
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def taesd(tmp_path) -> Path:
    """A folder of random TAESD weights (4 channels)."""
    torch.manual_seed(0)
    torch.save(build_encoder(4, pooled=False).state_dict(), tmp_path / "taesd_encoder.pth")
    torch.save(build_decoder(4, pooled=False).state_dict(), tmp_path / "taesd_decoder.pth")
    return tmp_path


def info_for(codec, /, **changes) -> DatasetInfo:
    fields = dict(
        samples=1, shards={"a.tar": 1}, latent_shape=[4, 2, 2], codec=codec.id, codec_hash=codec.hash, codec_path=codec.path,
        norm={"mean": [0.0] * 4, "std": [1.0] * 4}, class_names=["x"],
    )
    return DatasetInfo(**{**fields, **changes})


def test_pixels_survive_exactly_even_in_float16():
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    latents = PixelCodec().encode(images)
    assert latents.min() == -1 and latents.max() == 1
    assert torch.equal((PixelCodec().decode(latents.half()) * 255).round().to(torch.uint8), images)


def test_tiny_autoencoder_shapes(taesd):
    codec = get_codec(f"tae:{taesd}")
    latents = codec.encode(random_images(2, 24))
    assert latents.shape == (2, 4, 3, 3) and latents.dtype == torch.float32
    images = codec.decode(latents)
    assert images.shape == (2, 3, 24, 24) and 0 <= images.min() and images.max() <= 1
    grey = random_images()[:, :1]
    assert torch.equal(codec.encode(grey), codec.encode(grey.expand(-1, 3, -1, -1)))


def test_a_decoder_bounds_its_input(taesd):
    codec = get_codec(f"tae:{taesd}")
    far = torch.full((1, 4, 2, 2), 1e4)
    torch.testing.assert_close(codec.decode(far), codec.decode(2 * far))


def test_tiny_autoencoder_equals_diffusers(tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="diffusers (extra kl) is not installed")
    torch.manual_seed(0)
    theirs = diffusers.AutoencoderTiny()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("weight"):
                parameter.mul_(1.5)  # or the default initialisation fades to a constant
    theirs.save_pretrained(tmp_path)
    ours, images = get_codec(f"tae:{tmp_path}"), random_images(2, 32)
    with torch.no_grad():
        latents = theirs.encode(images.float() / 127.5 - 1).latents
        decoded = (theirs.decode(latents).sample / 2 + 0.5).clamp(0, 1)
    assert latents.std() > 0.05 and decoded.std() > 0.01
    torch.testing.assert_close(ours.encode(images), latents, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.decode(latents), decoded, rtol=1e-4, atol=1e-5)


@needs_taef2
def test_taef2_reconstructs_cifar10():
    codec = get_codec("tae", path=str(SHARED / "taef2"))
    images = []
    with tarfile.open(SHARED / "cifar10_jpg.tar.gz") as tar:
        files = (m for m in tar if m.isfile())
        for number, member in zip(range(2000), files):
            if number % 10 == 0:
                images.append(np.array(Image.open(io.BytesIO(tar.extractfile(member).read())).convert("RGB")).transpose(2, 0, 1))
    images = torch.from_numpy(np.stack(images))
    latents = codec.encode(images)
    assert images.shape[0] == 200 and latents.shape == (200, 32, 4, 4)
    assert abs(latents.mean() - 0.08) < 0.1 and abs(latents.std() - 0.91) < 0.15
    error = (codec.decode(latents.half()) - images / 255).square().mean(dim=(1, 2, 3))
    assert (-10 * error.log10()).mean() >= 23


@needs_taef2
def test_two_files_and_their_folder_are_the_same_codec():
    folder = SHARED / "taef2"
    by_file = get_codec(f"tae:{folder / 'taef2_encoder.pth'},{folder / 'taef2_decoder.pth'}")
    assert by_file.hash == get_codec(f"tae:{folder}").hash and by_file.channels == 32


def test_the_hash_follows_the_weights_not_their_place(taesd, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("copy") / "weights"
    shutil.copytree(taesd, elsewhere)
    assert get_codec(f"tae:{taesd}").hash == get_codec(f"tae:{elsewhere}").hash
    torch.manual_seed(1)
    torch.save(build_decoder(4, pooled=False).state_dict(), elsewhere / "taesd_decoder.pth")
    assert get_codec(f"tae:{taesd}").hash != get_codec(f"tae:{elsewhere}").hash


class Exploit:
    def __reduce__(self):
        return (os.mkdir, ("exploited",))


def break_missing(folder):
    (folder / "taesd_decoder.pth").unlink()


def break_truncated(folder):
    path = folder / "taesd_decoder.pth"
    path.write_bytes(path.read_bytes()[:1000])


def break_keys(folder):
    state = torch.load(folder / "taesd_decoder.pth", weights_only=True)
    state["8.conv.0.wait"] = state.pop("8.conv.0.weight")
    torch.save(state, folder / "taesd_decoder.pth")


def break_swapped(folder):
    (folder / "taesd_decoder.pth").rename(folder / "x")
    (folder / "taesd_encoder.pth").rename(folder / "taesd_decoder.pth")
    (folder / "x").rename(folder / "taesd_encoder.pth")


def break_pair(folder):
    torch.save(build_decoder(16, pooled=False).state_dict(), folder / "taesd_decoder.pth")


def break_pickle(folder):
    (folder / "taesd_decoder.pth").write_bytes(pickle.dumps(Exploit(), protocol=2))


@pytest.mark.parametrize(
    "damage, message",
    [
        (break_missing, r"exactly one \*decoder\* file.*found none"),
        (break_truncated, "taesd_decoder.pth: not a state dict"),
        (break_keys, "taesd_decoder.pth: the key '8.conv.0.weight'.*missing"),
        (break_swapped, "taesd_encoder.pth: has no key '14.bias'.*swapped"),
        (break_pair, "4 latent channels but the decoder takes 16"),
        (break_pickle, "taesd_decoder.pth: not a state dict"),
    ],
)
def test_unusable_weights_are_named(taesd, damage, message, monkeypatch, tmp_path_factory):
    get_codec(f"tae:{taesd}")
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))
    damage(taesd)
    with pytest.raises(UserError, match=message):
        get_codec(f"tae:{taesd}")
    assert not Path("exploited").exists()


@pytest.mark.parametrize("spec, message", [("jpeg", "expected pixel"), ("tae", "tae:PATH"), ("tae:/nowhere", "/nowhere"), ("kl", "kl:PATH")])
def test_unusable_specs_say_what_is_expected(spec, message):
    with pytest.raises(UserError, match=message):
        get_codec(spec)


def test_the_codec_of_a_data_set_is_checked(taesd):
    codec = get_codec(f"tae:{taesd}")
    assert codec_for(info_for(codec)).hash == codec.hash
    with pytest.raises(FormatError, match="other weights"):
        codec_for(info_for(codec, codec_hash="0" * 64))
    with pytest.raises(FormatError, match="written with the codec pixel, not tae"):
        check_codec(info_for(codec, codec="pixel"), codec)


@pytest.fixture(scope="module")
def kl_folder(tmp_path_factory) -> Path:
    diffusers = pytest.importorskip("diffusers", reason="diffusers (extra kl) is not installed")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4, latent_channels=4,
    )
    folder = tmp_path_factory.mktemp("kl") / "vae"
    vae.save_pretrained(folder)
    return folder


def test_kl_posterior_is_that_of_diffusers(kl_folder):
    from diffusers import AutoencoderKL

    codec, images = get_codec(f"kl:{kl_folder}"), random_images()
    mean, std = codec.posterior(images)
    with torch.no_grad():
        theirs = AutoencoderKL.from_pretrained(kl_folder).encode(images.float() / 127.5 - 1).latent_dist
    torch.testing.assert_close(mean, theirs.mean)
    torch.testing.assert_close(std, theirs.std)
    assert codec.stochastic and (std > 0).all() and torch.equal(codec.encode(images), mean)
    assert codec.decode(mean).shape == images.shape and codec.factor == 2
    assert get_codec(f"kl:{kl_folder.parent}").hash == codec.hash  # a pipeline's folder with vae/ inside


def test_kl_moments_become_shards_that_decode(kl_folder, tmp_path):
    for number in range(3):
        (tmp_path / "images" / "x").mkdir(parents=True, exist_ok=True)
        Image.fromarray(random_images(1, 16, number)[0].permute(1, 2, 0).numpy()).save(tmp_path / "images" / "x" / f"{number}.png")
    options = EncodeOptions(codec=f"kl:{kl_folder}", size=16, flip="both", posterior="moments", norm="scale:0.18215")
    info = encode(open_index(str(tmp_path / "images")), tmp_path / "out", options, workers=1, progress=False).info
    assert info.moments and info.latent_shape == (4, 8, 8) and info.samples == 6
    assert verify(tmp_path / "out", progress=False) == []
    samples = list(read_dataset(tmp_path / "out", info))
    assert all(s.latent.shape == (8, 8, 8) and (s.latent[4:] > 0).all() for s in samples)
    assert decode_grid(tmp_path / "out", tmp_path / "grid.png", n=6, columns=3) == 6


def test_kl_says_what_it_looked_for(tmp_path):
    pytest.importorskip("diffusers", reason="diffusers (extra kl) is not installed")
    with pytest.raises(UserError, match="config.json"):
        get_codec(f"kl:{tmp_path}")
    with pytest.raises(UserError, match="absent.*no such folder"):
        get_codec(f"kl:{tmp_path / 'absent'}")


def test_kl_without_diffusers_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "diffusers", None)
    with pytest.raises(UserError, match=r"pip install 'vr_online\[kl\]'"):
        get_codec(f"kl:{tmp_path}")
