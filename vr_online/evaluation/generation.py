"""Samples from a model: image k is a function of (weights, settings, k), not of ranks or batch size.

Sample k has a random generator of its own, seeded with `seed + k` and drawn from on the CPU: first its initial noise,
then, for the SDE, one draw a step. Its noise is therefore bitwise the same on any device, for any number of ranks and
any batch size, and every solver steps each sample by itself. What is left is the rounding of the network's matrix
products, whose kernels may differ with the batch size; on one kernel the results are bitwise equal.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Iterator, NamedTuple, Optional, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from vr_online.errors import UserError
from vr_online.flow.paths import get_path
from vr_online.flow.solvers import SDE_SOLVERS, Solution, Velocity, integrate, integrate_sde
from vr_online.flow.targets import Flow

if TYPE_CHECKING:
    from vr_online.config import Config, EvaluationConfig, MonitorConfig
    from vr_online.data.codecs import Codec
    from vr_online.data.format import DatasetInfo, LatentNorm
    from vr_online.models.sit import SiT

PREVIEW_ROWS = 10
BAR_REFRESH_S = 0.5


class NoiseStreams:
    """One CPU generator a sample; each `draw` continues every one of them by a latent."""

    def __init__(self, seeds: Sequence[int], shape: Sequence[int]):
        self.shape = tuple(shape)
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def draw(self) -> Tensor:
        """Standard normal float32 (samples, *shape) on the CPU."""
        return torch.stack([torch.randn(self.shape, generator=g) for g in self.generators])


def sample_labels(protocol: str, first: int, last: int, num_classes: int, seed: int) -> Tensor:
    """Labels (last - first,) int64 of samples `first` to `last` - 1; each depends only on its index and `seed`.

    `balanced` goes round the classes, so that counts differ by at most one; `random` draws each uniformly.
    """
    indices = range(first, last)
    if protocol == "balanced":
        return torch.tensor([k % num_classes for k in indices], dtype=torch.int64)
    if protocol == "random":
        return torch.tensor([_random_label(seed, k, num_classes) for k in indices], dtype=torch.int64)
    raise UserError(f"evaluation.labels: no protocol {protocol!r}; choose balanced or random")


def _random_label(seed: int, index: int, num_classes: int) -> int:
    # A counter-based generator keyed by both, so that labels share nothing with the noise of seed + index.
    return int(np.random.Generator(np.random.Philox(key=(seed % 2**64) << 64 | index)).integers(num_classes))


class Sampler:
    """Draws samples of `model` as `settings` says.

    Args:
        model: (x (B, C, H, W), t (B,) float32, y (B,) int64) to what `flow.prediction` says; `num_classes` is its null
            class. Its mode, device and dtype are used as they are.
        settings: solver, steps, guidance, labels, dtype, seed and batch size.
        norm: brings samples back to the scale of stored latents; None leaves them as the model sees data.
        num_classes: classes the model was trained with.
        latent_shape: (C, H, W); None takes the model's.
        known_classes: the first so many classes occur in the data, and labels come from them; None for all.

    Attributes:
        evaluations: velocity evaluations so far, summed over samples. Guidance does not count double.
    """

    def __init__(self, model: nn.Module, flow: Flow, settings: "EvaluationConfig", norm: Optional["LatentNorm"],
                 num_classes: int, *, latent_shape: Optional[Sequence[int]] = None,
                 known_classes: Optional[int] = None):
        self.model, self.flow, self.settings, self.norm, self.num_classes = model, flow, settings, norm, num_classes
        self.latent_shape = tuple(latent_shape or model.latent_shape)
        self.known_classes = known_classes or num_classes
        self.evaluations = 0
        self._check()

    def _check(self) -> None:
        low, high = self.settings.cfg_interval
        if not 0 <= low <= high <= 1:
            raise UserError(f"evaluation.cfg_interval: [{low}, {high}] is no part of [0, 1]; give two times, the smaller first")

    def labels(self, first: int, last: int) -> Tensor:
        """Labels (last - first,) int64 of these samples."""
        return sample_labels(self.settings.labels, first, last, self.known_classes, self.settings.seed)

    @torch.no_grad()
    def latents(self, first: int, last: int, labels: Optional[Tensor] = None) -> Tensor:
        """Raw latents (last - first, C, H, W), float32 on the model's device, of samples `first` to `last` - 1.

        Args:
            labels: (last - first,) int64 instead of those of the protocol.
        """
        chunks = list(self.batches(first, last, labels))
        return torch.cat(chunks) if chunks else torch.empty(0, *self.latent_shape)

    @torch.no_grad()
    def batches(self, first: int, last: int, labels: Optional[Tensor] = None, bar: Optional[tqdm] = None) -> Iterator[Tensor]:
        """The same, `settings.batch_size` at a time; moves `bar`, whose unit is a sample."""
        labels = self.labels(first, last) if labels is None else labels
        for start in range(first, last, self.settings.batch_size):
            stop = min(start + self.settings.batch_size, last)
            solution = self._solve(start, stop, labels[start - first : stop - first], bar)
            self.evaluations += int(solution.nfe.sum())
            if bar is not None:
                bar.update(stop - start)
            yield self.norm.denormalize(solution.x.float()) if self.norm else solution.x.float()

    def _solve(self, first: int, last: int, labels: Tensor, bar: Optional[tqdm]) -> Solution:
        s, device = self.settings, _device(self.model)
        streams = NoiseStreams(range(s.seed + first, s.seed + last), self.latent_shape)
        velocity = self._velocity(labels.to(device), bar)
        x_0, dtype = streams.draw().to(device), getattr(torch, s.dtype)
        span = self.flow.time_range(None if s.solver == "dopri5" else s.steps)
        if s.solver not in SDE_SOLVERS:
            return integrate(
                velocity, x_0, solver=s.solver, steps=s.steps, rtol=s.rtol, atol=s.atol, dtype=dtype, t_span=span,
                singular_end=self.flow.prediction == "data",
            )
        return integrate_sde(
            velocity, x_0, path=self.flow.path, noise=lambda step: streams.draw().to(device), diffusion=s.diffusion,
            steps=s.steps, last_step=s.last_step, last_step_size=s.last_step_size, dtype=dtype, t_span=span,
        )

    def _velocity(self, labels: Tensor, bar: Optional[tqdm]) -> Velocity:
        calls, shown = 0, 0.0

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            nonlocal calls, shown
            calls += 1
            if bar is not None and time.monotonic() - shown > BAR_REFRESH_S:
                shown = time.monotonic()
                bar.set_postfix(evaluations=calls)  # a sign of life where one batch takes minutes
            return self.flow.velocity(self._output(x.float(), t.float(), labels), x, t)

        return velocity

    def _output(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Guided prediction: null + cfg * (conditional - null) inside the interval (Ho and Salimans 2021).

        The conversions between predictions are affine in the output, so guiding any of them guides all.
        """
        guided = self._guided(t)
        if guided is None:
            return self.model(x, t, y)
        null = torch.full_like(y[guided], self.num_classes)
        both = self.model(torch.cat([x, x[guided]]), torch.cat([t, t[guided]]), torch.cat([y, null])).float()
        conditional, unconditional = both[: len(x)], both[len(x) :]
        conditional[guided] = unconditional + self.settings.cfg * (conditional[guided] - unconditional)
        return conditional

    def _guided(self, t: Tensor) -> Optional[slice | Tensor]:
        """Which samples guidance acts on at `t` (B,); None for none, which then costs no second evaluation."""
        low, high = self.settings.cfg_interval
        if self.settings.cfg == 1 or low >= high:
            return None
        if low <= 0 and high >= 1:
            return slice(None)
        indices = ((t >= low) & (t <= high)).nonzero()[:, 0]
        return indices if len(indices) else None


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


