"""Per-bin statistics of the live batches: counts, losses and gradient sketches, decayed by count.

A bin's sums lose weight only as new samples of that bin arrive, so a bin that is seldom visited does not go
stale faster than it is refreshed. Everything stays on the device in float64; one step's sums travel between
ranks as one flat float32 buffer whose size depends on bins and k alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

# Columns of one step's sums, followed by the k sketch sums.
STEP_COLUMNS = ("count", "nonfinite", "loss", "loss_sq", "sketch_sq")
# A bin's half-life is at most this share of the samples it has seen: the first steps of a run, whose gradients
# are unlike the later ones, are forgotten early.
_RAMP = 0.25


@dataclass
class BinView:
    """What the estimator knows of each bin; every field is (K,) float64 unless it says otherwise.

    `grad_var` and `grad_sq` are the within-bin variance and second moment of the per-sample gradient over the
    tapped layers, in squared gradient norm; `signal` is the squared norm of the bin's mean gradient. Bins with
    fewer effective samples than asked for hold a mean of their neighbours instead.
    """

    n_eff: Tensor
    loss: Tensor
    loss_sq: Tensor
    grad_var: Tensor
    grad_sq: Tensor
    signal: Tensor
    mean_sketch: Tensor
    """(K, k) mean sketch of the bin's gradient."""
    visits: Tensor
    age: Tensor
    """Images since the bin was last visited."""
    history: "History"
    centers: Tensor
    """Middle of each bin."""


@dataclass
class History:
    """The run's past, thinned: per row the images seen and the bins' mean loss and gradient variance."""

    capacity: int = 64
    every: int = 1
    """Folded steps between two rows; doubles when the rows are full."""
    images: list[int] = field(default_factory=list)
    loss: list[Tensor] = field(default_factory=list)
    grad_var: list[Tensor] = field(default_factory=list)

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def record(self, step: int, images: int, loss: Tensor, grad_var: Tensor) -> None:
        """Adds a row when `step` is due; loss and grad_var are (K,)."""
        if not self.due(step):
            return
        self.images.append(images)
        self.loss.append(loss)
        self.grad_var.append(grad_var)
        if len(self.images) > self.capacity:
            self.every *= 2
            self.images, self.loss, self.grad_var = self.images[::2], self.loss[::2], self.grad_var[::2]


