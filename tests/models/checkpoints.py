"""Tiny whole checkpoints on disk, written by the project's own writer, without training."""

from types import SimpleNamespace

import torch

from vr_online import checkpoint
from vr_online.config import dump, validate
from vr_online.data.codecs import PixelCodec
from vr_online.data.format import DatasetInfo, LatentNorm
from vr_online.engine import Fragment
from vr_online.models.sit import build_sit

MODEL = {"name": "custom", "depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 2}


def tiny_info(channels=1, side=4, classes=4):
    return DatasetInfo(
        samples=0, shards={}, latent_shape=(channels, side, side), codec="pixel", codec_hash=PixelCodec().hash,
        norm=LatentNorm([0.1] * channels, [0.5] * channels), class_names=[f"class {c}" for c in range(classes)],
    )  # fmt: skip


def tiny_config(**sections):
    return validate({"model": MODEL, "train": {"steps": 10, "batch_size": 4}, "evaluation": {"n": 8, "batch_size": 4, "steps": 4}, **sections})


def random_model(config, info, seed):
    """Every weight random, so that outputs depend on all of them."""
    generator = torch.Generator().manual_seed(seed)
    model = build_sit(config.model, info.latent_shape, info.num_classes).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.15)
    return model


def write_checkpoint(run_dir, step, config, info, ema, raw):
    """Saves two models as the averaged and the raw weights of a one-process run."""
    named = [list(m.named_parameters()) for m in (raw, ema)]
    flats, averages = ([p.detach().flatten().clone() for _, p in parameters] for parameters in named)
    fragments = [Fragment(name, tuple(p.shape), 0, i, 0, p.numel()) for i, (name, p) in enumerate(named[0])]
    masters = SimpleNamespace(flats=flats, fragments=fragments, optimizer_steps=step, moments=lambda key: flats)
    ranks = SimpleNamespace(rank=0, world_size=1, is_main=True, gather=lambda value: [value])
    files = {"config.yaml": dump(config), "dataset.json": info.to_json()}
    return checkpoint.save(run_dir, step, ranks, masters, averages, files, {}, {"images": step * 4})
