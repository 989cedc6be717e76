from __future__ import annotations

from pathlib import Path

import pytest

from vr_online.config import ConfigError, dump, load_config

CONFIGS = sorted(Path(__file__).parents[1].joinpath("configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_configuration_is_valid_and_round_trips(path, tmp_path):
    config = load_config(path)
    (tmp_path / "copy.yaml").write_text(dump(config))
    assert load_config(tmp_path / "copy.yaml") == config


@pytest.mark.parametrize(
    "override, needles",
    [
        ("optimizer.learning_rate=1", ["optimizer.learning_rate", "unknown key", "optimizer.lr"]),
        ("optimzer.lr=1e-3", ["optimzer", "unknown key", "optimizer"]),
        ("train.batch_size=big", ["train.batch_size", "'big'", "integer"]),
        ("train.batch_size=0", ["train.batch_size", "0"]),
        ("train.images=100", ["train", "exactly one of images and steps"]),
        ("model.name=SiT-M/2", ["model", "SiT-M/2"]),
        ("model.name=custom", ["model", "depth"]),
        ("model.depth=3", ["model", "depth", "custom"]),
        ("engine.zero_stage=4", ["engine.zero_stage", "4"]),
        ("engine.precision=fp16", ["engine.precision", "fp16"]),
        ("optimizer.warmup=100000000000", ["optimizer.warmup"]),
        ("timesteps.correction=2", ["timesteps.correction", "2"]),
        ("timesteps.target=logit_norml(0,1)", ["logit_norml", "logit_normal"]),
        ("data.flip=1", ["data.flip"]),
        ("optimizer.lr=.inf", ["optimizer.lr", "finite"]),
        ("optimizer.lr_min=1", ["lr_min", "above lr"]),
        ("engine.deepspeed={gradient_clipping: 1}", ["gradient_clipping", "train.clip"]),
        ("engine.deepspeed={zero_optimization: {stage: 3}}", ["zero_optimization.stage", "engine.zero_stage"]),
        ("timesteps.probe.layers=[]", ["timesteps.probe.layers"]),
        ("name=a/b", ["name", "a/b"]),
        ("seed", ["seed", "key.sub=value"]),
        ("train.steps=[", ["train.steps=[", "YAML"]),
    ],
)
def test_error_names_key_value_and_remedy(override, needles):
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["train.steps=10", override])
    for needle in needles:
        assert needle in str(caught.value)


def test_exponents_without_a_dot_are_numbers(tmp_path):
    (tmp_path / "c.yaml").write_text("optimizer: {lr: 1e-4, eps: 1E-9}\ntrain: {steps: 1_000}\n")
    config = load_config(tmp_path / "c.yaml")
    assert config.optimizer.lr == 1e-4 and config.optimizer.eps == 1e-9 and config.train.steps == 1000


def test_a_key_given_twice_is_refused(tmp_path):
    (tmp_path / "c.yaml").write_text("seed: 1\nname: x\nseed: 2\n")
    with pytest.raises(ConfigError, match="seed"):
        load_config(tmp_path / "c.yaml")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_overrides_win_and_reach_into_absent_sections(tmp_path):
    (tmp_path / "c.yaml").write_text("train: {steps: 5}\n")
    config = load_config(tmp_path / "c.yaml", ["train.steps=7", "evaluation.cfg=1.5", "data.shards=[a.tar, b.tar]"])
    assert (config.train.steps, config.evaluation.cfg, config.data.shards) == (7, 1.5, ["a.tar", "b.tar"])


def test_every_key_has_an_explanation():
    from vr_online.config import Config, Section

    def undocumented(model, prefix=""):
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                yield from undocumented(field.annotation, f"{prefix}{name}.")
            elif not field.description:
                yield prefix + name

    assert not list(undocumented(Config))
