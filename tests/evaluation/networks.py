"""Random networks in the TorchScript form of clean-fid's Inception, and images to feed them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

INCEPTION = "inception-2015-12-05.pt"


class AsInception(nn.Module):
    """The interface of the published file: uint8-range images, resized inside; `layers` takes 299 x 299 in [-1, 1]."""

    def __init__(self, layers: nn.Module):
        super().__init__()
        self.layers = layers
        self.output = nn.Linear(2048, 1008)

    def forward(
        self, img: Tensor, return_features: bool = False, use_fp16: bool = False, no_output_bias: bool = False
    ) -> Tensor:
        x = F.interpolate(img.float(), size=[299, 299], mode="bilinear", align_corners=False)
        features = self.layers((x - 128) / 128).reshape(img.shape[0], 2048)
        if return_features:
            return features
        logits = F.linear(features, self.output.weight) if no_output_bias else self.output(features)
        return torch.softmax(logits, dim=1)


def small_layers() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 24, 9, stride=8),
        nn.ReLU(),
        nn.Conv2d(24, 64, 5, stride=3),
        nn.ReLU(),
        nn.Conv2d(64, 2048, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def inception_v3_layers() -> nn.Module:
    """The architecture itself, with random weights of a scale that keeps activations alive."""
    import torchvision

    network = torchvision.models.inception_v3(weights=None, init_weights=False, aux_logits=False)
    parts = [part for name, part in network.named_children() if name not in ("AuxLogits", "dropout", "fc")]
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    return nn.Sequential(*parts, nn.Flatten())


def write_inception(folder: Path, layers: nn.Module) -> Path:
    """Saves the TorchScript file; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    network = AsInception(layers.eval()).eval()
    network.layers = torch.jit.trace(network.layers, torch.zeros(1, 3, 299, 299), check_trace=False)
    torch.jit.script(network).save(str(folder / INCEPTION))
    return folder / INCEPTION


def pictures(n: int, size: int, seed: int, contrast: float = 60.0) -> np.ndarray:
    """Smooth random colour images, uint8 (n, 3, size, size)."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(n, 3, 5, 5, generator=generator) * contrast + 128
    fine = torch.randn(n, 3, size, size, generator=generator) * 8
    return (F.interpolate(coarse, size=(size, size), mode="bicubic") + fine).clamp(0, 255).to(torch.uint8).numpy()


def write_pngs(folder: Path, images: np.ndarray) -> Path:
    folder.mkdir(parents=True)
    for i, image in enumerate(images):
        Image.fromarray(image.transpose(1, 2, 0)).save(folder / f"{i:05d}.png")
    return folder
