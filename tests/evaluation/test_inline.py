"""Evaluation between two training steps measures what evaluation of the checkpoint does."""

import pytest

from tests.conftest import TINY
from vr_online.cli import main
from vr_online.evaluation import results


def test_a_bf16_run_is_evaluated_with_the_weights_of_its_checkpoint(launch, digits, tmp_path):
    run = tmp_path / "run"
    settings = ["evaluation.every=3", "evaluation.n=30", "evaluation.steps=2", f"evaluation.reference={digits}/heldout"]
    options = [*TINY, f"data.shards={digits}/train", f"run_dir={run}", "train.steps=3", "engine.precision=bf16", *settings]
    done = launch(options, ranks=1)
    assert done.returncode == 0, done.output
    inline = results.read(run / "evals/3/result.json")
    assert main(["fid", str(run), "--steps", "3", "--force", "--quiet"]) == 0
    offline = results.read(run / "evals/3/result.json")
    assert inline["weights_dtype"] == offline["weights_dtype"] == "float32"
    assert inline["value"] == pytest.approx(offline["value"], rel=1e-6)
