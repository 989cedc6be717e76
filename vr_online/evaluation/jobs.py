"""Evaluations while a run trains: inline on all ranks, or detached in processes of their own.

A detached job is `vr-online fid RUN --steps STEP` on the checkpoint just written, as a local process of low
priority or through a command template (Slurm). Whatever becomes of it, training goes on with the same
numbers: a failure is said in the log and in TensorBoard, and the evaluation can be made up for offline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

import numpy as np
import torch
from tqdm import tqdm

from vr_online.checkpoint import list_checkpoints
from vr_online.config import Config, EvaluationConfig
from vr_online.errors import UserError
from vr_online.evaluation import results
from vr_online.evaluation.claims import FILE as CLAIM_FILE
from vr_online.evaluation.claims import Claim, claimed_steps, is_live
from vr_online.evaluation.evaluate import Origin, Task, evaluate_model
from vr_online.evaluation.group import Group
from vr_online.evaluation.measure import Interrupted
from vr_online.evaluation.offline import FAILED_FILE, identity
from vr_online.evaluation.samples import prune_samples

POLL_S = 2.0
SUBMITTED_S = 24 * 3600.0
"""How long a submitted job may go without a result or anyone at work on it before it is given up."""
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CROSS_RANK",
    "CROSS_SIZE",
    "LOCAL_SIZE",
)


@contextlib.contextmanager
def untouched_randomness() -> Iterator[None]:
    """Global random state of torch (devices included), NumPy and Python is afterwards what it was before."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@dataclasses.dataclass
class Job:
    """A detached evaluation under way.

    Attributes:
        process: None once a command template has submitted it elsewhere.
        since: when it was submitted or last seen at work, by the monotonic clock.
    """

    step: int
    process: Optional[subprocess.Popen]
    log: Path
    since: float = 0.0


