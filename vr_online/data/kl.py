"""diffusers' `AutoencoderKL` (sd-vae and its relatives) as a codec; `pip install 'vr_online[kl]'`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from vr_online.data.codecs import Codec, Posterior
from vr_online.errors import UserError


class KLCodec(Codec):
    """A variational autoencoder. Latents are raw: the usual factor (0.18215) belongs to the normalisation.

    Args:
        path: a folder in diffusers' layout (`config.json` and weights, or a pipeline with them in `vae/`), or a
            hub id such as `stabilityai/sd-vae-ft-ema`, which downloads once.

    Raises:
        UserError: diffusers is missing, or the model is not found where `path` says.
    """

    id = "kl"
    stochastic = True

    def __init__(self, path: str) -> None:
        self.path = str(path)
        self.vae = _load(self.path).eval().requires_grad_(False).float()
        self.hash = _hash(self.vae)
        self.factor = 2 ** (len(self.vae.config.block_out_channels) - 1)
        self._device = torch.device("cpu")

    @torch.inference_mode()
    def posterior(self, images: torch.Tensor) -> Posterior:
        images = images.to(self._device)
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        distribution = self.vae.encode(images.float() / 127.5 - 1.0).latent_dist
        return Posterior(distribution.mean, distribution.std)

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        return self.posterior(images).mean

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return (self.vae.decode(latents.to(self._device).float()).sample / 2 + 0.5).clamp(0.0, 1.0)

    def to(self, device: str | torch.device) -> "KLCodec":
        self._device = torch.device(device)
        self.vae.to(self._device)
        return self


def _load(path: str):
    try:
        from diffusers import AutoencoderKL
    except ImportError:
        raise UserError("the codec kl needs diffusers: pip install 'vr_online[kl]'") from None
    folder = Path(path).expanduser()
    if folder.is_dir():
        folder = folder / "vae" if (folder / "vae" / "config.json").is_file() else folder
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder / 'config.json'}: no such file; the codec kl wants a folder in diffusers' layout")
    elif path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(f"{folder}: no such folder; the codec kl wants one in diffusers' layout, or a hub id (stabilityai/sd-vae-ft-ema)")
    try:
        # safetensors only: older weight files are pickles
        return AutoencoderKL.from_pretrained(folder if folder.is_dir() else path, use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"kl:{path}: cannot load an AutoencoderKL with .safetensors weights: {reason}") from None


def _hash(vae: torch.nn.Module) -> str:
    """SHA-256 of names and float32 values of all weights, whatever file they came in."""
    digest = hashlib.sha256()
    for name, value in sorted(vae.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
