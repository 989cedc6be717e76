"""`OnlineSampler`: draws the times of every batch, and learns from the batch where to draw the next ones.

    probe = attach_probe(model, config.probe)
    sampler = OnlineSampler(config, probe=probe)
    draw = sampler.draw(batch_size)                      # .t (B,), .weight (B,), .bin (B,)
    loss = (draw.weight * per_sample_loss).mean()
    loss.backward()
    sampler.update(draw, per_sample_loss)
    optimizer.step()
    sampler.commit()                                     # or commit(skipped)

Nothing in draw, update or commit waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vr_online.config import TimestepConfig
from vr_online.errors import UserError
from vr_online.flow.paths import get_path
from vr_online.timesteps import proposal as prop
from vr_online.timesteps import rules
from vr_online.timesteps.achieved import AchievedRatio
from vr_online.timesteps.densities import Spec, bin_masses
from vr_online.timesteps.draws import half_signs, invert, to_device, uniforms
from vr_online.timesteps.probe import Probe
from vr_online.timesteps.recent import RecentLosses
from vr_online.timesteps.statistics import BinStatistics, BinView, frozen, members

_VERSION = 1
_CANNOT_PAY = 0.97  # a best possible gain above this is not worth adapting for
_EMA_DECAY = 0.999  # of loss_ema, as published


@dataclass
class Draw:
    """Times of one micro-batch.

    Attributes:
        t: (B,) float32 in (0, 1).
        weight: (B,) float32 importance weights, E_p[w] = 1.
        bin: (B,) int64.
        first: position of the micro-batch in the global batch.
    """

    t: Tensor
    weight: Tensor
    bin: Tensor
    first: int = 0


class OnlineSampler:
    """Draws t from a proposal p that follows the live gradient variance, weighted for the target q.

    Args:
        config: the `timesteps` section.
        path: interpolation path (`vr_online.flow.paths`), linear if not given; targets that turn the loss into
            information look at it, and its name is stored so that a checkpoint of another path is refused.
        prediction: space of the per-sample loss: velocity, noise or data.
        seed: draws depend on (seed, step) alone.
        probe: from `attach_probe`; needed by `online_vr` and `grad_variance`.
        batch_size: global batch, used when `draw` is not told a size.
        accumulation: micro-batches per optimizer step.
        rank, world_size, group: this process among those that share the batch. With world_size above 1 the
            statistics are all-reduced over `group`.
        device: where t is wanted.

    Raises:
        UserError: the configuration needs a probe that was not given.
    """

    def __init__(
        self, config: TimestepConfig, *, path: Any = None, prediction: str = "velocity", seed: int = 0,
        probe: Probe | None = None, batch_size: int | None = None, accumulation: int = 1, rank: int = 0,
        world_size: int = 1, group: Any = None, device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.path, self.prediction = config, path or get_path("linear"), prediction
        self.seed, self.batch_size, self.accumulation = seed, batch_size, accumulation
        self.rank, self.world_size, self.group, self.device = rank, world_size, group, torch.device(device)
        self.probe = probe
        self.stratified = config.draws == "stratified"
        self.target = rules.parse_target(config.target)
        self.proposal = rules.parse_proposal(config.proposal)
        self._check_needs()
        self.statistics = BinStatistics(config.bins, probe.size if probe else 0, config.half_life, self.device)
        self.achieved = AchievedRatio(self.statistics.k, self.device)
        self.recent = RecentLosses(config.bins, self.device) if self.proposal.name == "loss_second_moment" else None
        self.loss_ema = torch.ones(config.bins, dtype=torch.float64, device=self.device)
        self._smooth = prop.smoothing_matrix(config.bins, config.smooth, self.device)
        self._fixed: dict[Spec, Tensor] = {}
        self.step, self.images = 0, 0
        self._micro = self._updates = 0
        self._global: tuple[Tensor, Tensor, Tensor] | None = None
        self._sums: Tensor | None = None
        self._signs: Tensor | None = None
        self._contrast = torch.zeros(self.statistics.k, dtype=torch.float64, device=self.device)
        self._slots: Tensor | None = None
        self._flight: tuple[Tensor, Any] | None = None
        self._skipped: Tensor | None = None
        self._view: BinView | None = None
        self._open = False
        self._refresh()

    # The three calls of a training step

    def draw(self, micro_batch_size: int | None = None) -> Draw:
        """The next micro-batch's times; arms the probe for the forward pass that follows.

        Args:
            micro_batch_size: samples of this rank's micro-batch, the same for every rank and every micro-batch
                of a step; None divides `batch_size`.
        """
        size = micro_batch_size or self._default_size()
        if not self._open or self._micro == self.accumulation:
            self._begin_step(size)
        share = len(self._global[0]) // self.accumulation
        if size * self.world_size != share:
            raise ValueError(f"micro-batch of {size} samples in a step that began with {share // self.world_size}")
        first = self._micro * share + self.rank * size
        self._micro += 1
        if self.probe is not None:
            self.probe.arm(size, self.device)
        t, weight, bin = (values[first : first + size] for values in self._global)
        return Draw(t, weight, bin, first)

    def update(self, draw: Draw, per_sample_loss: Tensor, scale: float | Tensor | None = None) -> None:
        """Learns from a micro-batch, after its backward pass.

        Args:
            draw: what `draw` returned for it.
            per_sample_loss: (B,) unweighted losses.
            scale: factor between the loss that was differentiated and (weight * per_sample_loss).mean();
                None is 1 / accumulation.
        """
        loss = per_sample_loss.detach()
        if loss.shape != draw.t.shape:
            raise ValueError(f"per_sample_loss has shape {tuple(loss.shape)}, expected {tuple(draw.t.shape)}")
        sketch = self._sketch(draw, 1 / self.accumulation if scale is None else scale)
        sums = self.statistics.step_sums(draw.bin, loss, draw.weight, sketch)
        self._sums = sums if self._sums is None else self._sums + sums
        if sketch is not None:
            signed = self._signs[draw.first : draw.first + len(loss)] * draw.weight
            usable = torch.where(sketch.isfinite().all(1, keepdim=True), sketch, 0.0)
            self._contrast = self._contrast + signed.double() @ usable.double()
        if self.recent is not None:
            if self._slots is None:
                self._slots = torch.zeros(len(self._global[0]), device=self.device)
            self._slots[draw.first : draw.first + len(loss)] = loss.float()
        self._updates += 1
        if self._updates == self.accumulation:
            self._launch()

    def commit(self, skipped: Tensor | None = None) -> None:
        """Ends the optimizer step.

        Args:
            skipped: 0-dim or (1,) tensor on the device; not 0 where the engine skipped the step, which then
                changes no statistic. None means the step was taken.
        """
        self._launch()
        self._skipped = skipped
        self._open = False

    # What people look at

    def snapshot(self) -> dict[str, np.ndarray]:
        """The state per bin as arrays, for plots. Waits for the device."""
        self._settle()
        view = self._current_view()
        curves = {
            "p": self.p, "q": self.q, "weight": self.weight, "grad_var": view.grad_var, "grad_sq": view.grad_sq,
            "signal": view.signal, "loss": view.loss, "loss_sq": view.loss_sq, "n_eff": view.n_eff,
            "visits": view.visits, "age": view.age, "nonfinite": self.statistics.nonfinite,
        }
        packed = torch.stack(list(curves.values())).cpu().numpy()
        edges = np.linspace(0, 1, self.config.bins + 1)
        return {"edges": edges, **dict(zip(curves, packed))}

    def metrics(self) -> dict[str, float]:
        """Numbers for a log step. Waits for the device.

        `gain` is the predicted and `achieved` the measured ratio of minibatch-gradient variance to that of plain
        draws from q (there once it is known), `best_gain` the least any unbiased proposal could have, and `can_pay`
        says whether that is worth having (1) or not (0).
        """
        self._settle()
        view = self._current_view()
        values = {
            "ess": prop.effective_share(self.p, self.weight), "weight_max": self.weight.max(),
            "ready": self.ready.double(), "n_eff_min": torch.where(self.q > 0, view.n_eff, torch.inf).min(),
            "age_max": torch.where(self.q > 0, view.age, 0.0).max(), "nonfinite": self.statistics.nonfinite.sum(),
        }
        if self.probe is not None:
            values["gain"] = prop.gain(view, self.q, self.p, self.weight, self.stratified)
            values["best_gain"] = prop.best_gain(view, self.q, self.stratified)
        names = list(values)
        result = dict(zip(names, torch.stack([values[n].double() for n in names]).tolist()))
        result["bytes_per_step"] = float(self.bytes_per_step)
        if self.probe is not None:
            result["can_pay"] = float(result["best_gain"] <= _CANNOT_PAY)
            ratio, error = self.achieved.result()
            if math.isfinite(ratio):
                result["achieved"], result["achieved_error"] = ratio, error
        return result

    def verdict(self) -> str:
        """One sentence on whether adapting the proposal pays here. Waits for the device."""
        if self.probe is None:
            return "the gradient variance over t is not measured; timesteps.probe.enabled=true does, and proposal=online_vr learns from it"
        values = self.metrics()
        if not values["ready"]:
            return f"still warming up: the least visited bin has {values['n_eff_min']:.1f} of {self.config.warmup:g} samples"
        if not values["can_pay"]:
            return (
                f"adapting the proposal cannot pay here: the gradient variance is so even over t that the best proposal "
                f"keeps {values['best_gain']:.3f} of it"
            )
        got = f"predicted gain {values['gain']:.3f}"
        if "achieved" in values:
            got += f", achieved {values['achieved']:.3f} +- {values['achieved_error']:.3f}"
        if values["gain"] > _CANNOT_PAY:
            return f"adapting would pay (best gain {values['best_gain']:.3f}), but timesteps.proposal={self.proposal} does not get it: {got}"
        return f"adapting pays: {got}"

    @property
    def bytes_per_step(self) -> int:
        """Bytes of statistics that each rank contributes to the step's one all-reduce."""
        slots = (self.batch_size or 0) if self.recent is not None else 0
        if self.recent is not None and self._global is not None:
            slots = len(self._global[0])
        return 4 * (self.config.bins * self.statistics.step_width + self.statistics.k + slots)

    # State

    def state_dict(self) -> dict:
        """Everything the distribution depends on: numbers, strings and numpy arrays, free of the world size. Call
        it between commit and the next draw."""
        if self._open:
            raise RuntimeError("the sampler is in the middle of a step: call commit() before state_dict()")
        self._settle()
        state = {"version": _VERSION, **self._identity(), "step": self.step, "images": self.images}
        state["statistics"] = self.statistics.state_dict()
        state["achieved"] = {n: getattr(self.achieved, n).cpu().numpy() for n in AchievedRatio.NAMES}
        state["density"] = {n: getattr(self, n).cpu().numpy() for n in ("p", "q", "loss_ema")}
        if self.recent is not None:
            state["recent"] = {"values": self.recent.values.cpu().numpy(), "count": self.recent.count.cpu().numpy()}
        return state

    def load_state_dict(self, state: dict) -> None:
        """Continues where `state_dict` left off, on any number of ranks.

        Raises:
            UserError: the state was made with other bins, path, or probe; the message says which.
        """
        self._check_identity(state)
        self.step, self.images = int(state["step"]), int(state["images"])
        self.statistics.load_state_dict(state["statistics"])
        self._view = None
        for name in AchievedRatio.NAMES:
            setattr(self.achieved, name, self._tensor(state["achieved"][name]))
        density = {n: self._tensor(v) for n, v in state["density"].items()}
        self.loss_ema = density["loss_ema"]
        if self.recent is not None and "recent" in state:
            self.recent.values = self._tensor(state["recent"]["values"])
            self.recent.count = self._tensor(state["recent"]["count"]).long()
        self._open, self._sums, self._slots, self._flight, self._skipped = False, None, None, None, None
        self._micro = self._updates = 0
        self._refresh()
        if (state["target"], state["proposal"]) == (str(self.target), str(self.proposal)):
            # With update_every above 1 the densities in use are older than the statistics.
            self._use(density["q"], density["p"], self.ready)

    def _identity(self) -> dict:
        return {
            "bins": self.config.bins, "path": self.path.name, "k": self.probe.k if self.probe else 0,
            "layers": sorted(self.probe.layers) if self.probe else [],
            "target": str(self.target), "proposal": str(self.proposal),
        }

    def _check_identity(self, state: dict) -> None:
        if state.get("version") != _VERSION:
            raise UserError(f"timestep sampler state has version {state.get('version')}, this program reads version {_VERSION}")
        mine = self._identity()
        keys = {"bins": "timesteps.bins", "path": "flow.path", "k": "timesteps.probe.k", "layers": "timesteps.probe.layers"}
        for name, key in keys.items():
            stored = state[name]
            if name == "path" and stored is None:
                continue  # written where none was named
            if stored != mine[name]:
                shown = (f"{len(stored)} layers", f"{len(mine[name])} layers") if name == "layers" else (stored, mine[name])
                raise UserError(
                    f"the checkpoint's timestep statistics were made with {key} = {shown[0]}, this run has {shown[1]}: "
                    f"they mean something else there. Set {key} back, or start a new run"
                )

    # Inside a step

    def _default_size(self) -> int:
        if self.batch_size is None:
            raise ValueError("draw needs micro_batch_size when the sampler was not given batch_size")
        return self.batch_size // (self.world_size * self.accumulation)

    def _begin_step(self, size: int) -> None:
        if self._open:
            self.commit()
        self._settle()
        if self.step % self.config.update_every == 0:
            self._refresh()
        total = size * self.world_size * self.accumulation
        u = to_device(uniforms(total, self.seed, self.step, self.stratified), self.device)
        t, bin = invert(u, self.p)
        self._global = (t, self.weight[bin].float(), bin)
        self._signs = half_signs(u, self.stratified)
        self._open, self._micro, self._updates = True, 0, 0
        self.step += 1
        self.images += total

    def _sketch(self, draw: Draw, scale: float | Tensor) -> Tensor | None:
        """(B, k^2) sketch of the gradient of each sample's own loss."""
        if self.probe is None:
            return None
        factor = draw.weight * scale / len(draw.weight)
        return self.probe.read() / torch.where(draw.weight > 0, factor, 1.0)[:, None]

    def _launch(self) -> None:
        """Starts the all-reduce of the step's sums, once."""
        if self._sums is None:
            return
        parts = [self._sums.flatten().float(), self._contrast.float()] + ([self._slots] if self._slots is not None else [])
        buffer = torch.cat(parts)
        handle = None
        if self.world_size > 1:
            handle = dist.all_reduce(buffer, group=self.group, async_op=True)
        self._flight = (buffer, handle)
        self._sums = self._slots = None
        self._contrast = torch.zeros_like(self._contrast)

    def _settle(self) -> None:
        """Folds in the sums of a committed step."""
        if self._flight is None or self._open:
            return
        (buffer, handle), self._flight = self._flight, None
        if handle is not None:
            handle.wait()
        width = self.config.bins * self.statistics.step_width
        sums = buffer[:width].view(self.config.bins, -1)
        batch = len(self._global[0])
        self._measure(sums, buffer[width : width + self.statistics.k], batch)
        self._baselines(sums, buffer[width + self.statistics.k :])
        self.statistics.fold(sums, batch, self._skipped)
        self._view = None
        if self.statistics.history.due(self.step):
            view = self._current_view()
            self.statistics.history.record(self.step, self.images, view.loss, view.grad_var)
        self._skipped = None

    def _current_view(self) -> BinView:
        """The view of the statistics as they are, computed once."""
        if self._view is None:
            self._view = self.statistics.view(self.config.warmup)
        return self._view

    def _measure(self, sums: Tensor, contrast: Tensor, batch: int) -> None:
        """The achieved variance: p and q are still those the step was drawn with."""
        if self.probe is None:
            return
        view = self.statistics.refreshed(self._current_view(), sums)
        plain = prop.minibatch_variance(view, self.q, torch.ones_like(self.q), self.stratified) / batch
        contrast = contrast.double()
        if self.stratified:
            # A bin with an odd count leaves one of its samples to a half alone; its mean is no part of the variance.
            _, weight, bin = self._global
            unmatched = members(bin, self.config.bins) @ (self._signs * weight).double()
            contrast = contrast - unmatched @ view.mean_sketch
        self.achieved.update(contrast / batch, plain * self.ready, self._skipped)

    def _baselines(self, sums: Tensor, slots: Tensor) -> None:
        count, loss = sums[:, 0].double(), sums[:, 2].double()
        decay = _EMA_DECAY**count
        ema = decay * self.loss_ema + (1 - decay) * loss / count.clamp(min=1)
        self.loss_ema = frozen(self._skipped, self.loss_ema, ema)
        if self.recent is not None and len(slots):
            values, filled = self.recent.updated(self._global[2], slots)
            self.recent.values = frozen(self._skipped, self.recent.values, values)
            self.recent.count = frozen(self._skipped, self.recent.count, filled)

    # Densities

    def _refresh(self) -> None:
        """Recomputes q, p and the weights from the statistics."""
        context = rules.Context(
            self._current_view(), self.stratified, self.recent, self.loss_ema, self.path, self.prediction
        )
        uniform = self._masses(Spec("uniform"))
        yes = torch.ones((), dtype=torch.bool, device=self.device)
        if self.target.name in rules.TARGETS:
            q, ready = self._learned(rules.TARGETS[self.target.name], self.target, context, uniform, self.config.target_floor)
        else:
            q, ready = self._masses(self.target), yes
        if self.config.anneal is not None:
            q = prop.mixed(q, uniform, self._annealed(*self.config.anneal))
        if self.proposal.name == "same":
            p = q
        elif self.proposal.name in rules.PROPOSALS:
            p, ready_p = self._learned(rules.PROPOSALS[self.proposal.name], self.proposal, context, q, self.config.floor)
            ready = ready & ready_p
        else:
            # Without weights there is nothing for the floor to bound, and the density is drawn as published.
            floor = self.config.floor if self.config.correction else 0.0
            p = prop.mixed(self._masses(self.proposal), q, floor)
        self._use(q, p, ready)

    def _annealed(self, start: int, end: int) -> float:
        """Share of the uniform density in the target by now."""
        return float(self.images >= end) if start == end else min(max((self.images - start) / (end - start), 0.0), 1.0)

    def _learned(self, rule: rules.Rule, spec: Spec, context: rules.Context, base: Tensor, floor: float):
        """base * smoothed curve, mixed with base; base itself until enough is known."""
        curve = self._smooth @ rule.curve(context, *spec.args).clamp(min=0)
        learned = prop.mixed(prop.normalized(base * curve, base), base, floor)
        ready = rule.ready(context, base, self.config.warmup) if rule.ready else torch.ones((), dtype=torch.bool, device=self.device)
        return torch.where(ready, learned, base), ready

    def _use(self, q: Tensor, p: Tensor, ready: Tensor) -> None:
        self.q, self.p, self.ready = q, p, ready
        self.weight = prop.importance_weights(q, p, self.config.correction)

    def _masses(self, spec: Spec) -> Tensor:
        if spec not in self._fixed:
            masses = bin_masses(spec, self.config.bins, self.path.name)
            self._fixed[spec] = torch.from_numpy(masses).to(self.device)
        return self._fixed[spec]

    def _check_needs(self) -> None:
        if self.probe is None:
            for key in rules.need_probe(self.target, self.proposal):
                raise UserError(
                    f"timesteps.{key}: {getattr(self, key)} needs a probe: pass probe=attach_probe(model, config.probe) to OnlineSampler; "
                    "in a run's configuration, timesteps.probe.enabled may not be false"
                )

    def _tensor(self, values) -> Tensor:
        return torch.as_tensor(values).clone().to(self.device)
