"""The variance reduction that was got, beside the one that was predicted.

A step's draws are split into two alike halves (`draws.half_signs`). With G_1 and G_2 the weighted sketch means of the
halves, the optimizer gets the gradient (G_1 + G_2) / 2, and a_t = ||G_1 - G_2||^2 / (4 k) has the variance of just that as
its expectation: what was drawn, with the weights it was drawn with, and no drift of the weights in between. Against it
stands what plain draws from q would have had, v_t = sum_b q_b grad_var_b / B (stratified) or
(sum_b q_b grad_sq_b - ||g||^2) / B (independent), from the same step's samples. The ratio is mean(a) / mean(v), both over
a decaying window; its standard error is that of mean(a).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vr_online.timesteps.statistics import frozen

_WINDOW = 500  # half-life in steps


class AchievedRatio:
    """Running ratio of measured to plainly predicted minibatch-gradient variance, on the device."""

    NAMES = ("sums",)

    def __init__(self, k: int, device: torch.device | str) -> None:
        self.k = k
        # Decayed: count, sum of squared decay weights, a, a^2, v.
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        decay = 0.5 ** (1 / _WINDOW)
        self._decay = torch.tensor([decay, decay * decay, decay, decay, decay], dtype=torch.float64, device=device)

    def update(self, contrast: Tensor, plain: Tensor, skipped: Tensor | None) -> None:
        """Takes in one step.

        Args:
            contrast: (k,) half the difference of the two halves' weighted sketch means.
            plain: 0-dim predicted variance of a plainly drawn batch's mean gradient; ignored where not above 0.
            skipped: the engine's flag; a skipped step changes nothing.
        """
        measured = contrast.square().sum() / max(self.k, 1)
        use = (plain > 0) & plain.isfinite() & measured.isfinite()
        measured, plain = measured.nan_to_num(0.0, 0.0, 0.0), plain.nan_to_num(0.0, 0.0, 0.0)
        row = torch.stack([torch.ones_like(measured), torch.ones_like(measured), measured, measured.square(), plain])
        sums = torch.where(use, self.sums * self._decay + row, self.sums)
        self.sums = frozen(skipped, self.sums, sums)

    def result(self) -> tuple[float, float]:
        """(ratio, standard error); nan until two steps are in. Waits for the device."""
        count, squares, a, a_sq, v = self.sums.tolist()
        if count < 2 or v <= 0:
            return float("nan"), float("nan")
        mean, n_eff = a / count, count * count / squares
        spread = max(a_sq / count - mean * mean, 0.0) * n_eff / max(n_eff - 1, 1e-9)
        return a / v, (spread / n_eff) ** 0.5 / (v / count)
