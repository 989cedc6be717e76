"""The loop of an evaluation: generate, extract, add up, over any number of ranks, and continue after a kill."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Callable, Optional, Protocol

import numpy as np
import torch
from tqdm import tqdm

from vr_online.errors import UserError
from vr_online.evaluation.accumulate import Accumulator, Segments
from vr_online.evaluation.features import Extractor
from vr_online.evaluation.frechet import frechet_distance
from vr_online.evaluation.group import Group
from vr_online.evaluation.metrics import kernel_inception_distance, precision_recall
from vr_online.evaluation.samples import SampleKeeper
from vr_online.evaluation.statistics import Statistics, metric_name


class Generator(Protocol):
    """Where samples come from. Sample i must not depend on which others are asked for with it.

    Attributes:
        evaluations: network evaluations so far, summed over samples.
    """

    evaluations: int

    def __call__(self, first: int, last: int) -> torch.Tensor:
        """Samples `first` to `last` - 1, in the extractor's space: uint8 images (B, 3, H, W) or normalised latents."""
        ...


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What an evaluation measured.

    Attributes:
        metric, value: name and value of the Frechet distance.
        metrics: every number by name, the distance included.
        n: samples, exactly as many as asked for.
        nfe: network evaluations per sample.
        continued: samples taken over from an evaluation that was killed.
        wall_s: seconds of this attempt.
    """

    metric: str
    value: float
    metrics: dict[str, float]
    n: int
    nfe: float
    continued: int
    wall_s: float


class Interrupted(UserError):
    """The evaluation was told to stop before its last batch."""


def measure(
    generate: Generator,
    extractor: Extractor,
    reference: Statistics,
    *,
    n: int,
    batch_size: int = 64,
    metrics: tuple[str, ...] = ("fd",),
    seed: int = 0,
    group: Optional[Group] = None,
    segments: Optional[Segments] = None,
    keeper: Optional[SampleKeeper] = None,
    heartbeat: Optional[Callable[[], None]] = None,
    should_stop: Optional[Callable[[], bool]] = None,
    progress: bool = True,
) -> Measurement:
    """Measures exactly n samples against reference statistics. All ranks of `group` call it and get the result.

    Args:
        metrics: of `fd`, `kid`, `is`, `pr`; the distance is always there.
        segments: where sums of finished batches are saved, to continue from.
        keeper: stores the samples themselves.
        heartbeat: called on the main rank after every batch; may raise to stop all ranks.
        should_stop: called on all ranks after every batch but the last and gives all the same answer.

    Raises:
        UserError: on every rank when any rank fails so: a sample that is not finite, a full disk, ...
        Interrupted: on every rank once `should_stop` is true, with all finished batches saved in `segments`.
    """
    start, group = time.monotonic(), group or Group()
    total = Accumulator(n, keep_features=bool({"kid", "pr"} & set(metrics)), with_score="is" in metrics)
    done = _continue(total, segments, group, extractor, keeper)
    loop = _Loop(generate, extractor, total, n, batch_size, group, segments, keeper, heartbeat, should_stop)
    todo = [batch for batch in range(-(-n // batch_size)) if batch not in done]
    continued = n - loop.samples(todo)
    shown = progress and group.is_main
    with tqdm(initial=continued, total=n, unit="sample", desc=extractor.metric, leave=False, disable=not shown) as bar:
        loop.run(todo, bar)
    values = _finish(total, extractor, reference, metrics, seed, group)
    assert values.pop("n") == n, "an evaluation counted another number of samples than it was asked for"
    nfe = values.pop("nfe")
    name = metric_name(reference, extractor)
    return Measurement(name, values[name], values, n, nfe, continued, time.monotonic() - start)


def _continue(
    total: Accumulator, segments: Optional[Segments], group: Group, extractor: Extractor, keeper: Optional[SampleKeeper]
) -> set[int]:
    """Takes over what earlier attempts finished; returns its batches. Each rank reads its share of the files."""
    if segments is None:
        return set()
    found = segments.found(*([keeper.has] if keeper else [])) if group.is_main else None
    files = group.from_main(found)
    error = None
    try:
        for path, _ in files[group.rank :: group.world_size]:
            total.merge(segments.read(path), extractor.device)
    except Exception as failure:
        error = failure
    group.raise_together(error)
    return {batch for _, batches in files for batch in batches}


@dataclasses.dataclass
class _Loop:
    """The batches of one attempt. Rank r takes every world_size-th; all ranks meet after each, so that none waits
    long for another and all fail together."""

    generate: Generator
    extractor: Extractor
    total: Accumulator
    n: int
    batch_size: int
    group: Group
    segments: Optional[Segments]
    keeper: Optional[SampleKeeper]
    heartbeat: Optional[Callable[[], None]]
    should_stop: Optional[Callable[[], bool]]

    def samples(self, batches: list[int]) -> int:
        """Samples in these batches; only the last of all may be short."""
        return sum(min(self.batch_size, self.n - batch * self.batch_size) for batch in batches)

    def run(self, todo: list[int], bar: tqdm) -> None:
        self.fresh = self.total.empty_like()
        world_size = self.group.world_size
        for start in range(0, len(todo), world_size):
            turn, error = todo[start : start + world_size], None
            try:
                if self.group.rank < len(turn):
                    self.batch(turn[self.group.rank])
                self.save(last=start + self.group.rank + world_size >= len(todo))
                if self.heartbeat and self.group.is_main:
                    self.heartbeat()
            except Exception as failure:
                error = failure
            self.group.raise_together(error)
            bar.update(self.samples(turn))
            if self.should_stop and start + world_size < len(todo) and self.should_stop():
                self.leave()

    def leave(self) -> None:
        """Saves what is finished on every rank and raises `Interrupted` on all."""
        error = None
        try:
            self.save(last=True)
        except Exception as failure:
            error = failure
        self.group.raise_together(error)
        raise Interrupted("told to stop before the last sample; evaluate again to continue")

    def batch(self, batch: int) -> None:
        first = batch * self.batch_size
        before = self.generate.evaluations
        samples = self.generate(first, min(first + self.batch_size, self.n))
        features = self.extractor(samples)
        for sums in (self.total, self.fresh) if self.segments else (self.total,):
            sums.add(batch, first, features, self.generate.evaluations - before, self.extractor)
        if self.keeper:
            self.keeper.keep(batch, samples)

    def save(self, last: bool) -> None:
        """Saves the batches since the last save when it is time, and after this rank's last."""
        if self.segments and self.fresh.batches and (last or self.segments.due):
            self.segments.save(self.fresh)
            self.fresh = self.total.empty_like()