class BinStatistics:
    """Decayed sums of K bins.

    Args:
        bins: K.
        k: length of a sketch; 0 without a probe.
        half_life: images over which a bin visited at the mean rate 1 / K loses half its weight.
        device: where the sums live.
    """

    def __init__(self, bins: int, k: int, half_life: float, device: torch.device | str = "cpu") -> None:
        self.bins, self.k, self.device = bins, k, torch.device(device)
        self.half_life = half_life / bins
        zeros = lambda *shape: torch.zeros(*shape, dtype=torch.float64, device=self.device)  # noqa: E731
        # Columns: n, sum of squared decay weights, loss, loss^2, ||s||^2, s_1 .. s_k.
        self.sums = zeros(bins, 5 + k)
        self.visits, self.age, self.nonfinite = zeros(bins), zeros(bins), zeros(bins)
        self.history = History()
        self.centers = (torch.arange(bins, dtype=torch.float64, device=self.device) + 0.5) / bins

    @property
    def step_width(self) -> int:
        return len(STEP_COLUMNS) + self.k

    def step_sums(self, bin: Tensor, loss: Tensor, weight: Tensor, sketch: Tensor | None) -> Tensor:
        """One micro-batch as sums per bin: (K, 5 + k) float64.

        Args:
            bin: (B,) int64.
            loss: (B,) raw per-sample loss.
            weight: (B,); a sample of weight 0 says nothing about its gradient and is left out.
            sketch: (B, k) of the raw per-sample loss's gradient, or None.
        """
        loss = loss.double()
        sketch = torch.zeros(len(bin), self.k, dtype=torch.float64, device=loss.device) if sketch is None else sketch.double()
        finite = loss.isfinite() & sketch.isfinite().all(1)
        used = (finite & (weight > 0))[:, None]
        sq = sketch.square().sum(1)
        columns = torch.stack([torch.ones_like(loss), loss, loss.square(), sq], 1)
        columns = torch.where(used, columns, 0.0)
        bad = (~finite & (weight > 0)).double()[:, None]
        rows = torch.cat([columns[:, :1], bad, columns[:, 1:], torch.where(used, sketch, 0.0)], 1)
        return members(bin, self.bins) @ rows

    def refreshed(self, view: "BinView", step: Tensor) -> "BinView":
        """`view` with the spread of one step's own samples, (K, 5 + k) sums, in the bins that got enough of them."""
        count, sketch_sq, sketch = step[:, :1].double(), step[:, 4].double(), step[:, 5:].double()
        n, k = count[:, 0], max(self.k, 1)
        grad_sq = sketch_sq / n.clamp(min=1) / k
        grad_var = (sketch_sq - sketch.square().sum(1) / n.clamp(min=1)) / (n - 1).clamp(min=1) / k
        return replace(
            view, grad_sq=torch.where(n >= 1, grad_sq, view.grad_sq), grad_var=torch.where(n >= 2, grad_var, view.grad_var)
        )

    def fold(self, step: Tensor, batch_size: int, skipped: Tensor | None) -> None:
        """Takes in one step's sums over the global batch, (K, 5 + k); a step with skipped != 0 only adds to the
        count of non-finite samples."""
        step = step.double()
        count = step[:, 0]
        visits = self.visits + count
        half_life = (visits * _RAMP).clamp(min=2.0, max=max(self.half_life, 2.0))
        decay = torch.exp2(-count / half_life)[:, None]
        fresh = torch.cat([count[:, None], count[:, None], step[:, 2:]], 1)
        sums = self.sums * decay
        sums[:, 1] *= decay[:, 0]
        sums += fresh
        age = torch.where(count > 0, 0.0, self.age + batch_size)
        self.nonfinite = self.nonfinite + step[:, 1]
        self.sums = frozen(skipped, self.sums, sums)
        self.visits = frozen(skipped, self.visits, visits)
        self.age = frozen(skipped, self.age, age)

    def view(self, warmup: float = 0.0) -> BinView:
        """The statistics per bin; a bin below `warmup` effective samples borrows from its neighbours."""
        n, n_sq, loss, loss_sq, sketch_sq = self.sums[:, :5].unbind(1)
        some = n.clamp(min=1e-300)
        n_eff = n.square() / n_sq.clamp(min=1e-300)
        share = (1 / n_eff.clamp(min=1e-300)).clamp(max=1.0)
        mean_sketch = self.sums[:, 5:] / some[:, None]
        k = max(self.k, 1)
        mean_sq = mean_sketch.square().sum(1) / k
        grad_sq = sketch_sq / some / k
        # With decay weights a_i, E[mean square - square of mean] is the variance times 1 - sum a^2 / (sum a)^2.
        grad_var = ((grad_sq - mean_sq) / (1 - share).clamp(min=1e-12)).clamp(min=0) * (share < 1)
        signal = (mean_sq - grad_var * share).clamp(min=0)
        curves = [loss / some, loss_sq / some, grad_sq, signal]
        curves = [borrow(c, n_eff, n_eff >= max(warmup, 1e-9)) for c in curves]
        grad_var = borrow(grad_var, n_eff, n_eff >= max(warmup, 1.5))
        return BinView(
            n_eff=n_eff, loss=curves[0], loss_sq=curves[1], grad_var=grad_var, grad_sq=curves[2], signal=curves[3],
            mean_sketch=mean_sketch, visits=self.visits, age=self.age, history=self.history, centers=self.centers,
        )

    def state_dict(self) -> dict:
        """Arrays and numbers, free of the world size."""
        tensors = {name: getattr(self, name).cpu().numpy() for name in ("sums", "visits", "age", "nonfinite")}
        past = self.history
        rows = {name: _stacked(getattr(past, name), self.bins) for name in ("loss", "grad_var")}
        images = np.asarray(past.images, np.int64)
        return {**tensors, "history": {"every": past.every, "images": images, **rows}}

    def load_state_dict(self, state: dict) -> None:
        for name in ("sums", "visits", "age", "nonfinite"):
            setattr(self, name, self._tensor(state[name]))
        rows = state["history"]
        self.history = History(
            every=int(rows["every"]), images=[int(i) for i in rows["images"]],
            loss=[self._tensor(r) for r in rows["loss"]], grad_var=[self._tensor(r) for r in rows["grad_var"]],
        )

    def _tensor(self, values) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float64).clone().to(self.device)


def members(bin: Tensor, bins: int) -> Tensor:
    """(K, B) float64, 1 where the sample is of the bin. Its product with the samples' values sums them per bin, the same
    every time also on CUDA, which scatter_add is not."""
    return (bin[None, :] == torch.arange(bins, device=bin.device)[:, None]).double()


def _stacked(rows: list[Tensor], bins: int) -> np.ndarray:
    return torch.stack(rows).cpu().numpy() if rows else np.zeros((0, bins))


def frozen(skipped: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
    """`old` where the step was skipped, else `new`, without asking the device."""
    return new if skipped is None else torch.where(skipped.reshape(()) > 0, old, new)


def borrow(values: Tensor, n_eff: Tensor, enough: Tensor) -> Tensor:
    """`values` (K,), those of bins without `enough` samples replaced by a mean over all bins that weighs samples
    by exp(-distance in bins)."""
    index = torch.arange(len(values), dtype=torch.float64, device=values.device)
    kernel = torch.exp(-(index[:, None] - index[None, :]).abs()) * n_eff
    mean = (kernel @ values) / kernel.sum(1).clamp(min=1e-300)
    return torch.where(enough, values, mean)
