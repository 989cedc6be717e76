"""Times for one optimizer step, drawn for the whole global batch at once.

Every rank computes the same global set from (seed, step) and takes its slices, so the set of (t, weight) does
not depend on how many ranks or accumulation steps share it, and nothing random needs to be stored.
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

# Largest float64 below 1 and the float32 range kept clear of the ends, where some paths divide by zero.
_BELOW_ONE = 1 - 2**-53
_T_MIN, _T_MAX = 2**-24, 1 - 2**-24


def step_generator(seed: int, step: int) -> torch.Generator:
    """A CPU generator that is a function of (seed, step) alone."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, step), digest_size=4).digest()
    # Hashed to 32 bits, because torch's CPU generator uses no more of its seed.
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def uniforms(batch_size: int, seed: int, step: int, stratified: bool) -> Tensor:
    """(batch_size,) float64 in [0, 1): one systematic sample in random order, u_i = (perm(i) + u) / batch_size,
    or independent draws."""
    generator = step_generator(seed, step)
    if not stratified:
        return torch.rand(batch_size, generator=generator, dtype=torch.float64)
    order = torch.randperm(batch_size, generator=generator)
    offset = torch.rand((), generator=generator, dtype=torch.float64)
    return ((order + offset) / batch_size).clamp_(max=_BELOW_ONE)


def half_signs(u: Tensor, stratified: bool) -> Tensor:
    """(B,) float32 +1 and -1 that split a step's draws into two alike halves: every other one in the order of u where
    they are stratified, so that each half is a systematic sample itself, else every other one."""
    position = (u * len(u)).long() if stratified else torch.arange(len(u), device=u.device)
    return 1.0 - 2.0 * (position % 2)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies without making the host wait for the device."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def invert(u: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse distribution function of the piecewise-constant density with bin masses p.

    Args:
        u: (B,) float64 in [0, 1).
        p: (K,) float64, summing to 1.

    Returns:
        t (B,) float32, uniform inside its bin, and bin (B,) int64; a bin without mass is never drawn.
    """
    upper = p.cumsum(0)
    upper = upper / upper[-1]
    bin = torch.searchsorted(upper, u, right=True).clamp_(max=len(p) - 1)
    mass = upper[bin] - torch.where(bin > 0, upper[bin - 1], torch.zeros_like(u))
    inside = 1 - (upper[bin] - u) / mass
    t = (bin + inside.clamp(0, 1)) / len(p)
    return t.to(torch.float32).clamp_(_T_MIN, _T_MAX), bin
