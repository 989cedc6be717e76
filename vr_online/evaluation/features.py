"""Feature extractors: what a Frechet distance is taken between.

    latent                  the normalised latent itself, flattened; no network
    inception(PATH)         clean-fid's Inception-v3: its TorchScript file, or pytorch-fid's `.pth` weights
    effnet_lite0            EfficientNet-lite0, ImageNet weights from a pip package, 96 px; `effnet_lite0(224)`
    torchscript(PATH)       any TorchScript module; `torchscript(PATH, SIZE)` resizes to SIZE x SIZE first

Every image extractor takes uint8 images (B, 3, H, W), exactly what a PNG would hold, so that the
in-memory route and a folder of PNGs give the same number. `Extractor.metric` names the distance
(`fid_clean`, `fid_legacy_tensorflow`, `fd_effnet_lite0`, `fd_latent`, ...) and `Extractor.hash` the file.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import torch

from vr_online.errors import UserError

INCEPTION_FILE = "inception-2015-12-05.pt"
INCEPTION_SIZE = 299
MAX_LATENT_FEATURES = 8192


def to_uint8(images: torch.Tensor) -> torch.Tensor:
    """Float images in [0, 1] to uint8 by rounding, a single channel repeated to three: what a PNG holds."""
    pixels = images.float().mul(255).round_().clamp_(0, 255).to(torch.uint8)
    return pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels


@functools.lru_cache(maxsize=64)
def _sha256(path: str, size: int, mtime_ns: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 22), b""):
            digest.update(block)
    return digest.hexdigest()


def file_hash(path: str | os.PathLike) -> str:
    """SHA-256 of a file, hex; a file unchanged since the last call is not read again."""
    state = os.stat(path)
    return _sha256(os.fspath(path), state.st_size, state.st_mtime_ns)


class Extractor:
    """A map from samples to feature vectors.

    Attributes:
        name: as in `evaluation.features`, without the path.
        metric: name of the Frechet distance in this feature space.
        hash: SHA-256 of the file behind it, or `none`.
        space: `image` (called with uint8 images) or `latent` (called with normalised latents).
        preprocessing: what happens to a sample before the network, for the record and for comparison.
        device: where features come out.
    """

    name: str
    metric: str
    hash: str = "none"
    space: str = "image"
    preprocessing: dict[str, Any]
    device: torch.device = torch.device("cpu")

    def __call__(self, samples: torch.Tensor) -> torch.Tensor:
        """Features (B, d), float32 on `device`, of uint8 images (B, 3, H, W) or latents (B, C, H, W)."""
        raise NotImplementedError

    def class_probabilities(self, features: torch.Tensor) -> torch.Tensor:
        """Class probabilities (B, classes) for the Inception Score.

        Raises:
            UserError: this extractor has no classifier.
        """
        raise UserError(
            f"evaluation.metrics: `is` needs a classifier, which {self.name} has not; use inception(PATH), the TorchScript file"
        )

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "metric": self.metric, "hash": self.hash, "preprocessing": self.preprocessing}


class LatentExtractor(Extractor):
    """The normalised latent, flattened: distances in the space the model works in.

    Raises:
        UserError: the latent has more than 8,192 numbers, beyond which the covariance is out of reach.
    """

    name, metric, space = "latent", "fd_latent", "latent"

    def __init__(self, info: Any, device: torch.device | str = "cpu"):
        size = int(np.prod(info.latent_shape))
        if size > MAX_LATENT_FEATURES:
            raise UserError(
                f"features: latent needs a covariance of {size} x {size} for latents {list(info.latent_shape)} "
                f"(at most {MAX_LATENT_FEATURES} numbers); use inception(PATH) or effnet_lite0"
            )
        self.device = torch.device(device)
        self.norm = info.norm
        self.preprocessing = {
            "latent_shape": list(info.latent_shape),
            "codec": info.codec,
            "codec_hash": info.codec_hash,
            "mean": list(info.norm.mean),
            "std": list(info.norm.std),
        }

    def __call__(self, samples: torch.Tensor) -> torch.Tensor:
        return samples.to(self.device, torch.float32).flatten(1)


class Resizer:
    """clean-fid's resize function (HWC array to HWC float32 in [0, 255]) over a batch, on all cores this process may use."""

    def __init__(self, function: Callable[[np.ndarray], np.ndarray]):
        self.function = function
        self.pool = ThreadPoolExecutor(max(1, torch.get_num_threads()))

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 (B, 3, H, W) to float32 (B, 3, h, w) in [0, 255]."""
        arrays = images.cpu().permute(0, 2, 3, 1).contiguous().numpy()
        resized = np.stack(list(self.pool.map(self.function, arrays)))
        return torch.from_numpy(resized).permute(0, 3, 1, 2).contiguous()


def _clean_resizer(size: int) -> Resizer:
    from cleanfid.resize import make_resizer

    return Resizer(make_resizer("PIL", False, "bicubic", (size, size)))


class InceptionExtractor(Extractor):
    """Inception-v3, 2,048 features, in one of clean-fid's resize modes.

    Args:
        path: the TorchScript file clean-fid uses, the folder that holds it, or pytorch-fid's weights (`.pth`).
        resize: `clean` (PIL bicubic, no quantisation), `legacy_tensorflow` (bilinear inside the network)
            or `legacy_pytorch` (torch bilinear).

    Raises:
        UserError: the file is missing or is neither; the message says where to get it.
    """

    name = "inception"

    def __init__(
        self, path: str | os.PathLike, resize: str = "clean", device: torch.device | str = "cpu", download: bool = False
    ):
        file = _find_inception(path, download)
        self.hash = file_hash(file)
        self.device = torch.device(device)
        self.resize = resize
        self.metric = f"fid_{resize}"
        self.preprocessing = {"resize": resize, "size": INCEPTION_SIZE}
        self.resizer = None if resize == "legacy_tensorflow" else Resizer(_build_resizer(resize))
        self.path = file
        self.network = _load_weights(file, resize) if file.suffix == ".pth" else _load_inception(file)
        self.network.to(self.device)
        if self.device.type == "cpu":
            # Convolutions on the CPU run some 40 % faster so, with the same features to rounding.
            self.network.to(memory_format=torch.channels_last)

    @torch.no_grad()
    def __call__(self, samples: torch.Tensor) -> torch.Tensor:
        if self.resizer is None:
            return self.network(samples.to(self.device), return_features=True).reshape(len(samples), -1).float()
        pixels = self.resizer(samples).to(self.device)
        if isinstance(self.network, torch.jit.ScriptModule):
            features = self.network.layers((pixels - 128) / 128)
        else:
            features = self.network(pixels / 255)[0]
        return features.reshape(len(samples), -1).float()

    @torch.no_grad()
    def class_probabilities(self, features: torch.Tensor) -> torch.Tensor:
        weight = self.network.state_dict().get("output.weight")
        if weight is None:
            raise UserError(
                f"{self.path}: no `output.weight`, so no Inception Score; use the TorchScript file {INCEPTION_FILE}"
            )
        weight = weight if weight.shape[1] == features.shape[1] else weight.T
        # Without the bias, as the original Inception Score.
        return torch.softmax(features.double() @ weight.to(features.device, torch.float64).T, dim=1)


def _build_resizer(resize: str) -> Callable[[np.ndarray], np.ndarray]:
    from cleanfid.resize import build_resizer

    return build_resizer(resize)


def _find_inception(path: str | os.PathLike, download: bool) -> Path:
    from cleanfid.downloads_helper import inception_url

    file = Path(path).expanduser()
    file = file / INCEPTION_FILE if file.is_dir() else file
    if not file.exists() and download:
        _download_inception(file)
    if not file.exists():
        raise UserError(
            f"{file}: no Inception network there; get {inception_url} and put it at that path, or run "
            "`vr-online fid ... --download` on a machine with network access"
        )
    return file


def _download_inception(file: Path) -> None:
    import tempfile

    from cleanfid.downloads_helper import check_download_inception, inception_url

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            os.replace(check_download_inception(folder), file)
    except OSError as error:
        raise UserError(f"{file}: downloading {inception_url} failed: {error}") from None


def _load_script(file: Path) -> torch.jit.ScriptModule:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the file's format is given, whatever torch recommends
            return torch.jit.load(str(file), map_location="cpu").eval()
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"{file}: not a TorchScript file, or damaged ({str(error).splitlines()[0]}); fetch it again"
        ) from None


def _load_inception(file: Path) -> torch.jit.ScriptModule:
    network = _load_script(file)
    if not hasattr(network, "layers"):
        raise UserError(f"{file}: not clean-fid's Inception (it has no `layers`); for another network use torchscript(PATH)")
    return network


def _load_weights(file: Path, resize: str) -> torch.nn.Module:
    """pytorch-fid's Inception from its state dict, without the download its constructor would start."""
    from cleanfid import inception_pytorch

    if resize == "legacy_tensorflow":
        raise UserError(
            f"{file}: resize legacy_tensorflow is part of the TorchScript file {INCEPTION_FILE}; give that, or another resize"
        )
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        original = inception_pytorch.load_state_dict_from_url
        inception_pytorch.load_state_dict_from_url = lambda *args, **kwargs: state
        try:
            # Building the network draws initial weights; training's generator must not notice.
            with torch.random.fork_rng(devices=[]):
                return inception_pytorch.InceptionV3(output_blocks=[3], resize_input=False).eval()
        finally:
            inception_pytorch.load_state_dict_from_url = original
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{file}: not the weights of pytorch-fid's Inception ({str(error).splitlines()[0]})") from None


