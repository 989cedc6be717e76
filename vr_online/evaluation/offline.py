"""Evaluation of checkpoints apart from training, by any number of processes that see the run's folder."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any, Callable, Iterable, Optional

import torch
from tqdm import tqdm

from vr_online import checkpoint
from vr_online.config import Config, load_config
from vr_online.errors import UserError
from vr_online.evaluation import results
from vr_online.evaluation.claims import FILE as CLAIM_FILE
from vr_online.evaluation.claims import Claim, is_live
from vr_online.evaluation.evaluate import Origin, Task, evaluate_model
from vr_online.evaluation.group import Group
from vr_online.evaluation.samples import prune_samples
from vr_online.evaluation.statistics import digest


FAILED_FILE = "failed.txt"
"""In `evals/<step>`: why the last attempt at a step failed; gone once one succeeds."""


def identity(path: Path) -> str:
    """Changes when a checkpoint is written again, even with the same step."""
    manifest = path / "manifest.json"
    return digest([manifest.read_text(), manifest.stat().st_mtime_ns])


def qualify(override: str) -> str:
    """`n=1000` to `evaluation.n=1000`; a key with a dot is taken as it is."""
    key = override.partition("=")[0]
    return override if "." in key else f"evaluation.{override}"


@dataclasses.dataclass
class Offline:
    """Evaluates checkpoints of one run, each at most once whatever the number of evaluators.

    Attributes:
        run_dir: the run's folder.
        overrides: `key=value`, applied over the configuration saved with each checkpoint.
        group: ranks that evaluate together.
        device: where sampling and features are computed.
        download: let clean-fid fetch a missing Inception.
        force: evaluate again where there is a result.
        took: whether the last result was made here and not found.
    """

    run_dir: Path
    overrides: tuple[str, ...] = ()
    group: Group = dataclasses.field(default_factory=Group)
    device: torch.device = torch.device("cpu")
    download: bool = False
    force: bool = False
    progress: bool = True
    took: bool = False
    _task: Optional[Task] = None
    _task_key: str = ""

    def config(self, path: Path) -> tuple[Config, Config]:
        """The configuration saved with a checkpoint, as it is and with the overrides."""
        return load_config(path / "config.yaml"), load_config(path / "config.yaml", [qualify(o) for o in self.overrides])

    def folder(self, path: Path) -> Path:
        """Where the result of a checkpoint goes."""
        own, config = self.config(path)
        return self.run_dir / "evals" / path.name / results.variant(config.evaluation, own.evaluation)

    def is_done(self, step: int) -> bool:
        path = self.run_dir / "checkpoints" / str(step)
        return not self.force and (self.folder(path) / "result.json").exists()

    def evaluate(self, step: Optional[int] = None) -> Optional[dict[str, Any]]:
        """Evaluates the checkpoint of `step` (None: the newest). All ranks call it.

        Returns:
            The result, read where it was there already; None where another evaluator is at work on it.

        Raises:
            UserError: on every rank.
        """
        path, claim, result, error = None, None, None, None
        if self.group.is_main:
            try:
                path, claim, result = self._take(step)
            except Exception as failure:
                error = failure
        self.group.raise_together(error)
        path, self.took, result = self.group.from_main((path, claim is not None, result))
        if not self.took:
            return result
        try:
            return self._evaluate(path, claim)
        finally:
            if claim:
                claim.release()

    def _take(self, step: Optional[int]) -> tuple[Path, Optional[Claim], Optional[dict[str, Any]]]:
        """The checkpoint, with a claim on it or the result it has; neither where it is another's."""
        path = checkpoint.find(self.run_dir, step)
        folder = self.folder(path)
        claim = None if self.is_done(int(path.name)) else Claim.take(folder)
        if self.is_done(int(path.name)):  # looked at with the claim in hand: another may just have finished and let go
            if claim:
                claim.release()
            return path, None, results.read(folder / "result.json")
        return path, claim, None

    def _evaluate(self, path: Path, claim: Optional[Claim]) -> dict[str, Any]:
        from vr_online.evaluation.generation import load_model

        _, config = self.config(path)
        loaded, error = None, None
        try:
            loaded = load_model(path, config.evaluation.weights, device=self.device)
        except Exception as failure:
            error = failure
        self.group.raise_together(error)
        manifest = checkpoint.manifest_of(path)
        result = evaluate_model(
            loaded.model,
            loaded.flow,
            config,
            loaded.info,
            origin=Origin(manifest["step"], manifest["images"], str(manifest.get("ema", "")), identity(path)),
            task=self._prepared(config, loaded.info),
            group=self.group,
            folder=self.folder(path),
            heartbeat=claim.check if claim else None,
            progress=self.progress,
        )
        if self.group.is_main:
            results.publish(self.run_dir, result, config.evaluation, self.folder(path) / "samples.png")
            prune_samples(self.run_dir / "evals", config.evaluation.keep)
            (self.run_dir / "evals" / path.name / FAILED_FILE).unlink(missing_ok=True)
        return result

    def _prepared(self, config: Config, info: Any) -> Task:
        """The extractor and reference, kept from checkpoint to checkpoint while they fit."""
        key = digest([config.evaluation.model_dump(), info.to_json()])
        if self._task is None or key != self._task_key:
            self._task = Task.prepare(
                config,
                info,
                group=self.group,
                device=self.device,
                cache=self.run_dir / "evals",
                download=self.download,
                progress=self.progress,
            )
            self._task_key = key
        return self._task

    def evaluate_all(self, steps: Iterable[int], report: Callable[[dict[str, Any]], None]) -> list[str]:
        """Evaluates several steps, going on after one that fails; returns the failures' messages."""
        failures = []
        for step in steps:
            try:
                result = self.evaluate(step)
            except UserError as error:
                failures.append(f"{'newest checkpoint' if step is None else f'step {step}'}: {error}")
                self._say(failures[-1])
                self._note(step, str(error))
                continue
            if result is None:
                self._say(f"{'newest checkpoint' if step is None else f'step {step}'}: another evaluator is at work on it")
            elif self.group.is_main:
                report(result)
        return failures

    def watch(
        self, report: Callable[[dict[str, Any]], None], interval: float = 30.0, give_up: Optional[float] = None
    ) -> list[str]:
        """Evaluates each checkpoint as it appears, until the last step of the run is done.

        Args:
            interval: seconds between looks; ranks of one group wait no longer than that for each other.
            give_up: end after so many seconds without a new checkpoint; None waits for ever.
        """
        failures, failed, seen_at = [], set(), time.monotonic()
        while True:
            step, finished = self.group.from_main(self._next(failed) if self.group.is_main else None)
            if step is not None:
                said = self.evaluate_all([step], lambda result: report(result) if self.took else None)
                failures += said
                failed |= {step} if said else set()
                seen_at = time.monotonic()
                continue
            idle = self.group.from_main(time.monotonic() - seen_at)
            if finished or (give_up is not None and idle >= give_up):
                return failures
            time.sleep(interval if give_up is None else min(interval, max(give_up - idle, 0.05)))

    def _next(self, failed: set[int]) -> tuple[Optional[int], bool]:
        """The first step without a result that nobody is at work on, and whether there will be no more."""
        there = checkpoint.list_checkpoints(self.run_dir)
        waiting = [step for step in there if step not in failed and not self.is_done(step)]
        for step in waiting:
            if not is_live(self.folder(self.run_dir / "checkpoints" / str(step)) / CLAIM_FILE):
                return step, False
        if not there or waiting:
            return None, False
        config, _ = self.config(self.run_dir / "checkpoints" / str(there[-1]))
        return None, there[-1] >= config.train.total_steps

    def _note(self, step: Optional[int], reason: str) -> None:
        """Leaves word of a failure for the training that waits for the result."""
        folder = self.run_dir / "evals" / str(step)
        if self.group.is_main and step in checkpoint.list_checkpoints(self.run_dir):
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / FAILED_FILE).write_text(reason.replace("\n", " ") + "\n")

    def _say(self, text: str) -> None:
        if self.group.is_main:
            tqdm.write(text)
