"""The DeepSpeed engine of a run, and the map from its flat shards back to named parameters."""

from __future__ import annotations

import logging
import types
from dataclasses import dataclass
from typing import Iterator

import torch
import torch.distributed as dist
from torch import nn

from vr_online.config import Config
from vr_online.errors import UserError
from vr_online.optim import GuardedAdamW


@dataclass(frozen=True)
class BatchPlan:
    """How the global batch is split: `batch_size` = world_size x accumulation x micro_batch_size."""

    batch_size: int
    micro_batch_size: int
    accumulation: int
    world_size: int


def plan_batch(batch_size: int, micro_batch_size: int | None, world_size: int) -> BatchPlan:
    """Raises `UserError` where the global batch does not divide over ranks and micro-batches."""
    if batch_size % world_size:
        raise UserError(f"train.batch_size {batch_size} is not a multiple of the {world_size} ranks")
    per_rank = batch_size // world_size
    micro = micro_batch_size or per_rank
    if per_rank % micro:
        raise UserError(
            f"train.batch_size {batch_size} over {world_size} ranks is {per_rank} samples a rank, "
            f"not a multiple of train.micro_batch_size {micro}"
        )
    return BatchPlan(batch_size, micro, per_rank // micro, world_size)


def deepspeed_config(config: Config, plan: BatchPlan) -> dict:
    """The generated DeepSpeed configuration, with `engine.deepspeed` merged over it."""
    bf16 = config.engine.precision == "bf16"
    stage = config.engine.zero_stage
    generated = {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,  # our AdamW is elementwise, as ZeRO needs
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": bf16, **({"check_grad_overflow": False} if bf16 else {})},
        # Clipping and the finite check are the optimizer's (GuardedAdamW), on the device.
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            "sub_group_size": 10**12,  # one flat shard, so one optimizer call a step
        },
    }
    fp32_sums = bf16 and plan.accumulation > 1 and stage > 0
    if fp32_sums:
        generated["data_types"] = {"grad_accum_dtype": "fp32"}
    if stage == 2 or (stage == 1 and not fp32_sums):  # stage 1 with fp32 sums of bf16 gradients cannot do without
        generated["zero_optimization"]["compute_grad_norm"] = False
    return _merge(generated, config.engine.deepspeed)


def _merge(base: dict, over: dict) -> dict:
    merged = dict(base)
    for key, value in over.items():
        merged[key] = _merge(merged[key], value) if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
    return merged


def build_engine(model: nn.Module, config: Config, plan: BatchPlan):
    """Wraps a model in a DeepSpeed engine whose optimizer is `GuardedAdamW`.

    Returns:
        (engine, optimizer): the optimizer is the innermost one, which holds `grad_norm` and `found_inf`.
    """
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    trainable = [p for p in model.parameters() if p.requires_grad]
    sharded = config.engine.zero_stage > 0
    optimizer = GuardedAdamW(
        trainable, config.optimizer, config.train.clip, group=dist.group.WORLD if sharded and plan.world_size > 1 else None
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(config, plan))
    _leave_checks_to_the_optimizer(engine)
    optimizer.ready = True
    return engine, optimizer


def _leave_checks_to_the_optimizer(engine) -> None:
    """DeepSpeed asks the host at every step whether the gradient is finite, at ZeRO 3 and in some bf16 modes; the
    optimizer has found that out on the device, and the host need not wait."""
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import stage3

    for module in (bf16_optimizer, stage3):
        module.is_invalid_grad_norm = lambda norm: False
    if hasattr(engine.optimizer, "fp32_groups"):
        engine.optimizer.step = types.MethodType(_step_of_replicated_masters, engine.optimizer)


@torch.no_grad()
def _step_of_replicated_masters(self, closure=None) -> None:
    """bf16 without ZeRO: gradients to the fp32 masters, their step, and back."""
    pairs = [pair for lows, highs in zip(self.fp16_groups, self.fp32_groups) for pair in zip(lows, highs)]
    for low, high in pairs:
        high.grad = torch.zeros_like(high) if low.grad is None else low.grad.to(high.dtype)
    self.optimizer.step()
    for low, high in pairs:
        high.grad = None
        low.copy_(high)


