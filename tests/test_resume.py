"""A run that is stopped and continued is, step by step and bit for bit, the run that never stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import metrics, train_command
from vr_online import checkpoint


def rewind(source: Path, target: Path, step: int) -> None:
    """A copy of a run as it was when it was killed just after the checkpoint of `step`."""
    shutil.copytree(source, target)
    for later in checkpoint.list_checkpoints(target):
        if later > step:
            shutil.rmtree(target / "checkpoints" / str(later))
    (target / "checkpoints" / "latest").write_text(str(step))


def assert_same_lines(left: Path, right: Path, first: int) -> None:
    a, b = metrics(left), metrics(right)
    assert sorted(a) == sorted(b)
    for step in a:
        if step >= first:
            for name in ("train/loss", "train/grad_norm", "sampler/gain"):
                assert a[step][name] == b[step][name], (step, name)


def assert_same_weights(left: Path, right: Path) -> None:
    for kind in ("raw", "ema"):
        a, b = (checkpoint.load_weights(checkpoint.find(run), kind) for run in (left, right))
        assert a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resumed_run_equals_uninterrupted(stage, tiny, launch, tmp_path):
    options = tiny + [f"engine.zero_stage={stage}", "train.micro_batch_size=4"]
    whole = launch(options)
    assert whole.returncode == 0, whole.output
    rewind(tmp_path / "run", tmp_path / "resumed", step=3)
    resumed = launch(options + [f"run_dir={tmp_path}/resumed"])
    assert resumed.returncode == 0, resumed.output
    assert_same_lines(tmp_path / "run", tmp_path / "resumed", first=4)
    assert_same_weights(tmp_path / "run", tmp_path / "resumed")


def test_another_world_size_and_stage_continues(tiny, launch, tmp_path):
    """2 ranks at ZeRO 2, then 1 at ZeRO 0, then 2 at ZeRO 3: weights and the proposal continue where they were."""
    for steps, ranks, stage in ((3, 2, 2), (6, 1, 0), (9, 2, 3)):
        done = launch(tiny + [f"train.steps={steps}", f"engine.zero_stage={stage}"], ranks=ranks)
        assert done.returncode == 0, done.output
    assert checkpoint.list_checkpoints(tmp_path / "run") == [3, 6, 9]
    lines = metrics(tmp_path / "run")
    assert sorted(lines) == list(range(1, 10))
    manifest = checkpoint.manifest_of(checkpoint.find(tmp_path / "run"))
    assert manifest["world_size"] == 2 and checkpoint.Pieces(checkpoint.find(tmp_path / "run")).optimizer_steps == 9
    states = [checkpoint.read_state(tmp_path / f"run/checkpoints/{s}/sampler.safetensors") for s in (3, 6, 9)]
    assert [state["images"] for state in states] == [48, 96, 144]


def test_sigterm_saves_and_continues_bitwise(tiny, launch, tmp_path):
    """Every rank writes the checkpoint of the same step, at whatever step the signal comes."""
    options = tiny + ["train.steps=100000", "checkpoint.every=100000"]
    (tmp_path / "empty.yaml").write_text("{}\n")
    with open(tmp_path / "log", "w") as log:
        command = train_command(tmp_path / "empty.yaml", options)
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        deadline = time.monotonic() + 120
        while not (tmp_path / "run/metrics.jsonl").exists() or len(metrics(tmp_path / "run")) < 5:
            assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGTERM)  # as a terminal or a scheduler does it: launcher and ranks
        process.wait(timeout=60)
        while not (tmp_path / "run/summary.json").exists():
            assert time.monotonic() < deadline + 60, (tmp_path / "log").read_text()
            time.sleep(0.2)
    (step,) = checkpoint.list_checkpoints(tmp_path / "run")
    assert step % 10 == 0
    resumed = launch(options + [f"train.steps={step + 10}"])
    assert resumed.returncode == 0, resumed.output
    whole = launch(options + [f"train.steps={step + 10}", f"run_dir={tmp_path}/whole"])
    assert whole.returncode == 0, whole.output
    assert_same_lines(tmp_path / "run", tmp_path / "whole", first=1)
