from __future__ import annotations

import pytest

from vr_online.config import load_config
from vr_online.data.format import DatasetInfo
from vr_online.engine import deepspeed_config, plan_batch
from vr_online.errors import UserError
from vr_online.plan import describe, state_bytes
from vr_online.train import main


def test_batch_is_ranks_times_accumulation_times_micro():
    plan = plan_batch(256, 8, 4)
    assert (plan.micro_batch_size, plan.accumulation) == (8, 8)
    assert plan_batch(256, None, 4).accumulation == 1


@pytest.mark.parametrize("batch, micro, world", [(10, None, 4), (16, 3, 2)])
def test_batch_that_does_not_divide_is_refused(batch, micro, world):
    with pytest.raises(UserError, match="not a multiple"):
        plan_batch(batch, micro, world)


def test_bytes_of_a_rank():
    """ZeRO's table for mixed precision with Adam: 16 bytes a parameter, of which 12, 14 or all are shared out; ours adds
    the shared average, 4 bytes."""
    p, n = 1000, 8
    assert state_bytes(p, n, 0, True) == 16 * p + 4 * p // n
    assert state_bytes(p, n, 1, True) == 4 * p + 12 * p // n + 4 * p // n
    assert state_bytes(p, n, 2, True) == 2 * p + 14 * p // n + 4 * p // n
    assert state_bytes(p, n, 3, True) == 16 * p // n + 4 * p // n


def test_given_engine_keys_are_merged_over_the_generated_ones():
    config = load_config(None, ["engine.zero_stage=2", "engine.deepspeed={zero_optimization: {reduce_bucket_size: 7}}"])
    made = deepspeed_config(config, plan_batch(256, None, 1))
    assert made["zero_optimization"]["reduce_bucket_size"] == 7 and made["zero_optimization"]["stage"] == 2


def test_dry_run_prints_configuration_and_plan_and_touches_nothing(digits, tmp_path, capsys):
    config = tmp_path / "c.yaml"
    config.write_text(f"run_dir: {tmp_path}/run\ndata: {{shards: {digits}/train}}\nmodel: {{name: SiT-S/2}}\ntrain: {{steps: 300}}\n")
    assert main(["--config", str(config), "--dry-run", "--world-size", "4", "engine.zero_stage=2"]) == 0
    shown = capsys.readouterr().out
    for needle in ("zero_stage: 2", "300 steps", "76,800 images", "51.2 epochs", "ZeRO 2", "4 ranks x 1", "GFLOP", "GiB a rank"):
        assert needle in shown, shown
    assert not (tmp_path / "run").exists()


def test_plan_of_sit_xl():
    info = DatasetInfo.parse(
        {
            "samples": 1_281_167, "shards": {"a.tar": 1_281_167}, "latent_shape": [4, 32, 32], "codec": "kl", "codec_hash": "x",
            "norm": {"mean": [0.0] * 4, "std": [5.489933] * 4}, "class_names": [str(i) for i in range(1000)],
        }
    )
    plan = describe(load_config(None, ["model.name=SiT-XL/2", "train.steps=400000"]), info, 8)
    assert "118.6 GMAC" in plan["model"] and "711" in plan["compute"] and "79.93 epochs" in plan["length"]