@dataclass(frozen=True)
class Fragment:
    """The part of one parameter that this rank owns.

    Attributes:
        name: parameter name in the model.
        shape: of the whole parameter.
        start: first element, in the flattened parameter, of this part.
        index: which of `MasterWeights.flats` holds it.
        offset, numel: where in that 1-D tensor.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    index: int
    offset: int
    numel: int

    def of(self, flats: list[torch.Tensor]) -> torch.Tensor:
        """This part, as a view of tensors laid out like `MasterWeights.flats`."""
        return flats[self.index].narrow(0, self.offset, self.numel)


class MasterWeights:
    """fp32 master weights of this rank, as the engine keeps them, and whose parameter each piece is.

    With ZeRO 1 to 3 the masters are flat shards; without, every rank holds all of them and owns an equal slice of
    each parameter, so that averages and checkpoints are shared out just the same.

    Attributes:
        flats: 1-D fp32 tensors that together hold what this rank owns.
        fragments: the named pieces of `flats`.
    """

    def __init__(self, engine, optimizer: GuardedAdamW, stage: int):
        self.optimizer = optimizer
        self._whole = stage == 0
        named = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
        if stage == 0:
            self._slices(named, engine)
        elif stage == 3:
            self._stage_3(named, engine.optimizer)
        else:
            self._stage_1_2(named)

    def _slices(self, named, engine) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        masters = _replicated_masters(engine, [p for _, p in named])
        self.flats, self.fragments, self._keys = [], [], []
        for (name, p), master in zip(named, masters):
            n = p.numel()
            start, end = rank * n // world, (rank + 1) * n // world
            self.fragments.append(Fragment(name, tuple(p.shape), start, len(self.flats), 0, end - start))
            self.flats.append(master.detach().view(-1)[start:end])
            self._keys.append((master, start, end))

    def _stage_1_2(self, named) -> None:
        self.flats = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._keys = [(flat, 0, flat.numel()) for flat in self.flats]
        self.fragments = []
        for name, p in named:
            mapping = p._hp_mapping
            if mapping is not None:
                high, low = mapping.hp_fragment_address, mapping.lp_fragment_address
                self.fragments.append(
                    Fragment(name, tuple(p.shape), low.start, mapping.param_group_index, high.start, high.numel)
                )

    def _stage_3(self, named, zero) -> None:
        self.flats = list(zero.fp32_partitioned_groups_flat)
        self._keys = [(flat, 0, flat.numel()) for flat in self.flats]
        self.fragments = []
        for name, p in named:
            index, offset, size = zero.grad_position[zero.get_param_id(p)]
            start = dist.get_rank() * p.ds_tensor.ds_numel
            numel = min(p.ds_tensor.ds_numel, p.ds_numel - start)
            if numel > 0:
                self.fragments.append(Fragment(name, tuple(p.ds_shape), start, index, int(offset), numel))

    def held(self, key: str) -> Iterator[tuple[str, tuple[int, ...], int, torch.Tensor]]:
        """What this rank holds of `master`, `exp_avg` or `exp_avg_sq`, which without ZeRO is more than it owns.

        Yields:
            (parameter name, shape of the whole, first element, 1-D tensor that aliases the values).
        """
        flats = self.flats if key == "master" else self.moments(key)
        for f in self.fragments:
            if self._whole:
                master = self._keys[f.index][0]
                values = master.detach() if key == "master" else self.optimizer.state[master][key]
                yield f.name, f.shape, 0, values.view(-1)
            else:
                yield f.name, f.shape, f.start, f.of(flats)

    def moments(self, key: str) -> list[torch.Tensor]:
        """AdamW's `exp_avg` or `exp_avg_sq`, laid out like `flats`; zeros before the first step."""
        self._ensure_state()
        return [self.optimizer.state[p][key].view(-1)[start:end] for p, start, end in self._keys]

    @property
    def optimizer_steps(self) -> int:
        """Steps AdamW has taken (skipped ones do not count)."""
        self._ensure_state()
        return int(self.optimizer.state[self._keys[0][0]]["step"])

    @optimizer_steps.setter
    def optimizer_steps(self, steps: int) -> None:
        self._ensure_state()
        for state in self.optimizer.state.values():
            state["step"].fill_(float(steps))

    def _ensure_state(self) -> None:
        for p, _, _ in self._keys:
            if not self.optimizer.state[p]:
                self.optimizer.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(p, requires_grad=False),
                }


def _replicated_masters(engine, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """fp32 masters of an engine without ZeRO: the parameters themselves, or their fp32 copies under bf16."""
    if hasattr(engine.optimizer, "fp32_groups"):
        masters = {
            id(low): high
            for lows, highs in zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups)
            for low, high in zip(lows, highs)
        }
        return [masters[id(p)] for p in parameters]
    return parameters


@torch.no_grad()
def gather_into(model: nn.Module, fragments: list[Fragment], flats: list[torch.Tensor], device: torch.device) -> None:
    """Fills a plain model, on every rank, from pieces spread over the ranks; one parameter whole at a time.

    Args:
        model: unsharded, with the engine's parameter names; may be of another dtype.
        fragments, flats: of this rank; `flats` laid out like `MasterWeights.flats`.
        device: where the collective runs.
    """
    own: dict[str, list[Fragment]] = {}
    for f in fragments:
        own.setdefault(f.name, []).append(f)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=device)
        for f in own.get(name, []):
            whole[f.start : f.start + f.numel] = f.of(flats)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(whole)
        parameter.copy_(whole.view(parameter.shape))
