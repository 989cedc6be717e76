"""Every YAML in configs/ is valid, and the ImageNet family differs only where it must."""

import re
from pathlib import Path

import pytest

from vr_online.config import load_config
from vr_online.data.format import LatentNorm

FOLDER = Path(__file__).parents[1] / "configs"
FILES = sorted(FOLDER.glob("*.yaml"))
IMAGENET = [p for p in FILES if p.name.startswith("imagenet")]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_configuration_loads(path):
    config = load_config(path)
    assert config.name == path.stem


def flat(tree: dict, prefix: str = "") -> dict:
    items = ((f"{prefix}{k}", v) for k, v in tree.items())
    return {k: v for key, value in items for k, v in (flat(value, key + ".").items() if isinstance(value, dict) else [(key, value)])}


def test_imagenet_has_every_size_and_resolution():
    assert {p.stem for p in IMAGENET} == {f"imagenet{px}_{size}" for px in (256, 512) for size in ("s", "b", "l", "xl")}


def test_imagenet_differs_only_in_size_and_resolution():
    configs = [flat(load_config(p).model_dump()) for p in IMAGENET]
    differing = {key for key in configs[0] if any(c[key] != configs[0][key] for c in configs)}
    assert differing == {
        "name", "data.shards", "model.name", "model.checkpoint_activations", "engine.zero_stage", "evaluation.batch_size", "evaluation.reference"
    }


@pytest.mark.parametrize("path", IMAGENET, ids=lambda p: p.name)
def test_imagenet_follows_the_published_recipe(path):
    config = load_config(path)
    assert config.model.name == f"SiT-{path.stem.rpartition('_')[2].upper()}/2" and config.model.label_drop == 0.1
    assert (config.train.batch_size, config.train.total_steps) == (256, 400_000)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay, optimizer.schedule) == (1e-4, [0.9, 0.999], 0.0, "constant")
    assert 0.5 ** (256 / config.ema.half_life) == pytest.approx(0.9999, abs=1e-7)
    assert (config.evaluation.solver, config.evaluation.steps, config.evaluation.last_step_size) == ("euler_maruyama", 250, 0.04)
    LatentNorm.from_scale(0.18215, 4).check_matches(LatentNorm(**config.data.norm))


@pytest.mark.parametrize("path", IMAGENET, ids=lambda p: p.name)
def test_imagenet_says_how_to_get_the_published_number(path):
    """By the metric's name: clean-fid's as it stands, ADM's with the two settings its comment gives."""
    text, own = path.read_text(), load_config(path).evaluation
    reference = re.search(r"reference: (VIRTUAL_imagenet(\d+)\w*\.npz)", text)
    resize = re.search(r"resize: (legacy_\w+)", text)
    assert f"imagenet{reference[2]}_" in path.name and "as SiT reports it" not in text
    adm = load_config(path, [f"evaluation.reference={reference[1]}", f"evaluation.resize={resize[1]}"]).evaluation
    assert (own.resize, adm.resize, adm.reference) == ("clean", "legacy_tensorflow", reference[1])


@pytest.mark.parametrize("path", IMAGENET, ids=lambda p: p.name)
def test_imagenet_installs_the_autoencoder_before_it_encodes(path):
    text = path.read_text()
    assert 0 < text.index("pip install -e '.[kl]'") < text.index("vr-online shards encode")
