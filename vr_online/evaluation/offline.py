"""Evaluation of checkpoints apart from training, by any number of processes that see the run's folder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import time
import traceback
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


SPOTS, SPOT_BYTES = 32, 4096

FAILED_FILE = "failed.txt"
"""In `evals/<step>`: why the last attempt at a step failed; gone once one succeeds."""


def identity(path: Path) -> str:
    """Of a checkpoint's contents and configuration: another one of the same step has another, a copy has the same.

    Reads a few hundred KiB of the weights, where any training would show, whatever their size.

    Raises:
        OSError: the checkpoint is gone.
    """
    return _identity(path, (path / "manifest.json").stat().st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _identity(path: Path, written: int) -> str:
    found = hashlib.sha256()
    for name in ("manifest.json", "config.yaml", "sampler.safetensors"):
        found.update((path / name).read_bytes())
    for file in sorted(path.glob("weights-*.safetensors")):
        with open(file, "rb") as weights:
            for part in range(SPOTS):
                weights.seek(file.stat().st_size * part // SPOTS)
                found.update(weights.read(SPOT_BYTES))
    return found.hexdigest()


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
        """Whether the checkpoint of this step, as it is now, has its result; never with `force`."""
        path = self._checkpoint(step)
        return not self.force and results.has_result(self.folder(path), identity(path))

    def _checkpoint(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / str(step)

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

        loaded, error = None, None
        try:  # the checkpoint may be pruned at any time
            _, config = self.config(path)
            folder, manifest = self.folder(path), checkpoint.manifest_of(path)
            origin = Origin(manifest["step"], manifest["images"], str(manifest.get("ema", "")), identity(path))
            loaded = load_model(path, config.evaluation.weights, device=self.device)
        except Exception as failure:
            error = failure
        self.group.raise_together(error)
        result = evaluate_model(
            loaded.model,
            loaded.flow,
            config,
            loaded.info,
            origin=origin,
            task=self._prepared(config, loaded.info),
            group=self.group,
            folder=folder,
            heartbeat=claim.check if claim else None,
            progress=self.progress,
        )
        if self.group.is_main:
            evals = self.run_dir / "evals"
            results.publish(self.run_dir, result, config.evaluation, folder / "samples.png")
            prune_samples(evals, config.evaluation.keep, str(folder.relative_to(evals / path.name)))
            with contextlib.suppress(OSError):
                (evals / path.name / FAILED_FILE).unlink(missing_ok=True)
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
            name = "newest checkpoint" if step is None else f"step {step}"
            try:
                result = self.evaluate(step)
            except Exception as error:  # out of memory, say: the next step may well fit
                reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                if not isinstance(error, (UserError, OSError)):
                    traceback.print_exc()
                failures.append(f"{name}: {reason}")
                self._say(failures[-1])
                self._note(step, reason)
                continue
            if result is None:
                self._say(f"{name}: another evaluator is at work on it")
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
        failures, over, seen_at = [], set(), time.monotonic()
        while True:
            key, finished = self.group.from_main(self._next(over) if self.group.is_main else None)
            if key is not None:
                said = self.evaluate_all([key[0]], lambda result: report(result) if self.took else None)
                gone = self.group.from_main(key[0] not in self._there() if said and self.group.is_main else False)
                failures += [] if gone else said
                over |= {key} if said or self.took else set()
                seen_at = time.monotonic()
                continue
            idle = self.group.from_main(time.monotonic() - seen_at)
            if finished or (give_up is not None and idle >= give_up):
                return failures
            time.sleep(interval if give_up is None else min(interval, max(give_up - idle, 0.05)))

    def _there(self) -> list[int]:
        """Steps of whole checkpoints; none where the folder cannot be read just now."""
        with contextlib.suppress(OSError):
            return checkpoint.list_checkpoints(self.run_dir)
        return []

    def _next(self, over: set[tuple[int, str]]) -> tuple[Optional[tuple[int, str]], bool]:
        """The first checkpoint to evaluate, as step and identity, and whether there will be no more. Never raises.

        Args:
            over: those that this watcher is through with, whatever came of it.
        """
        there, waiting = self._there(), False
        for step in there:
            key = (step, "")
            try:
                key = (step, identity(self._checkpoint(step)))
                if key in over or self.is_done(step):
                    continue
                waiting = True
                if not is_live(self.folder(self._checkpoint(step)) / CLAIM_FILE):
                    return key, False
            except (OSError, ValueError, UserError):  # pruned since it was listed; otherwise the evaluation will say what is wrong
                if key not in over and checkpoint.is_whole(self._checkpoint(step)):
                    return key, False
        return None, bool(there) and not waiting and self._is_last(there[-1])

    def _is_last(self, step: int) -> bool:
        with contextlib.suppress(OSError, UserError):
            return step >= load_config(self._checkpoint(step) / "config.yaml").train.total_steps
        return False

    def _note(self, step: Optional[int], reason: str) -> None:
        """Leaves word of a failure for the training that waits for the result."""
        folder = self.run_dir / "evals" / str(step)
        if self.group.is_main and step in self._there():
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / FAILED_FILE).write_text(reason.replace("\n", " ") + "\n")

    def _say(self, text: str) -> None:
        if self.group.is_main:
            tqdm.write(text)