class ScriptExtractor(Extractor):
    """Any TorchScript module that maps float32 images (B, 3, H, W) in [0, 255] to (B, d)."""

    def __init__(self, path: str | os.PathLike, size: Optional[int] = None, device: torch.device | str = "cpu"):
        file = Path(path).expanduser()
        if not file.exists():
            raise UserError(f"{file}: no such file (evaluation.features: torchscript(PATH))")
        self.name = "torchscript"
        self.metric = f"fd_{re.sub('[^A-Za-z0-9]+', '_', file.stem)}"
        self.hash = file_hash(file)
        self.device = torch.device(device)
        self.network = _load_script(file).to(self.device)
        self.resizer = _clean_resizer(size) if size else None
        self.preprocessing = {"resize": "clean", "size": size} if size else {"resize": "none"}

    @torch.no_grad()
    def __call__(self, samples: torch.Tensor) -> torch.Tensor:
        pixels = samples.float() if self.resizer is None else self.resizer(samples)
        features = self.network(pixels.to(self.device))
        return features.reshape(len(samples), -1).float()


def parse_spec(spec: str) -> tuple[str, list[str]]:
    """`name(a, b)` to (name, [a, b]); raises `UserError` when it is neither that nor a bare name."""
    match = re.fullmatch(r"\s*([A-Za-z0-9_]+)\s*(?:\((.*)\))?\s*", spec)
    if not match:
        raise UserError(f"evaluation.features {spec!r}: expected latent, inception(PATH), effnet_lite0 or torchscript(PATH)")
    return match[1], [part.strip() for part in match[2].split(",")] if match[2] else []


