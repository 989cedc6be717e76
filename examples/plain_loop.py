"""The sampler in a plain PyTorch loop: a small network learns the velocity of two-dimensional data.

    python examples/plain_loop.py
"""

import torch
from torch import nn

from vr_online.config import ProbeConfig, TimestepConfig
from vr_online.timesteps import OnlineSampler, attach_probe


class VelocityNet(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x_t, t):
        return self.layers(torch.cat([x_t, t[:, None]], 1))


def data(size: int) -> torch.Tensor:
    """A ring of radius 2 with some noise."""
    angle = 2 * torch.pi * torch.rand(size)
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(size, 2)


def main(steps: int = 500, batch_size: int = 128) -> OnlineSampler:
    torch.manual_seed(0)
    model = VelocityNet()
    config = TimestepConfig(target="uniform", proposal="online_vr", probe=ProbeConfig(layers=["*"]))
    sampler = OnlineSampler(config, probe=attach_probe(model, config.probe), batch_size=batch_size)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(steps):
        draw = sampler.draw()
        x_1, x_0 = data(batch_size), torch.randn(batch_size, 2)
        t = draw.t[:, None]
        per_sample = (model(t * x_1 + (1 - t) * x_0, draw.t) - (x_1 - x_0)).square().mean(1)
        (draw.weight * per_sample).mean().backward()
        sampler.update(draw, per_sample)
        optimizer.step()
        optimizer.zero_grad()
        sampler.commit()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {per_sample.mean().item():.3f}; {sampler.verdict()}")
    return sampler


if __name__ == "__main__":
    main()
