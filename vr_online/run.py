"""Everything a training run consists of, put together once before the first step."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator, Optional

import numpy as np
import torch

from vr_online import __version__, checkpoint
from vr_online.config import Config, dump, load_config
from vr_online.data.format import DatasetInfo, LatentNorm
from vr_online.data.reader import LatentStream, device_batches, merge_states
from vr_online.ema import Ema
from vr_online.engine import BatchPlan, MasterWeights, build_engine, gather_into, plan_batch
from vr_online.errors import UserError
from vr_online.files import write_atomic
from vr_online.flow.paths import get_path
from vr_online.flow.targets import Flow
from vr_online.models.sit import SiT, build_sit
from vr_online.models.weights import load_init, load_state
from vr_online.monitor.monitor import Monitor
from vr_online.monitor.speed import StepTimer
from vr_online.optim import GuardedAdamW, Schedule
from vr_online.ranks import Ranks
from vr_online.timesteps.probe import attach_probe
from vr_online.timesteps.sampler import OnlineSampler


def keyed_generator(device: torch.device, *words: int) -> torch.Generator:
    """A generator seeded by its key alone (seed, step, ...), so that nothing random need be stored to resume."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass
class Totals:
    """Sums since the last log step, on the device."""

    loss: torch.Tensor
    counted: torch.Tensor
    skipped: torch.Tensor
    in_a_row: torch.Tensor

    @classmethod
    def zeros(cls, device: torch.device) -> "Totals":
        return cls(*torch.zeros(4, device=device).unbind())

    def add_loss(self, losses: torch.Tensor) -> None:
        finite = torch.isfinite(losses)
        self.loss = self.loss + torch.where(finite, losses, 0).sum()
        self.counted = self.counted + finite.sum()

    def add_step(self, skipped: torch.Tensor) -> None:
        self.skipped = self.skipped + skipped
        self.in_a_row = (self.in_a_row + skipped) * skipped

    def take_loss(self) -> torch.Tensor:
        """(2,) sum and count, reset."""
        taken = torch.stack([self.loss, self.counted])
        self.loss, self.counted = torch.zeros_like(self.loss), torch.zeros_like(self.counted)
        return taken


@dataclass
class Run:
    """The parts of a run and where it stands. `step` counts optimizer steps, skipped ones included."""

    config: Config
    info: DatasetInfo
    ranks: Ranks
    plan: BatchPlan
    flow: Flow
    norm: LatentNorm
    engine: Any
    optimizer: GuardedAdamW
    masters: MasterWeights
    ema: Ema
    sampler: OnlineSampler
    schedule: Schedule
    stream: LatentStream
    monitor: Monitor
    timer: StepTimer
    totals: Totals
    batches: Iterator
    num_classes: int
    step: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        return self.config.directory

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.config.engine.precision == "bf16" else torch.float32

    @property
    def images(self) -> int:
        return self.step * self.plan.batch_size

    @property
    def total_steps(self) -> int:
        return self.config.train.total_steps

    def average_model(self, weights: str = "ema", dtype: Optional[torch.dtype] = None) -> SiT:
        """A plain model on every rank with the averaged (or raw) weights, in evaluation mode. All ranks call it.

        Args:
            dtype: of its weights; None for that of the training.
        """
        model = _new_model(self.config, self.info, compiled=False).to(self.device, dtype or self.dtype)
        flats = self.ema.averages if weights == "ema" else self.masters.flats
        gather_into(model, self.masters.fragments, flats, self.device)
        return model.eval().requires_grad_(False)

    def save(self) -> Path:
        """Writes the checkpoint of this step. All ranks call it."""
        states = self.ranks.gather(self.stream.state())
        path = checkpoint.save(
            self.directory,
            self.step,
            self.ranks,
            self.masters,
            self.ema.averages,
            files={
                "config.yaml": dump(self.config),
                "dataset.json": self.info.to_json(),
                "data.json": json.dumps(merge_states(states)),
            },
            sampler=self.sampler.state_dict(),
            manifest={
                "images": self.images,
                "batch_size": self.plan.batch_size,
                "num_classes": self.num_classes,
                "ema": self.ema.decay.name,
                "time": "t=0 noise, t=1 data",
                "skipped_steps": int(self.totals.skipped),
                "versions": {"vr_online": __version__, "torch": torch.__version__, "numpy": np.__version__},
            },
        )
        if self.ranks.is_main:
            checkpoint.prune(self.directory, self.config.checkpoint.keep, self.config.checkpoint.keep_every, self.protected())
        return path

    def protected(self) -> set[int]:
        """Steps whose checkpoints a job still reads."""
        evaluator = self.extra.get("evaluator")
        return evaluator.pending_steps() if evaluator else set()


def open_data(config: Config) -> DatasetInfo:
    """The data set's description, checked against what the configuration expects of it."""
    info = DatasetInfo.load(dataset_location(config))
    if config.data.codec and config.data.codec != info.codec:
        raise UserError(
            f"data.codec is {config.data.codec}, but {dataset_location(config)} was encoded with {info.codec}; "
            "encode the images again with that codec, or correct data.codec"
        )
    if config.data.flip and info.codec != "pixel":
        raise UserError(
            f"data.flip is true, but the shards hold latents of the codec {info.codec}, and a mirrored latent is not the latent "
            "of a mirrored image; encode with --flip both instead"
        )
    if config.data.norm:
        info.norm.check_matches(LatentNorm(config.data.norm["mean"], config.data.norm["std"]))
    return info