def build_extractor(
    spec: str, *, resize: str = "clean", device: torch.device | str = "cpu", info: Any = None, download: bool = False
) -> Extractor:
    """The extractor of `evaluation.features`.

    Args:
        spec: see the module's text.
        resize: clean-fid's resize mode, for inception.
        info: the `DatasetInfo`; needed by `latent`.
        download: let clean-fid fetch a missing Inception to the path given.

    Raises:
        UserError: an unknown name, a missing file or package.
    """
    name, arguments = parse_spec(spec)
    if name == "latent" and not arguments:
        if info is None:
            raise UserError("features: latent needs latent shards (their dataset.json), not images")
        return LatentExtractor(info, device)
    if name == "inception" and len(arguments) == 1:
        return InceptionExtractor(arguments[0], resize, device, download)
    if name == "torchscript" and len(arguments) in (1, 2):
        return ScriptExtractor(arguments[0], _size(spec, arguments[1:]), device)
    if name == "effnet_lite0" and len(arguments) <= 1:
        from vr_online.evaluation.effnet import EffnetExtractor

        return EffnetExtractor(_size(spec, arguments) or 96)
    raise UserError(
        f"evaluation.features {spec!r}: expected latent, inception(PATH), effnet_lite0, effnet_lite0(SIZE), torchscript(PATH) "
        "or torchscript(PATH, SIZE)"
    )


def _size(spec: str, arguments: list[str]) -> Optional[int]:
    if not arguments:
        return None
    if not arguments[0].isdigit() or not 32 <= int(arguments[0]) <= 1024:
        raise UserError(f"evaluation.features {spec!r}: the size must be a whole number from 32 to 1024")
    return int(arguments[0])
