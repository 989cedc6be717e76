"""Small networks and helpers that several tests use."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A residual block with a condition, like a SiT block but without attention."""

    def __init__(self, width: int, inplace: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Linear(width, width)
        self.act = nn.ReLU(inplace=True) if inplace else nn.GELU()

    def forward(self, x, c):
        return x + self.fc2(self.act(self.fc1(x))) * self.gate(c)[:, None]


class Net(nn.Module):
    """Tokens (B, N, width) and condition (B, width) to tokens: Linears with 2- and 3-dimensional inputs."""

    def __init__(self, width: int = 8, depth: int = 2, recompute: bool = False, inplace: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, inplace) for _ in range(depth))
        self.recompute = recompute

    def forward(self, x, c):
        for block in self.blocks:
            x = checkpoint(block, x, c, use_reentrant=False) if self.recompute else block(x, c)
        return x


def net(seed: int = 0, **options) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def batch(size: int = 6, tokens: int = 5, width: int = 8, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, tokens, width, generator=generator), torch.randn(size, width, generator=generator)


def per_sample_loss(model, x, c):
    """(B,) mean squared output."""
    return model(x, c).float().square().mean((1, 2))
