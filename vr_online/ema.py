"""Exponential moving average of the master weights, kept only for the part of them a rank owns."""

from __future__ import annotations

import numpy as np
import torch

from vr_online.config import EmaConfig


def power_exponent(sigma_rel: float) -> float:
    """Exponent gamma of the power-function average with relative width `sigma_rel`.

    Positive root of sigma_rel^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)), EDM2 (Karras et al. 2024, section 3.1
    and algorithm 2).
    """
    t = sigma_rel**-2
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


class Decay:
    """Decay of one step that ends at `images` seen, in images so that it does not depend on the batch size.

    `constant`: 0.5^(batch / half_life), with half_life at most `rampup` x images seen (EDM, Karras et al. 2022,
    appendix F.2). `power`: (1 - batch / images)^(gamma + 1), EDM2 equation 6 with t in images.
    """

    def __init__(self, config: EmaConfig, batch_size: int):
        self.config, self.batch_size = config, batch_size
        self.gamma = power_exponent(config.sigma_rel)

    def __call__(self, images: int) -> float:
        if self.config.kind == "power":
            return (1 - self.batch_size / max(images, self.batch_size)) ** (self.gamma + 1)
        half_life = self.config.half_life
        if self.config.rampup is not None:
            half_life = min(half_life, self.config.rampup * images)
        return 0.5 ** (self.batch_size / max(half_life, 1e-8))

    @property
    def name(self) -> str:
        """How results call this average, such as `ema(half_life=1774000)`."""
        if self.config.kind == "power":
            return f"ema(power, sigma_rel={self.config.sigma_rel:g})"
        return f"ema(half_life={self.config.half_life:g})"


class Ema:
    """fp32 average of `masters`, a list of 1-D master-weight tensors of this rank.

    `averages[i]` has the shape of `masters[i]`. Nothing is ever gathered here: the size is that of the rank's share.
    """

    def __init__(self, masters: list[torch.Tensor], config: EmaConfig, batch_size: int):
        self.masters, self.decay = masters, Decay(config, batch_size)
        self.averages = [m.detach().clone() for m in masters]

    @torch.no_grad()
    def update(self, images: int, skipped: torch.Tensor) -> None:
        """Moves the average one step; `skipped` () is 1 where the optimizer step was, and then nothing moves."""
        weight = (1 - skipped) * (1 - self.decay(images))
        for average, master in zip(self.averages, self.masters):
            average.lerp_(master, weight)

