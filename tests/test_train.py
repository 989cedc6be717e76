"""One run through the launcher with everything on: what it leaves must agree with itself and with offline tools."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import TINY, metrics, train_command
from vr_online import checkpoint
from vr_online.cli import main
from vr_online.config import load_config
from vr_online.errors import UserError
from vr_online.evaluation.generation import load_model
from vr_online.run import open_data

REPO = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, digits):
    """A run directory: two ranks, ZeRO 3, inline evaluation and sample grids."""
    folder = tmp_path_factory.mktemp("train")
    config = folder / "run.yaml"
    config.write_text(
        f"""evaluation: {{every: 3, n: 50, steps: 4, reference: {digits}/heldout}}
monitor: {{samples_every: 6, samples_steps: 2, samples_per_class: 2}}
engine: {{zero_stage: 3}}
"""
    )
    options = TINY + [f"data.shards={digits}/train", f"run_dir={folder}/run"]
    done = subprocess.run(
        train_command(config, options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout
    return folder / "run", done.stdout


def tags(run) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return set(events.Tags()["scalars"]), set(events.Tags()["images"]), set(events.Tags()["tensors"])


def test_the_last_line_is_the_summary(finished):
    run, output = finished
    summary = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))
    assert summary["steps"] == 6 and summary["images"] == 96 and summary["run_dir"] == str(run)
    assert summary["loss"] == metrics(run)[6]["train/loss"] and summary["fd_latent"] > 0


def test_tensorboard_and_jsonl_hold_the_same_names(finished):
    run, _ = finished
    scalars, images, texts = tags(run)
    names = {name for line in metrics(run).values() for name in line} - {"step", "images", "time"}
    assert names and names <= scalars
    for needed in ("train/loss", "train/grad_norm", "train/lr", "speed/images_per_s", "speed/wait_share", "sampler/gain", "bins/loss/00"):
        assert needed in names, needed
    assert "samples" in images and any("config" in text for text in texts)
    assert (run / "samples/6.png").exists()


def test_inline_evaluation_on_two_sharded_ranks_equals_one_process_offline(finished):
    run, _ = finished
    inline = json.loads((run / "evals/3/result.json").read_text())
    assert main(["fid", str(run), "--steps", "3", "--force", "--quiet"]) == 0
    offline = json.loads((run / "evals/3/result.json").read_text())
    assert offline["step"] == inline["step"] == 3 and offline["n"] == inline["n"] == 50
    assert offline["value"] == pytest.approx(inline["value"], rel=1e-5)


def test_the_average_in_the_checkpoint_is_a_model_and_differs_from_the_raw_weights(finished):
    run, _ = finished
    averaged, raw = load_model(run, "ema").model, load_model(run, "raw").model
    x, t, y = torch.randn(3, 1, 8, 8), torch.rand(3), torch.tensor([0, 5, 9])
    assert torch.isfinite(averaged(x, t, y)).all() and not averaged(x, t, y).equal(raw(x, t, y))


def test_resolved_configuration_reproduces_the_run(finished):
    run, _ = finished
    config = load_config(run / "config.yaml")
    assert config == load_config(run / "checkpoints/6/config.yaml") and config.engine.zero_stage == 3


def test_checkpoint_holds_no_pickle(finished):
    run, _ = finished
    names = {p.name for p in (run / "checkpoints/6").iterdir()}
    assert {p.rsplit(".", 1)[-1] for p in names} == {"json", "yaml", "safetensors"}
    state = checkpoint.read_state(run / "checkpoints/6/sampler.safetensors")
    assert state["images"] == 96 and np.isclose(state["density"]["p"].sum(), 1)


def test_running_a_finished_run_again_changes_nothing_and_says_the_same(finished):
    run, output = finished
    before = (run / "metrics.jsonl").read_bytes(), (run / "summary.json").read_text()
    again = subprocess.run(
        [sys.executable, "-m", "vr_online.train", "--config", str(run / "config.yaml")], capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout.splitlines()[-1]).items() >= {"steps": 6, "loss": metrics(run)[6]["train/loss"]}.items()
    assert json.loads((run / "summary.json").read_text()).keys() == json.loads(before[1]).keys()
    assert (run / "metrics.jsonl").read_bytes() == before[0]


def test_the_demos_report_reads_the_samples(finished):
    run, _ = finished
    done = subprocess.run(
        [sys.executable, str(REPO / "tools/demo_report.py"), str(run), "--quick", "--steps", "2"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report.keys() >= {"steps", "images", "loss", "fd_latent", "run_dir", "class_accuracy"}
    assert report["samples"] == 100 and 0 <= report["class_accuracy"] <= 1 and report["class_accuracy_real"] > 0.9
    assert (run / "samples.png").exists()


def test_bf16_with_recomputed_activations_and_no_probe_learns(digits, tmp_path):
    """What GPUs train with; the loss of fp32, to bf16's precision."""
    losses = {}
    for precision, more in (("fp32", ["timesteps.probe.enabled=true"]), ("bf16", ["model.checkpoint_activations=true"])):
        config = tmp_path / "c.yaml"
        config.write_text("{}\n")
        overrides = TINY + [
            f"data.shards={digits}/train", f"run_dir={tmp_path}/{precision}", f"engine.precision={precision}", "engine.zero_stage=2",
            "train.micro_batch_size=4", "timesteps.proposal=same", *more,
        ]
        done = subprocess.run(train_command(config, overrides), capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        losses[precision] = [line["train/loss"] for line in metrics(tmp_path / precision).values()]
    assert losses["bf16"] != losses["fp32"]
    np.testing.assert_allclose(losses["bf16"], losses["fp32"], rtol=0.02)


@pytest.mark.parametrize(
    "override, needle", [("model.depth=1", "model.depth"), ("timesteps.probe.enabled=false", "needs a probe")]
)
def test_a_finished_run_is_not_continued_as_another(override, needle, finished):
    run, _ = finished
    command = [sys.executable, "-m", "vr_online.train", "--config", str(run / "config.yaml"), "train.steps=7", override]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and needle in done.stderr, done.stderr


def test_flips_of_autoencoder_latents_are_refused(digits, tmp_path):
    described = json.loads((digits / "train/dataset.json").read_text()) | {"codec": "tae"}
    (tmp_path / "dataset.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match="data.flip"):
        open_data(load_config(None, [f"data.shards={digits}/train", f"data.dataset={tmp_path}/dataset.json", "data.flip=true"]))
