"""Evaluates a model or a checkpoint: samples, features, distances, `result.json`.

result = evaluate_model(model, flow, config, info)                  # in memory, nothing written
result = evaluate_checkpoint(run_dir / "checkpoints" / "5000")      # into evals/5000/
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

import numpy as np
import torch

from vr_online.config import Config, EvaluationConfig
from vr_online.errors import UserError
from vr_online.evaluation import results
from vr_online.evaluation.accumulate import Segments
from vr_online.evaluation.features import Extractor, build_extractor, to_uint8
from vr_online.evaluation.group import Group
from vr_online.evaluation.measure import Measurement, measure
from vr_online.evaluation.precision import full_float32
from vr_online.evaluation.samples import SampleKeeper
from vr_online.evaluation.sources import is_whole_folder
from vr_online.evaluation.statistics import (
    Statistics,
    check_reference,
    digest,
    load_reference,
    open_reference,
)

GRID = 64
"""Samples shown in samples.png."""


@dataclasses.dataclass
class Task:
    """What every evaluation of a run shares: loaded and checked once, before the first sample.

    Attributes:
        codec: decodes latents; None where it is not needed and its weights are not here.
    """

    settings: EvaluationConfig
    info: Any
    extractor: Extractor
    reference: Statistics
    codec: Any

    @classmethod
    def prepare(
        cls,
        config: Config,
        info: Any,
        *,
        group: Optional[Group] = None,
        device: torch.device | str = "cpu",
        cache: Optional[Path] = None,
        download: bool = False,
        progress: bool = True,
    ) -> "Task":
        """Builds the extractor and reads the reference; all ranks call it.

        Args:
            info: the run's `DatasetInfo`.
            cache: folder for statistics computed from a data set (`<run>/evals`).
            download: let clean-fid fetch a missing Inception.

        Raises:
            UserError: on every rank: an extractor, codec or reference is missing, damaged or does not fit.
        """
        group, settings, error = group or Group(), config.evaluation, None
        try:
            extractor = build_extractor(
                settings.features, resize=settings.resize, device=device, info=info, download=download and group.is_main
            )
            codec = _codec(info, settings, device, needed=extractor.space == "image")
        except Exception as failure:
            error = failure
        group.raise_together(error)
        reference = load_reference(
            _reference_of(config),
            extractor,
            group=group,
            cache=cache,
            codec_path=settings.codec_path,
            keep_features=_needs_features(settings),
            progress=progress,
        )
        task = cls(settings, info, extractor, reference, codec)
        try:
            task.try_out()
        except Exception as failure:
            error = failure
        group.raise_together(error)
        return task

    @staticmethod
    def check(config: Config, info: Any) -> None:
        """Looks whether `prepare` can work, without computing the statistics of a data set. One process calls it.

        Raises:
            UserError: as `prepare`.
        """
        settings = config.evaluation
        extractor = build_extractor(settings.features, resize=settings.resize, info=info)
        codec = _codec(info, settings, "cpu", needed=extractor.space == "image")
        reference = open_reference(_reference_of(config), _needs_features(settings))
        if isinstance(reference, Statistics):
            Task(settings, info, extractor, reference, codec).try_out()

    def try_out(self) -> None:
        """Sends one empty sample through; raises `UserError` when the reference or a metric does not fit the extractor."""
        features = self.extractor(self.to_space(torch.zeros(1, *self.info.latent_shape, device=self.extractor.device)))
        check_reference(self.reference, self.extractor, features.shape[1])
        if "is" in self.settings.metrics:
            self.extractor.class_probabilities(features)

    def to_space(self, latents: torch.Tensor) -> torch.Tensor:
        """Raw latents (B, C, H, W) to what the extractor takes."""
        if self.extractor.space == "latent":
            return self.info.norm.normalize(latents)
        return self.to_images(latents)

    @torch.no_grad()
    def to_images(self, latents: torch.Tensor) -> torch.Tensor:
        """Raw latents (B, C, H, W) to uint8 images (B, 3, h, w)."""
        return to_uint8(self.codec.decode(latents))


def _codec(info: Any, settings: EvaluationConfig, device: torch.device | str, needed: bool) -> Any:
    from vr_online.data.codecs import codec_for

    try:
        return codec_for(info, settings.codec_path, device)
    except UserError:
        if needed or settings.keep:
            raise
        return None


def _reference_of(config: Config) -> str:
    """`evaluation.reference`, or else the run's own shards where they lie in a local folder beside their dataset.json."""
    own = config.data.dataset or config.data.shards
    reference = config.evaluation.reference or (own if isinstance(own, str) and is_whole_folder(own) else None)
    if reference is None:
        raise UserError(
            "evaluation.reference: not set, and data.shards is no local folder with dataset.json and all its shards, which would "
            "stand in; give an npz from `vr-online fid stats`, or a local folder of latent shards or images"
        )
    return reference


def _needs_features(settings: EvaluationConfig) -> bool:
    return bool({"kid", "pr"} & set(settings.metrics))


