"""The sampler in a diffusers-style flow-matching step, where time runs the other way: t_sd3 = 1 - t.

SD3, FLUX and diffusers mix x = (1 - t_sd3) data + t_sd3 noise, predict noise - data, and hand the transformer
timesteps of t_sd3 * 1000. Only three lines differ from their training scripts; the model is any module called as
model(noisy_latents, timesteps, condition).
"""

import torch

from vr_online.config import ProbeConfig, TimestepConfig
from vr_online.timesteps import OnlineSampler, attach_probe


def make_sampler(transformer, layers=("*",), target: str = "logit_normal(0, 1)", **options) -> OnlineSampler:
    """`target` is in our t; the scripts' `--logit_mean m` is `logit_normal(-m, s)`, their shift is `shift(alpha)`."""
    config = TimestepConfig(target=target, proposal="online_vr", probe=ProbeConfig(layers=list(layers)))
    return OnlineSampler(config, probe=attach_probe(transformer, config.probe), **options)


def training_step(transformer, sampler: OnlineSampler, optimizer, latents, condition) -> torch.Tensor:
    """One step on `latents` (B, C, H, W); returns the mean unweighted loss."""
    noise = torch.randn_like(latents)
    draw = sampler.draw(len(latents))  # instead of compute_density_for_timestep_sampling
    sigmas = (1 - draw.t).view(-1, 1, 1, 1).to(latents.dtype)
    noisy = (1 - sigmas) * latents + sigmas * noise
    prediction = transformer(noisy, (1 - draw.t) * 1000, condition)
    per_sample = (prediction.float() - (noise - latents).float()).square().mean((1, 2, 3))
    (draw.weight * per_sample).mean().backward()  # instead of compute_loss_weighting_for_sd3
    sampler.update(draw, per_sample)
    optimizer.step()
    optimizer.zero_grad()
    sampler.commit()
    return per_sample.detach().mean()


class TinyTransformer(torch.nn.Module):
    """Stands in for a diffusers transformer."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.inside, self.outside = torch.nn.Linear(channels + 1, 32), torch.nn.Linear(32, channels)

    def forward(self, latents, timestep, condition):
        tokens = latents.flatten(2).transpose(1, 2) + condition[:, None]
        time = (timestep / 1000)[:, None, None].expand(-1, tokens.shape[1], 1)
        hidden = torch.nn.functional.silu(self.inside(torch.cat([tokens, time], 2)))
        return self.outside(hidden).transpose(1, 2).unflatten(2, latents.shape[2:])
