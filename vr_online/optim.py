"""AdamW that clips and, on a non-finite gradient, skips, both on the device and without waiting for it."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from vr_online.config import OptimizerConfig


class GuardedAdamW(torch.optim.AdamW):
    """Fused AdamW whose step scales the gradient to a largest global norm and becomes a no-op, moments and step
    count included, where that norm is not finite.

    The norm, the clip factor and the skip flag stay device tensors handed to the fused kernel (the hooks that
    gradient scalers use), so neither clipping nor skipping makes the host wait.

    Args:
        params: parameters, later replaced by the flat master shards of a ZeRO optimizer.
        config: learning rate, betas, eps and weight decay.
        clip: largest norm of the whole gradient; None for no clipping.
        group: process group over which the gradient is sharded; None where every rank holds all of it.

    Attributes:
        ready: False makes `step` a no-op: some engines call it once with zero gradients while they are built.
        grad_norm: () fp32, norm of the whole gradient before clipping, of the last step.
        found_inf: () fp32, 1 where the last step was skipped, else 0.
    """

    def __init__(self, params, config: OptimizerConfig, clip: float | None, group: dist.ProcessGroup | None = None):
        super().__init__(
            params, lr=config.lr, betas=tuple(config.betas), eps=config.eps, weight_decay=config.weight_decay, fused=True
        )
        self.clip, self.group, self.ready = clip, group, False
        self.grad_norm = self.found_inf = self.grad_scale = None

    @torch.no_grad()
    def step(self, closure=None):
        if not self.ready:
            return None
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(grads)).float()
        total = norms.square().sum()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        self.grad_norm = total.sqrt()
        self.found_inf = 1 - torch.isfinite(self.grad_norm).float()
        self.grad_scale = None if self.clip is None else (self.grad_norm / self.clip).clamp(min=1.0)
        return super().step(closure)


class Schedule:
    """Learning rate of the step that ends at `images` seen: linear warm-up, then constant or half a cosine.

    Args:
        config: `lr`, `warmup` (images), `schedule`, `lr_min`.
        total_images: length of the run.
    """

    def __init__(self, config: OptimizerConfig, total_images: int):
        self.config, self.total_images = config, total_images

    def __call__(self, images: int) -> float:
        c = self.config
        if images < c.warmup:
            return c.lr * images / c.warmup
        if c.schedule == "constant":
            return c.lr
        progress = min((images - c.warmup) / max(self.total_images - c.warmup, 1), 1.0)
        return c.lr_min + (c.lr - c.lr_min) * 0.5 * (1 + math.cos(math.pi * progress))