class ModelGenerator:
    """Samples of a model in the extractor's space."""

    def __init__(self, model: torch.nn.Module, flow: Any, task: Task):
        from vr_online.evaluation.generation import Sampler

        self.task = task
        self.sampler = Sampler(
            model, flow, task.settings, task.info.norm, model.num_classes, known_classes=task.info.num_classes
        )

    @property
    def evaluations(self) -> int:
        return self.sampler.evaluations

    def latents(self, first: int, last: int) -> torch.Tensor:
        """Raw latents (last - first, C, H, W) of samples `first` to `last` - 1."""
        return self.sampler.latents(first, last)

    def __call__(self, first: int, last: int) -> torch.Tensor:
        return self.task.to_space(self.latents(first, last))


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where the weights come from.

    Attributes:
        step, images: training steps and images they have seen.
        ema: which average they are, in words.
        identity: changes with the weights; partial sums of others are not continued from, and their result is not this one's.
    """

    step: int = 0
    images: int = 0
    ema: str = ""
    identity: str = ""


def evaluate_model(
    model: torch.nn.Module,
    flow: Any,
    config: Config,
    info: Any,
    *,
    origin: Origin = Origin(),
    task: Optional[Task] = None,
    group: Optional[Group] = None,
    folder: Optional[Path] = None,
    heartbeat: Optional[Callable[[], None]] = None,
    should_stop: Optional[Callable[[], bool]] = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Evaluates a model as `config.evaluation` says; all ranks of `group` call it with the same weights.

    Args:
        model: predicts as `flow` says; put into evaluation mode meanwhile.
        flow: path and prediction.
        info: the run's `DatasetInfo`.
        origin: recorded in the result.
        task: from `Task.prepare`, to reuse its network and reference.
        folder: `evals/<step>`; gets result.json, samples.png and, while it runs, partial sums. None writes nothing.
        heartbeat: called on the main rank after every batch; may raise.
        should_stop: called on all ranks after every batch and gives all the same answer; true ends the evaluation.

    Returns:
        The contents of result.json, on every rank.

    Raises:
        UserError: on every rank.
        Interrupted: on every rank, when told to stop; the next evaluation continues from what is finished.
    """
    group, parameter = group or Group(), next(model.parameters())
    task = task or Task.prepare(config, info, group=group, device=parameter.device, progress=progress)
    with _evaluating(model), torch.no_grad(), full_float32():
        generate = ModelGenerator(model, flow, task)
        keeper = SampleKeeper(folder / "partial", _denormalised(task)) if folder and task.settings.keep else None
        segments = Segments(folder / "partial", fingerprint(task, flow, origin.identity)) if folder else None
        measurement = _measure(generate, task, group, segments, keeper, heartbeat, should_stop, progress)
        result = results.build(measurement, task, origin, flow, world_size=group.world_size, dtype=parameter.dtype)
        error = None
        try:
            if folder and group.is_main:
                _write(folder, result, task.settings, _grid(generate, task), keeper)
        except Exception as failure:
            error = failure
        group.raise_together(error)
    return group.from_main(result)


def _measure(
    generate: ModelGenerator,
    task: Task,
    group: Group,
    segments: Optional[Segments],
    keeper: Optional[SampleKeeper],
    heartbeat: Optional[Callable[[], None]],
    should_stop: Optional[Callable[[], bool]],
    progress: bool,
) -> Measurement:
    settings = task.settings
    return measure(
        generate,
        task.extractor,
        task.reference,
        n=settings.n,
        batch_size=settings.batch_size,
        metrics=tuple(settings.metrics),
        seed=settings.seed,
        group=group,
        segments=segments,
        keeper=keeper,
        heartbeat=heartbeat,
        should_stop=should_stop,
        progress=progress,
    )


def _denormalised(task: Task) -> Callable[[torch.Tensor], torch.Tensor]:
    """Latents in the extractor's space to float images."""
    return lambda x_1: task.codec.decode(task.info.norm.denormalize(x_1))


def fingerprint(task: Task, flow: Any, identity: str) -> str:
    """Changes with anything that the sums of a batch depend on."""
    settings = {key: getattr(task.settings, key) for key in results.SETTINGS if key not in ("reference", "metrics")}
    kept = [*sorted({"kid", "pr", "is"} & set(task.settings.metrics)), task.settings.keep > 0]
    return digest(
        [settings, kept, task.extractor.describe(), task.info.codec_hash, flow.path.name, flow.prediction, identity]
    )


def _grid(generate: ModelGenerator, task: Task) -> Optional[np.ndarray]:
    """The first samples as one picture; None where no codec can decode them."""
    from vr_online.monitor.grid import image_grid

    if task.codec is None:
        return None
    count, size = min(GRID, task.settings.n), task.settings.batch_size
    images = [task.to_images(generate.latents(i, min(i + size, count))) for i in range(0, count, size)]
    # Balanced labels go round the classes: as many columns as classes puts one class in each.
    columns = task.info.num_classes if 2 < task.info.num_classes <= 16 else 8
    return image_grid(torch.cat(images).permute(0, 2, 3, 1).cpu().numpy(), columns)


def _write(
    folder: Path,
    result: dict[str, Any],
    settings: EvaluationConfig,
    grid: Optional[np.ndarray],
    keeper: Optional[SampleKeeper],
) -> None:
    """Everything of a finished evaluation; result.json last, since it says that all is there."""
    from vr_online.monitor.grid import save_png

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if grid is not None:
            save_png(folder / "samples.png", grid)
        if keeper:
            target = folder / ("samples.npz" if settings.keep_format == "npz" else "samples")
            keeper.join(target, settings.n, -(-settings.n // settings.batch_size))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"{folder}: cannot write samples: {reason}; free space and evaluate again, finished samples are kept"
        ) from None
    results.write(folder / "result.json", result)
    with contextlib.suppress(OSError):
        Segments(folder / "partial", "").clear()  # before the images: sums are of no use without them
        SampleKeeper(folder / "partial").clear()
        (folder / "partial").rmdir()