class LoadedModel(NamedTuple):
    """A checkpoint ready to sample: the network in evaluation mode and everything it was trained with."""

    model: "SiT"
    config: "Config"
    info: "DatasetInfo"
    step: int
    flow: Flow


def load_model(source: str | Path, weights: str = "ema", *, step: Optional[int] = None, device: str | torch.device = "cpu",
               dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The model of a checkpoint folder, or of a run (its newest whole checkpoint, or that of `step`).

    Args:
        weights: `ema` or `raw`.

    Raises:
        UserError: there is no whole checkpoint, or its files contradict each other.
    """
    from vr_online import checkpoint
    from vr_online.config import load_config
    from vr_online.data.format import DatasetInfo
    from vr_online.models.sit import build_sit
    from vr_online.models.weights import load_state

    folder = checkpoint.find(source, step)
    config, info = load_config(folder / "config.yaml"), DatasetInfo.load(folder / "dataset.json")
    settings = config.model.model_copy(update={"compile": False, "checkpoint_activations": False})
    model = build_sit(settings, info.latent_shape, info.num_classes)
    load_state(model, checkpoint.load_weights(folder, weights), str(folder))
    model.to(device, dtype).eval().requires_grad_(False)
    flow = Flow(get_path(config.flow.path), config.flow.prediction)
    return LoadedModel(model, config, info, int(checkpoint.manifest_of(folder)["step"]), flow)


@torch.no_grad()
def decode_images(codec: "Codec", latents: Tensor, batch_size: int = 64) -> np.ndarray:
    """Raw latents (N, C, H, W) to uint8 images (N, h, w, 3 or 1) by rounding, `batch_size` at a time."""
    parts = [codec.decode(part) for part in latents.split(batch_size)]
    pixels = torch.cat([part.float().mul(255).round_().clamp_(0, 255).to(torch.uint8).cpu() for part in parts])
    return pixels.permute(0, 2, 3, 1).contiguous().numpy()


def preview(model: nn.Module, flow: Flow, info: "DatasetInfo", settings: "MonitorConfig",
            codec_path: Optional[str] = None) -> np.ndarray:
    """A labelled grid of samples, (H, W, 3) uint8: up to ten classes, spread over all, one a row.

    The same seeds every time, so that grids of different steps show the same noise. Where the codec's weights are not
    at hand, shows the latents' first channels instead of stopping a run for a picture.

    Args:
        codec_path: where the codec's weights are now; None for where they were when encoding.
    """
    from vr_online.config import EvaluationConfig
    from vr_online.monitor.grid import image_grid

    rows, columns = min(PREVIEW_ROWS, info.num_classes), settings.samples_per_class
    classes = [row * info.num_classes // rows for row in range(rows)]
    labels = torch.tensor(classes).repeat_interleave(columns)
    how = EvaluationConfig(solver="heun", steps=settings.samples_steps, cfg=settings.samples_cfg)
    latents = Sampler(model, flow, how, info.norm, model.num_classes).latents(0, len(labels), labels)
    return image_grid(_pictures(info, latents, codec_path), columns, labels=[info.class_names[c] for c in classes])


def _pictures(info: "DatasetInfo", latents: Tensor, codec_path: Optional[str]) -> np.ndarray:
    from vr_online.data.codecs import codec_for

    try:
        return decode_images(codec_for(info, codec_path, latents.device), latents)
    except UserError:
        shown = info.norm.normalize(latents)[:, : 3 if latents.shape[1] >= 3 else 1]
        return ((shown / 6 + 0.5).clamp(0, 1) * 255).byte().permute(0, 2, 3, 1).cpu().numpy()
