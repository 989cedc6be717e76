"""What a run will take, worked out without a device: parameters, compute, length, memory of a rank."""

from __future__ import annotations

import torch

from vr_online.config import Config
from vr_online.data.format import DatasetInfo
from vr_online.engine import plan_batch
from vr_online.models.sit import build_sit, forward_macs
from vr_online.monitor.speed import training_flops


def parameter_count(config: Config, info: DatasetInfo) -> int:
    """Trainable parameters, counted on the meta device."""
    with torch.device("meta"):
        model = build_sit(config.model, info.latent_shape, info.num_classes)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def state_bytes(parameters: int, world_size: int, zero_stage: int, bf16: bool) -> int:
    """Bytes of a rank's weights, gradients, masters, moments and average; activations come on top.

    ZeRO (Rajbhandari et al. 2020, figure 1): stage 1 shares out the optimizer state, 2 the gradients too, 3 the
    weights too. The average is always shared out.
    """
    compute = 2 if bf16 else 4
    shard = parameters / world_size
    held = parameters if zero_stage == 0 else shard
    weights = (shard if zero_stage == 3 else parameters) * compute
    gradients = (shard if zero_stage >= 2 else parameters) * compute
    separate_master = zero_stage > 0 or bf16
    masters = held * 4 if separate_master else 0
    return int(weights + gradients + masters + held * 8 + shard * 4)


def describe(config: Config, info: DatasetInfo, world_size: int) -> dict[str, object]:
    """The plan as name -> value, in the order a person reads it."""
    batch = plan_batch(config.train.batch_size, config.train.micro_batch_size, world_size)
    parameters = parameter_count(config, info)
    macs = forward_macs(config.model, info.latent_shape)
    steps, images = config.train.total_steps, config.train.total_steps * batch.batch_size
    memory = state_bytes(parameters, world_size, config.engine.zero_stage, config.engine.precision == "bf16")
    return {
        "data": f"{info.samples:,} latents {'x'.join(map(str, info.latent_shape))}, {info.num_classes} classes",
        "model": f"{config.model.name}, {parameters:,} parameters, {macs / 1e9:.4g} GMAC forward",
        "compute": f"{training_flops(macs) / 1e9:.4g} GFLOP to train on an image",
        "batch": f"{batch.batch_size} = {world_size} ranks x {batch.accumulation} accumulation x {batch.micro_batch_size}",
        "length": f"{steps:,} steps, {images:,} images, {images / max(info.samples, 1):.4g} epochs",
        "total": f"{training_flops(macs) * images / 1e18:.4g} EFLOP",
        "memory": f"{memory / 2**30:.3g} GiB a rank at ZeRO {config.engine.zero_stage} for weights, gradients, optimizer "
        f"and average ({config.engine.precision}); activations come on top",
        "times": f"target {config.timesteps.target}, proposal {config.timesteps.proposal}, "
        f"correction {config.timesteps.correction:g}, {config.timesteps.bins} bins",
        "run": str(config.directory),
    }