class Evaluator:
    """The evaluations of one training run. Every method is called by all ranks unless it says otherwise.

    Args:
        config: the run's.
        info: its `DatasetInfo`.
        ranks: rank, world_size, device.
        monitor: where failures are told.

    Raises:
        UserError: on every rank, before training: the extractor, the codec or the reference is missing or does not fit.
    """

    def __init__(self, config: Config, info: Any, ranks: Any, monitor: Any):
        self.config, self.info, self.monitor = config, info, monitor
        self.settings: EvaluationConfig = config.evaluation
        self.run_dir = config.directory
        self.device = ranks.device
        self.enabled = self.settings.every is not None
        self.failures: dict[int, str] = {}
        self.detached = Detached(self)
        self._last: Optional[dict[str, Any]] = None
        self._last_step: Optional[int] = None
        self._task: Optional[Task] = None
        self.group = Group.current() if self.enabled else Group()
        if self.enabled:
            self._check()
            if self.settings.mode == "detached" and self.group.is_main:
                self._make_up()

    def _check(self) -> None:
        """Finds out before the first step whether evaluations can work."""
        error = None
        try:
            with untouched_randomness():
                if self.settings.mode == "inline":
                    self._task = Task.prepare(
                        self.config, self.info, group=self.group, device=self.device, cache=self.run_dir / "evals"
                    )
                elif self.group.is_main and not self.settings.command:  # where a template leads, paths may differ
                    Task.check(self.config, self.info)
        except UserError as failure:
            error = failure
        self.group.raise_together(error)

    def due(self, step: int) -> bool:
        """Whether the checkpoint of this step is to be evaluated."""
        return self.enabled and step > 0 and step % self.settings.every == 0

    def _make_up(self) -> None:
        """Queues what jobs of an earlier launch of this run, ended with it, left undone."""
        self.detached.queue += [step for step in list_checkpoints(self.run_dir) if self._lacks_result(step)]

    def missed(self, step: int) -> bool:
        """Whether a run that continues from `step` was ended before the evaluation due there was."""
        return self.group.from_main(self._lacks_result(step) if self.group.is_main else None)

    def _lacks_result(self, step: int) -> bool:
        """Whether the checkpoint of this step, as it is now, should have a result, and has none. Never raises."""
        if not self.due(step) and not (self.enabled and step == self.config.train.total_steps):
            return False
        return not results.has_result(self._folder(step), self._identity(step))

    def _identity(self, step: int) -> str:
        """Of the checkpoint; empty where it cannot be read."""
        with contextlib.suppress(OSError):
            return identity(self.run_dir / "checkpoints" / str(step))
        return ""

    def _folder(self, step: int) -> Path:
        return self.run_dir / "evals" / str(step)

    def evaluate(self, run: Any, should_stop: Optional[Callable[[], bool]] = None) -> None:
        """Evaluates the checkpoint of `run.step`, just written: here and now, or by a detached job.

        Args:
            should_stop: called on all ranks after every batch of an inline evaluation and gives all the same answer;
                true leaves it to the run's continuation, which goes on from the finished batches.
        """
        if not self.enabled:
            return
        self._last_step = run.step
        if self.settings.mode == "inline":
            self._inline(run, should_stop)
        elif self.group.is_main:
            self.detached.add(run.step)

    def _inline(self, run: Any, should_stop: Optional[Callable[[], bool]]) -> None:
        with untouched_randomness():
            model = run.average_model(self.settings.weights, torch.float32)  # as offline, whatever engine.precision is
            try:
                with self._claim(run.step) as (mine, claim):
                    if not mine:
                        self._say(f"the evaluation of step {run.step} is left to the evaluator that is at work on it")
                        return
                    result = self._evaluate(run, model, claim, should_stop)
            except Interrupted:
                self._say(f"told to stop: the evaluation of step {run.step} is left for when the run continues")
                return
            except Exception as error:
                # Raised on every rank alike. A run of weeks does not end because one evaluation could not.
                if not isinstance(error, UserError):
                    traceback.print_exc()
                self.failed(run.step, f"{error}" if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
                return
        self._last = result
        if self.group.is_main:
            results.publish(self.run_dir, result, self.settings, self._folder(run.step) / "samples.png")
            prune_samples(self.run_dir / "evals", self.settings.keep)
            self._say(f"step {run.step}: {result['metric']} {result['value']:.4g}")

    @contextlib.contextmanager
    def _claim(self, step: int) -> Iterator[tuple[bool, Optional[Claim]]]:
        """Claims a step for all ranks: whether it is theirs, and the claim itself on the main one."""
        claim, error = None, None
        try:
            claim = Claim.take(self._folder(step), owner="training") if self.group.is_main else None
        except UserError as failure:
            error = failure
        try:
            self.group.raise_together(error)
            yield self.group.from_main(claim is not None), claim
        finally:
            if claim:
                claim.release()

    def _evaluate(
        self, run: Any, model: torch.nn.Module, claim: Optional[Claim], should_stop: Optional[Callable[[], bool]]
    ) -> dict[str, Any]:
        return evaluate_model(
            model,
            run.flow,
            self.config,
            self.info,
            origin=Origin(run.step, run.images, run.ema.decay.name, self._identity(run.step)),
            task=self._task,
            group=self.group,
            folder=self._folder(run.step),
            heartbeat=claim.check if claim else None,
            should_stop=should_stop,
        )

    def _say(self, text: str) -> None:
        if self.group.is_main:
            tqdm.write(text)

    def failed(self, step: int, reason: str) -> None:
        """Tells of a failed evaluation in the log and in TensorBoard."""
        self.failures[step] = reason
        if self.group.is_main:
            again = f"vr-online fid {self.run_dir} --steps {step}"
            tqdm.write(f"the evaluation of step {step} failed, training goes on: {reason}\n  make it up with: {again}")
            with contextlib.suppress(OSError):
                self.monitor.text("eval/failed", f"step {step}: {reason}\n\n`{again}`", step)

    def poll(self) -> None:
        """Looks after detached jobs; cheap enough for every step, exchanges nothing, never raises."""
        if self.enabled and self.group.is_main:
            self.detached.poll()

    def pending_steps(self) -> set[int]:
        """Steps whose checkpoints an evaluation still needs: of this run's jobs and of evaluators elsewhere."""
        return (self.detached.steps() | claimed_steps(self.run_dir)) if self.group.is_main else set()

    def finish(self, wait: Optional[bool] = None) -> None:
        """Ends a run: waits for detached jobs if `wait` (default: `wait_at_end`), otherwise leaves them to themselves."""
        if self.enabled and self.group.is_main:
            self.detached.finish(self.settings.wait_at_end if wait is None else wait)

    def summary(self) -> dict[str, float]:
        """The numbers of the last evaluation, by name, where it is done; of the run's newest if this launch made none."""
        if self._last is None and self.group.is_main:
            done = [int(p.parent.name) for p in (self.run_dir / "evals").glob("*/result.json") if p.parent.name.isdigit()]
            step = max(done, default=-1) if self._last_step is None else self._last_step
            with contextlib.suppress(UserError):
                self._last = results.read(self._folder(step) / "result.json") if step in done else None
        return dict(self._last["metrics"]) if self._last else {}


class Detached:
    """The detached jobs of a run, kept by its main rank: one local process at a time, the others queued."""

    def __init__(self, evaluator: Evaluator):
        self.evaluator = evaluator
        self.queue: list[int] = []
        self.running: list[Job] = []
        self._polled = 0.0

    def steps(self) -> set[int]:
        return {*self.queue, *(job.step for job in self.running)}

    def add(self, step: int) -> None:
        if step not in self.steps():
            self.queue.append(step)
        self._advance()

    def poll(self, now: bool = False) -> None:
        if not now and time.monotonic() - self._polled < POLL_S:
            return
        self._polled = time.monotonic()
        for job in list(self.running):
            try:
                ended = self._ended(job)
            except OSError:  # the run's folder is out of reach for the moment
                continue
            if ended:
                self.running.remove(job)
        self._advance()

    def finish(self, wait: bool) -> None:
        if not wait:
            if self.queue:
                self._launch(self.queue)
                self.queue = []
            return
        self.poll(now=True)
        if local := [job for job in self.running if job.process]:
            steps = sorted({*self.queue, *(job.step for job in local)})
            tqdm.write(f"waiting for the evaluation of step {', '.join(map(str, steps))}")
        while self.queue or any(job.process for job in self.running):
            time.sleep(0.2)
            self.poll(now=True)

    def _advance(self) -> None:
        while self.queue and not any(job.process for job in self.running):
            job = self._launch([self.queue.pop(0)])
            if job is not None:
                self.running.append(job)

    def _launch(self, steps: list[int]) -> Optional[Job]:
        """Starts a job for the steps; a failure to start is told, never raised."""
        settings, run_dir = self.evaluator.settings, self.evaluator.run_dir
        log = run_dir / "evals" / str(steps[0]) / "log.txt"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            for step in steps:  # what a run left that then went on from an earlier step
                self._clear(step)
            with open(log, "w") as output:
                process = subprocess.Popen(
                    _command(settings, run_dir, steps),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=_environment(settings),
                    start_new_session=True,
                )
        except (OSError, ValueError, KeyError, IndexError) as error:
            self.evaluator.failed(steps[0], f"the job could not be started: {type(error).__name__}: {error}")
            return None
        return Job(steps[0], process, log)

    def _ended(self, job: Job) -> bool:
        result = self.evaluator._folder(job.step) / "result.json"
        if job.process is None:
            return result.exists() or self._failed_elsewhere(job) or self._silent(job)
        code = job.process.poll()
        if code is None:
            return False
        if code == 0 and (self.evaluator.settings.command or is_live(result.parent / CLAIM_FILE)):
            # Submitted, or a watcher elsewhere has it; the checkpoint is kept until the result is there.
            job.process, job.since = None, time.monotonic()
            return result.exists()
        if code == 0 and result.exists():
            self._tell(result)
        else:
            self.evaluator.failed(job.step, f"{_ending(code)}: {_tail(job.log)} (log: {job.log})")
        return True

    def _clear(self, step: int) -> None:
        """Removes the result of another checkpoint of this step, and word of a failure."""
        folder, own = self.evaluator._folder(step), self.evaluator._identity(step)
        (folder / FAILED_FILE).unlink(missing_ok=True)
        with contextlib.suppress(UserError):
            if (folder / "result.json").exists() and own and results.read(folder / "result.json").get("checkpoint") == own:
                return
        (folder / "result.json").unlink(missing_ok=True)

    def _silent(self, job: Job) -> bool:
        """Whether nothing was heard of a submitted job for too long; tells of it."""
        if time.monotonic() - job.since < SUBMITTED_S:
            return False
        if is_live(self.evaluator._folder(job.step) / CLAIM_FILE):
            job.since = time.monotonic()
            return False
        self.evaluator.failed(job.step, f"no result, and nobody at work on it, {SUBMITTED_S / 3600:g} h after it was submitted")
        return True

    def _failed_elsewhere(self, job: Job) -> bool:
        """Whether a submitted job left word that it failed; tells of it."""
        note = self.evaluator._folder(job.step) / FAILED_FILE
        if not note.exists():
            return False
        self.evaluator.failed(job.step, _tail(note))
        return True

    @staticmethod
    def _tell(path: Path) -> None:
        with contextlib.suppress(UserError):
            result = results.read(path)
            tqdm.write(f"step {result['step']}: {result['metric']} {result['value']:.4g}")


def _command(settings: EvaluationConfig, run_dir: Path, steps: list[int]) -> list[str]:
    """The job's command line: the template with {run}, {step} and {device} filled in word by word, or our own."""
    listed = ",".join(map(str, steps))
    if settings.command:
        values = {"run": str(run_dir.absolute()), "step": listed, "device": settings.device or ""}
        return [word.format(**values) for word in shlex.split(settings.command)]
    nice = ["nice", "-n", "10"] if shutil.which("nice") else []
    device = [] if settings.device is None else ["--device", settings.device.partition(":")[0]]
    return [*nice, sys.executable, "-m", "vr_online.evaluation.cli", str(run_dir), "--steps", listed, *device]


def _environment(settings: EvaluationConfig) -> dict[str, str]:
    """This process's environment without the launcher's variables, and with the one device the job may see."""
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES and not k.startswith("TORCHELASTIC_")}
    kind, _, index = (settings.device or "").partition(":")
    if kind == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif kind == "cuda" and index:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(index)] if visible else index
    return environment


def _ending(code: int) -> str:
    return f"the job was killed by signal {-code}" if code < 0 else f"the job ended with status {code}"


def _tail(log: Path) -> str:
    """The last line a job wrote."""
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").replace("\r", "\n").splitlines() if line.strip()]
        return lines[-1][-500:] if lines else "it wrote nothing"
    return "its log cannot be read"