def _finish(
    total: Accumulator, extractor: Extractor, reference: Statistics, metrics: tuple[str, ...], seed: int, group: Group
) -> dict[str, float]:
    reduced = total.reduce(group, reference.moments.dim)
    values, error = None, None
    if group.is_main:
        try:
            values = _values(reduced, extractor, reference, metrics, seed)
        except Exception as failure:
            error = failure
    group.raise_together(error)
    return group.from_main(values)


def _values(
    reduced: Accumulator, extractor: Extractor, reference: Statistics, metrics: tuple[str, ...], seed: int
) -> dict[str, float]:
    distance = frechet_distance(reduced.sums.moments(), reference.moments)
    values: dict[str, Any] = {
        metric_name(reference, extractor): distance,
        "n": reduced.sums.n,
        "nfe": reduced.evaluations / reduced.sums.n,
    }
    if "kid" in metrics or "pr" in metrics:
        fake = reduced.ordered_features()
        real = np.asarray(reference.features, dtype=np.float32)
        if "kid" in metrics:
            values["kid"] = kernel_inception_distance(real, fake, seed)
        if "pr" in metrics:
            values["precision"], values["recall"] = precision_recall(real, fake, device=extractor.device)
    if "is" in metrics:
        values["inception_score"], values["inception_score_std"] = reduced.score.score()
    return values
