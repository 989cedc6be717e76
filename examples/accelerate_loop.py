"""The sampler under Hugging Face Accelerate, on any number of processes, with gradient accumulation.

    accelerate launch examples/accelerate_loop.py

Attach the probe before `prepare` wraps the model; draw with `accelerator`'s rank so that all processes share one
stratified batch.
"""

import torch
from accelerate import Accelerator

from vr_online.config import ProbeConfig, TimestepConfig
from vr_online.timesteps import OnlineSampler, attach_probe

try:
    from examples.plain_loop import VelocityNet, data
except ImportError:  # started as a script
    from plain_loop import VelocityNet, data


def main(steps: int = 200, micro_batch: int = 64, accumulation: int = 2, cpu: bool = False) -> OnlineSampler:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, cpu=cpu)
    model = VelocityNet()
    config = TimestepConfig(target="logit_normal(0, 1)", proposal="online_vr", probe=ProbeConfig(layers=["*"]))
    probe = attach_probe(model, config.probe)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 1e-3))
    torch.manual_seed(1 + accelerator.process_index)
    sampler = OnlineSampler(
        config, probe=probe, accumulation=accumulation, rank=accelerator.process_index,
        world_size=accelerator.num_processes, device=accelerator.device,
    )
    for _ in range(steps * accumulation):
        with accelerator.accumulate(model):
            draw = sampler.draw(micro_batch)
            x_1 = data(micro_batch).to(accelerator.device)
            x_0, t = torch.randn_like(x_1), draw.t[:, None]
            per_sample = (model(t * x_1 + (1 - t) * x_0, draw.t) - (x_1 - x_0)).square().mean(1)
            accelerator.backward((draw.weight * per_sample).mean())  # divides by the accumulation steps
            sampler.update(draw, per_sample)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                sampler.commit()
    accelerator.print(sampler.verdict())
    return sampler


if __name__ == "__main__":
    main()
