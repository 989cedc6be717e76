"""Fixtures shared by the tests: small real data, small configurations, and the real launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two ranks share two cores; also inherited by launched processes

TINY = [
    "model.name=custom", "model.depth=2", "model.hidden_size=32", "model.num_heads=2", "model.patch_size=2",
    "train.batch_size=16", "train.steps=6", "optimizer.lr=1e-3", "monitor.log_every=1", "checkpoint.every=3",
    "timesteps.bins=4", "timesteps.warmup=2", "timesteps.proposal=online_vr", "data.workers=0", "data.shuffle=64",
]


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """Folder with train/ and heldout/ shards of scikit-learn's digits."""
    from vr_online.data.digits import write_digits

    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder)
    return folder


@pytest.fixture
def tiny(digits, tmp_path) -> list[str]:
    """Overrides of a run that takes a second: a two-block model on the digits."""
    return TINY + [f"data.shards={digits}/train", f"run_dir={tmp_path}/run"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train_command(config: Path, overrides: list[str], ranks: int = 2) -> list[str]:
    launcher = Path(sys.executable).with_name("deepspeed")
    return [
        str(launcher), "--num_gpus", str(ranks), "--master_port", str(free_port()),
        "--module", "vr_online.train", "--config", str(config), *overrides,
    ]


@pytest.fixture
def launch(tmp_path):
    """Trains through the deepspeed launcher; returns the finished process, its two streams joined in `output`."""

    def run(overrides: list[str], ranks: int = 2, timeout: float = 180, **kwargs):
        config = tmp_path / "empty.yaml"
        config.write_text("{}\n")
        done = subprocess.run(
            train_command(config, overrides, ranks), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=timeout, **kwargs,
        )
        done.output = done.stdout
        return done

    return run


def metrics(run_dir: Path) -> dict[int, dict]:
    """step -> line of metrics.jsonl."""
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}
