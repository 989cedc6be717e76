"""The variance reduction that was got, beside the one that was predicted.

The weighted sketch mean of a step's global batch, G_t = (1/B) sum_i w_i s_i, sketches the gradient the
optimizer gets. Weights change slowly, so a_t = ||G_t - G_{t-1}||^2 / (2 k) has the minibatch gradient's
variance as its expectation (plus a drift of second order). Against it stands what plain draws from q would
have, v_t = sum_b q_b grad_var_b / B (stratified) or (sum_b q_b grad_sq_b - ||g||^2) / B (independent), from the
per-bin statistics. The ratio is mean(a) / mean(v), both over a decaying window; its standard error is that of
mean(a), times sqrt(3/2) because neighbouring differences share a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vr_online.timesteps.statistics import frozen

_WINDOW = 500  # half-life in steps


class AchievedRatio:
    """Running ratio of measured to plainly predicted minibatch-gradient variance, on the device."""

    NAMES = ("previous", "known", "sums")

    def __init__(self, k: int, device: torch.device | str) -> None:
        self.k = k
        self.previous = torch.zeros(k, dtype=torch.float64, device=device)
        self.known = torch.zeros((), dtype=torch.float64, device=device)
        # Decayed: count, sum of squared decay weights, a, a^2, v.
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        decay = 0.5 ** (1 / _WINDOW)
        self._decay = torch.tensor([decay, decay * decay, decay, decay, decay], dtype=torch.float64, device=device)

    def update(self, mean: Tensor, plain: Tensor, skipped: Tensor | None) -> None:
        """Takes in one step.

        Args:
            mean: (k,) weighted sketch mean of the global batch.
            plain: 0-dim predicted variance of a plainly drawn batch's mean gradient; ignored where not above 0.
            skipped: the engine's flag; a skipped step changes nothing.
        """
        half = (mean - self.previous).square().sum() / (2 * max(self.k, 1))
        use = self.known * (plain > 0) * half.isfinite()
        half, plain = half.nan_to_num(0.0, 0.0, 0.0), plain.nan_to_num(0.0)
        row = torch.stack([torch.ones_like(half), torch.ones_like(half), half, half.square(), plain])
        sums = torch.where(use > 0, self.sums * self._decay + row, self.sums)
        self.sums = frozen(skipped, self.sums, sums)
        self.previous = frozen(skipped, self.previous, mean)
        self.known = frozen(skipped, self.known, torch.ones_like(self.known))

    def result(self) -> tuple[float, float]:
        """(ratio, standard error); nan until two differences are in. Waits for the device."""
        count, squares, a, a_sq, v = self.sums.tolist()
        if count < 2 or v <= 0:
            return float("nan"), float("nan")
        mean, n_eff = a / count, count * count / squares
        spread = max(a_sq / count - mean * mean, 0.0) * n_eff / max(n_eff - 1, 1e-9)
        return a / v, (1.5 * spread / n_eff) ** 0.5 / (v / count)
