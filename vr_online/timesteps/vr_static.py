"""The published offline density: loss-gradient variance as a function of t, from data alone, no network.

For x_t = alpha x_1 + sigma x_0 and the posterior of x_1 given x_t over a reference set of latents x_i,

    weight_i = softmax_i( -||x_t - alpha x_i||^2 / (2 sigma^2) ),

the trace of the target's posterior covariance is factor^2 (sum_i weight_i ||x_i||^2 - ||sum_i weight_i x_i||^2):
given x_t, the velocity alpha' x_1 + sigma' x_0 varies with x_1 by factor = alpha' - alpha sigma' / sigma, the noise
by alpha / sigma, the data by 1. Its mean over x_t, in each bin of t, normalised, is the density (VR-Sampling).

The sums run over chunks of the reference set with a running maximum, so memory is the set itself in float16
and a few chunks. On the VP path the velocity's variance grows like 1 / (1 - t) at the data end.

The reference set is finite, so in many dimensions the posterior rests on one latent as soon as the noise no longer
hides which, and the variance vanishes from some t on, as published. A share of the uniform density keeps
those times in the objective.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Iterator

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from vr_online.errors import UserError
from vr_online.flow.paths import Path
from vr_online.timesteps.densities import write_table

_CHUNK_ELEMENTS = 2**24  # of one chunk of references in working precision
_FEW_DIMENSIONS = 256


@dataclass(frozen=True)
class StaticVariance:
    """The estimate per bin: `variance` and its standard error `stderr`, (K,), per latent dimension."""

    edges: np.ndarray
    variance: np.ndarray
    stderr: np.ndarray

    def density(self, floor: float = 0.0) -> np.ndarray:
        """(K,) values of the normalised density, with a share `floor` of the uniform one."""
        return floor + (1 - floor) * self.variance / (self.variance * np.diff(self.edges)).sum()

    def collapse(self) -> float | None:
        """The t from which the variance is nothing: each x_t there points to one latent of the finite set. None
        where there is no such t."""
        tail = self.variance < 1e-3 * self.variance.max()
        first = len(tail) - int(np.argmin(tail[::-1]))
        return float(self.edges[first]) if tail[-1] else None

    def save(self, file: str | FilePath, floor: float = 0.0, **notes) -> None:
        """Writes the table that `vr_static(file)` reads."""
        details = dict(variance=self.variance, stderr=self.stderr, floor=floor, kind="vr_static", **notes)
        write_table(file, self.edges, self.density(floor), **details)


def estimate(
    references: Tensor, path: Path, *, prediction: str = "velocity", bins: int = 32, queries: int = 64, seed: int = 0,
    device: torch.device | str = "cpu", progress: bool = False,
) -> StaticVariance:
    """Monte Carlo over `queries` points x_t per bin, made from the references themselves.

    Args:
        references: (N, ...) normalised latents x_1, any floating dtype; kept as they are, on the CPU.
        path: interpolation path.
        prediction: the target: velocity, noise or data.
        progress: show a bar.
    """
    references = references.flatten(1)
    generator = torch.Generator().manual_seed(seed)
    t = (torch.arange(bins)[:, None] + _stratified(bins, queries, generator)) / bins
    t = t.flatten().double()
    # Where neighbours are close, float32 inner products are too coarse; there they are cheap in float64.
    dtype = torch.float64 if references.shape[1] <= _FEW_DIMENSIONS else torch.float32
    rows = torch.randint(len(references), t.shape, generator=generator)
    alpha, sigma, d_alpha, d_sigma = (c[:, None] for c in path.coefficients(t))
    noise = torch.randn(len(t), references.shape[1], generator=generator, dtype=dtype)
    x_t = alpha.to(dtype) * references[rows].to(dtype) + sigma.to(dtype) * noise
    spread = posterior_trace(references, x_t.to(device), alpha.to(device), sigma.to(device), progress=progress).cpu()
    factor = {"velocity": d_alpha - alpha * d_sigma / sigma, "noise": alpha / sigma, "data": torch.ones_like(t)[:, None]}[prediction]
    values = (factor[:, 0].square() * spread / references.shape[1]).view(bins, queries)
    stderr = values.std(1) / queries**0.5
    return StaticVariance(np.linspace(0, 1, bins + 1), values.mean(1).numpy(), stderr.numpy())


def _stratified(bins: int, queries: int, generator: torch.Generator) -> Tensor:
    """(bins, queries) offsets in [0, 1), one in each of `queries` equal parts."""
    return (torch.arange(queries) + torch.rand(bins, queries, generator=generator, dtype=torch.float64)) / queries


def posterior_trace(references: Tensor, x_t: Tensor, alpha: Tensor, sigma: Tensor, progress: bool = False) -> Tensor:
    """(Q,) float64 trace of the covariance of x_1 given x_t under the uniform prior over `references`.

    Args:
        references: (N, D).
        x_t: (Q, D), in the working precision and on the working device.
        alpha, sigma: (Q, 1) float64.
    """
    count, size = len(x_t), x_t.shape[1]
    peak = torch.full((count, 1), -torch.inf, dtype=torch.float64, device=x_t.device)
    total, second = torch.zeros_like(peak), torch.zeros_like(peak)
    mean = torch.zeros_like(x_t)
    bar = tqdm(total=len(references), desc="references", unit="latent", disable=not progress)
    for chunk in _chunks(references, max(1, _CHUNK_ELEMENTS // size)):
        x = chunk.to(x_t.device, x_t.dtype)
        norms = x.double().square().sum(1)
        # ||x_t||^2 is the same for every reference and drops out of the softmax.
        logits = (alpha * (x_t @ x.T).double() - 0.5 * alpha.square() * norms) / sigma.square()
        top = torch.maximum(peak, logits.max(1, keepdim=True).values)
        keep, weights = torch.exp(peak - top), torch.exp(logits - top)
        total = total * keep + weights.sum(1, keepdim=True)
        second = second * keep + weights @ norms[:, None]
        mean = mean * keep.to(mean.dtype) + weights.to(mean.dtype) @ x
        peak = top
        bar.update(len(chunk))
    bar.close()
    return (second / total - (mean.double() / total).square().sum(1, keepdim=True))[:, 0].clamp(min=0)


def _chunks(references: Tensor, size: int) -> Iterator[Tensor]:
    for start in range(0, len(references), size):
        yield references[start : start + size]


def load_references(source: str, subset: int, seed: int = 0) -> Tensor:
    """(N, ...) float16 normalised latents, N at most `subset`.

    Args:
        source: a folder of latent shards, or an .npy / .npz of an array (N, ...) that is normalised already.

    Raises:
        UserError: nothing usable there.
    """
    if FilePath(source).suffix in (".npy", ".npz"):
        return _load_array(source, subset, seed)
    from vr_online.data.format import DatasetInfo

    info = DatasetInfo.load(source)
    count = min(subset, info.samples)
    if count < 2:
        raise UserError(f"{source}: holds {info.samples} latents, and a posterior needs at least two")
    return _load_shards(source, info, count, seed)


def _load_array(source: str, subset: int, seed: int) -> Tensor:
    try:
        content = np.load(source, allow_pickle=False)
        array = content if isinstance(content, np.ndarray) else content[content.files[0]]
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"{source}: cannot read an array of latents: {error}") from None
    if array.ndim < 2 or len(array) < 2 or not np.issubdtype(array.dtype, np.floating):
        raise UserError(f"{source}: expected floating-point latents (N, ...), N at least 2, got {array.dtype} {array.shape}")
    if subset < len(array):
        array = array[np.sort(np.random.default_rng(seed).choice(len(array), subset, replace=False))]
    return torch.from_numpy(np.ascontiguousarray(array))


def _load_shards(source: str, info: Any, count: int, seed: int) -> Tensor:
    from vr_online.config import DataConfig
    from vr_online.data.reader import LatentStream

    references = torch.empty(count, *info.latent_shape, dtype=torch.float16)
    stream = LatentStream(DataConfig(shards=source, workers=0), info, batch_size=min(count, 256), seed=seed)
    filled = 0
    with tqdm(total=count, desc="reading latents", unit="latent") as bar:
        for batch in stream:
            part = info.norm.normalize(batch.latent)[: count - filled]
            references[filled : filled + len(part)] = part
            filled += len(part)
            bar.update(len(part))
            if filled == count:
                break
    stream.close()
    return references