def dataset_location(config: Config) -> str:
    """Where `dataset.json` lies: `data.dataset`, or beside the shards."""
    if config.data.dataset:
        return config.data.dataset
    if isinstance(config.data.shards, str) and Path(config.data.shards).suffix != ".tar":
        return config.data.shards
    raise UserError("data.dataset: give the path of dataset.json, since data.shards is not a folder")


def start(config: Config, ranks: Ranks) -> Run:
    """Builds the run and, where the run directory has a whole checkpoint, continues from it."""
    info = open_data(config)
    _check_compiler(config, ranks)
    plan = plan_batch(config.train.batch_size, config.train.micro_batch_size, ranks.world_size)
    found = _checkpoint_to_resume(config, ranks)
    if found:
        _check_same_run(config, found)
    flow = Flow(get_path(config.flow.path), config.flow.prediction)
    stream = LatentStream(
        config.data, info, rank=ranks.rank, world_size=ranks.world_size, batch_size=plan.micro_batch_size, seed=config.seed
    )
    model = _new_model(config, info)
    num_classes = model.num_classes
    if found:
        load_state(model, checkpoint.load_weights(found, "raw"), str(found))
    elif config.model.init:
        load_init(model, config.model.init)
    model.to(ranks.device)
    probe = attach_probe(model, config.timesteps.probe, seed=config.seed) if config.timesteps.wants_probe else None
    sampler = OnlineSampler(
        config.timesteps, path=flow.path, prediction=config.flow.prediction, seed=config.seed, probe=probe, batch_size=plan.batch_size,
        accumulation=plan.accumulation, rank=ranks.rank, world_size=ranks.world_size, device=ranks.device,
    )
    engine, optimizer = build_engine(model, config, plan)
    masters = MasterWeights(engine, optimizer, config.engine.zero_stage)
    run = Run(
        config=config, info=info, ranks=ranks, plan=plan, flow=flow, norm=info.norm, engine=engine, optimizer=optimizer,
        masters=masters, ema=Ema(masters.flats, config.ema, plan.batch_size), sampler=sampler,
        schedule=Schedule(config.optimizer, config.train.total_steps * plan.batch_size), stream=stream,
        monitor=None, timer=StepTimer(ranks.device, plan.batch_size), totals=Totals.zeros(ranks.device),
        batches=None, num_classes=num_classes,
    )
    if found:
        _restore(run, found)
    run.batches = device_batches(stream, ranks.device)
    run.monitor = Monitor(config.directory, config, enabled=ranks.is_main, resume_step=run.step if found else None)
    if ranks.is_main:
        write_atomic(config.directory / "config.yaml", dump(config))
    return run


def _check_compiler(config: Config, ranks: Ranks) -> None:
    if config.model.compile and ranks.device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        raise UserError("model.compile is true, but torch.compile needs a C++ compiler on the CPU: install g++, or set it to false")


def _new_model(config: Config, info: DatasetInfo, compiled: bool = True) -> SiT:
    torch.manual_seed(config.seed)
    settings = config.model if compiled else config.model.model_copy(update={"compile": False, "checkpoint_activations": False})
    return build_sit(settings, info.latent_shape, info.num_classes)


def _checkpoint_to_resume(config: Config, ranks: Ranks) -> Path | None:
    found = None
    if ranks.is_main:
        config.directory.mkdir(parents=True, exist_ok=True)
        checkpoint.remove_unfinished(config.directory)
        steps = checkpoint.list_checkpoints(config.directory)
        if steps and not config.checkpoint.resume:
            raise UserError(
                f"{config.directory}: holds checkpoints (newest step {steps[-1]}), but checkpoint.resume is false; "
                "choose another name or run_dir, or remove the directory"
            )
        found = checkpoint.find(config.directory) if steps else None
    return ranks.gather(found)[0]


# What may not change between the run that wrote a checkpoint and the one that continues it.
FIXED = (
    "seed", "train.batch_size", "flow.path", "flow.prediction", "timesteps.bins", "model.name", "model.depth",
    "model.hidden_size", "model.num_heads", "model.patch_size", "model.num_classes", "model.learn_sigma",
)


def _check_same_run(config: Config, path: Path) -> None:
    saved = load_config(path / "config.yaml")
    for key in FIXED:
        before, now = _value(saved, key), _value(config, key)
        if before != now:
            raise UserError(
                f"{path}: was written with {key}={before}, and the configuration now says {now}; "
                f"set {key}={before} to continue this run, or give the new one another name"
            )


def _restore(run: Run, path: Path) -> None:
    manifest = checkpoint.manifest_of(path)
    checkpoint.restore(path, run.masters, run.ema.averages)
    run.step = manifest["step"]
    run.totals.skipped = run.totals.skipped + manifest["skipped_steps"]
    run.sampler.load_state_dict(checkpoint.read_state(path / "sampler.safetensors"))
    run.stream.load_state(json.loads((path / "data.json").read_text()))


def _value(config: Config, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config
