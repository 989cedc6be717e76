"""The last few individual losses of every bin, for rules that are stated on them."""

from __future__ import annotations

import torch
from torch import Tensor


class RecentLosses:
    """The last `length` individual losses of each bin, oldest first, as OpenAI's resampler keeps them."""

    def __init__(self, bins: int, device: torch.device | str, length: int = 10) -> None:
        self.values = torch.zeros(bins, length, dtype=torch.float64, device=device)
        self.count = torch.zeros(bins, dtype=torch.int64, device=device)

    def updated(self, bin: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        """(values, count) after the samples `bin` (B,), `loss` (B,), in this order; non-finite ones left out."""
        bins, length = self.values.shape
        loss = loss.double()
        bin = torch.where(loss.isfinite(), bin, bins)
        member = bin[:, None] == torch.arange(bins + 1, device=bin.device)
        arrivals = member.sum(0)
        # 0 for the newest sample of its bin, 1 for the one before, ...
        from_end = (arrivals - member.cumsum(0)).gather(1, bin[:, None]).squeeze(1)
        source = torch.arange(length, device=bin.device) + arrivals[:bins, None]
        kept = torch.where(source < length, self.values.gather(1, source.clamp(max=length - 1)), 0.0)
        # Row `bins` and column `length` collect what is dropped.
        padded = torch.zeros(bins + 1, length + 1, dtype=torch.float64, device=bin.device)
        padded[:bins, :length] = kept
        column = torch.where(from_end < length, length - 1 - from_end, length)
        padded[bin, column] = torch.where(loss.isfinite(), loss, 0.0)
        return padded[:bins, :length], (self.count + arrivals[:bins]).clamp(max=length)

    def mean_square(self) -> Tensor:
        return self.values.square().sum(1) / self.count.clamp(min=1)

    def full(self) -> Tensor:
        """(K,) bool: the bin has all its losses."""
        return self.count >= self.values.shape[1]
