"""Bad input ends the whole launch with a message that names the file, key or step, and loses nothing."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.conftest import metrics
from vr_online import checkpoint

WITHIN_S = 90  # a launch's imports take most of it on a busy two-core machine; a hang would take the 180 s limit


@pytest.fixture
def shards(digits, tmp_path):
    """A private copy of the digits' training shards, to damage."""
    shutil.copytree(digits / "train", tmp_path / "shards")
    return tmp_path / "shards"


def fails(launch, options: list[str], *needles: str, **kwargs):
    start = time.monotonic()
    done = launch(options, **kwargs)
    assert done.returncode != 0, done.output
    assert time.monotonic() - start < WITHIN_S
    for needle in needles:
        assert needle in done.output, done.output
    assert "Traceback" not in done.output, done.output
    return done


def on_every_rank(output: str, ranks: int = 2) -> bool:
    return all(f"[rank {r}] " in output for r in range(ranks))


def test_missing_shard(tiny, shards, launch):
    victim = sorted(shards.glob("*.tar"))[3]
    victim.unlink()
    done = fails(launch, tiny + [f"data.shards={shards}"], victim.name)
    assert on_every_rank(done.output)


def test_truncated_shard(tiny, shards, launch, tmp_path):
    victim = sorted(shards.glob("*.tar"))[0]
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2 + 100])
    done = fails(launch, tiny + [f"data.shards={shards}", "train.steps=200"], victim.name)
    assert on_every_rank(done.output)


def test_shape_that_disagrees_with_dataset_json(tiny, shards, launch):
    described = json.loads((shards / "dataset.json").read_text())
    described["latent_shape"] = [1, 4, 4]
    (shards / "dataset.json").write_text(json.dumps(described))
    done = fails(launch, tiny + [f"data.shards={shards}"], ".tar", "8")
    assert on_every_rank(done.output)


def test_label_out_of_range(tiny, shards, launch):
    described = json.loads((shards / "dataset.json").read_text())
    described["class_names"] = described["class_names"][:5]
    described["class_counts"] = described["class_counts"][:5]
    (shards / "dataset.json").write_text(json.dumps(described))
    done = fails(launch, tiny + [f"data.shards={shards}"], ".tar", "label")
    assert on_every_rank(done.output)


def test_too_few_shards(tiny, shards, launch):
    done = fails(launch, tiny + [f"data.shards={shards}", "data.workers=8"], "8", "16")
    assert on_every_rank(done.output)


def test_typo_in_the_configuration(tiny, launch):
    fails(launch, tiny + ["optimizer.learning_rate=1"], "optimizer.learning_rate", "optimizer.lr")


def test_loss_that_stays_non_finite(tiny, shards, launch, tmp_path):
    """The weights stay those of the last good step, and the error names the step."""
    done = fails(launch, tiny + ["optimizer.lr=1e30", "train.clip=null", "train.steps=300", "train.max_skipped=5"], "step ", "not finite")
    assert on_every_rank(done.output)
    lines = metrics(tmp_path / "run")
    assert max(line["train/skipped_steps"] for line in lines.values()) >= 5
    for name, tensor in checkpoint.load_weights(checkpoint.find(tmp_path / "run"), "raw").items():
        assert np.isfinite(tensor.numpy()).all(), name


def test_full_disk_leaves_the_last_whole_checkpoint(tiny, launch, tmp_path):
    assert launch(tiny + ["train.steps=3"]).returncode == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "run/checkpoints/3").iterdir()}
    limit = 40_000  # bytes a file may have, less than a weights file
    assert max(map(len, before.values())) > limit

    def small_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = fails(launch, tiny, "checkpoints/6", "could not be written", preexec_fn=small_disk)
    assert on_every_rank(done.output)
    assert checkpoint.list_checkpoints(tmp_path / "run") == [3]
    assert {p.name: p.read_bytes() for p in (tmp_path / "run/checkpoints/3").iterdir()} == before
    assert not list((tmp_path / "run/checkpoints").glob(".*.tmp"))
    assert (tmp_path / "run/checkpoints/latest").read_text() == "3"


def test_damaged_checkpoint_is_passed_over(tiny, launch, tmp_path):
    assert launch(tiny).returncode == 0
    weights = next((tmp_path / "run/checkpoints/6").glob("weights-*"))
    weights.write_bytes(weights.read_bytes()[:-10])
    done = launch(tiny)
    assert done.returncode == 0, done.output
    assert checkpoint.list_checkpoints(tmp_path / "run") == [3, 6]


@pytest.mark.parametrize("key, value", [("timesteps.bins", "8"), ("flow.path", "gvp")])
def test_a_checkpoint_of_other_bins_or_path_is_refused(key, value, tiny, tmp_path):
    """One process suffices: the refusal comes before the first step."""
    config = tmp_path / "empty.yaml"
    config.write_text("{}\n")
    command = [sys.executable, "-m", "vr_online.train", "--config", str(config), *tiny, "train.steps=3"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    refused = subprocess.run([*command, f"{key}={value}"], capture_output=True, text=True)
    assert refused.returncode == 2 and key in refused.stderr and value in refused.stderr, refused.stderr
    assert checkpoint.list_checkpoints(tmp_path / "run") == [3]
