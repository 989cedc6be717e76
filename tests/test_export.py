"""Exported files give the same outputs as the checkpoint, here and in the official layout."""

import json

import pytest
import torch
from safetensors import safe_open

from tests.models.checkpoints import random_model, tiny_config, tiny_info, write_checkpoint
from vr_online.cli import main
from vr_online.errors import UserError
from vr_online.export import export
from vr_online.models.sit import SiT, build_sit
from vr_online.models.weights import load_init

CONFIG, INFO = tiny_config(flow={"path": "gvp", "prediction": "data"}), tiny_info(channels=2)
SEEDS = {"ema": 1, "raw": 2}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    write_checkpoint(folder, 10, CONFIG, INFO, random_model(CONFIG, INFO, SEEDS["ema"]), random_model(CONFIG, INFO, SEEDS["raw"]))
    return folder


def output(model):
    x = torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(x, torch.tensor([0.1, 0.7]), torch.tensor([1, 4]))


@pytest.mark.parametrize("weights", SEEDS)
@pytest.mark.parametrize("form,name", [("safetensors", "w.safetensors"), ("sit", "w.pt")])
def test_an_export_loads_as_initial_weights_with_the_same_outputs(run_dir, tmp_path, weights, form, name):
    assert main(["export", str(run_dir), "--weights", weights, "--format", form, "--out", str(tmp_path / name)]) == 0
    model = build_sit(CONFIG.model, INFO.latent_shape, INFO.num_classes)
    load_init(model, tmp_path / name)
    assert torch.equal(output(model), output(random_model(CONFIG, INFO, SEEDS[weights])))
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_checkpoint_folder_or_run_loads_as_initial_weights(run_dir):
    for source in (run_dir, run_dir / "checkpoints" / "10"):
        model = build_sit(CONFIG.model, INFO.latent_shape, INFO.num_classes)
        load_init(model, source)
        assert torch.equal(output(model), output(random_model(CONFIG, INFO, SEEDS["ema"])))


def test_the_official_layout_is_a_whole_plain_state_dict(run_dir, tmp_path):
    state = torch.load(export(run_dir, tmp_path / "w.pt", form="sit"), weights_only=True)
    model = build_sit(CONFIG.model, INFO.latent_shape, INFO.num_classes)
    assert "pos_embed" in state
    model.load_state_dict(state, strict=True)
    assert torch.equal(output(model), output(random_model(CONFIG, INFO, SEEDS["ema"])))


def test_learned_sigma_channels_leave_the_output_as_it_is(run_dir, tmp_path):
    state = torch.load(export(run_dir, tmp_path / "w.pt", form="sit", learn_sigma=True), weights_only=True)
    model = SiT(build_sit(CONFIG.model, INFO.latent_shape, 4).size, INFO.latent_shape, 4, learn_sigma=True)
    model.load_state_dict(state, strict=True)
    both = output(model)
    torch.testing.assert_close(both[:, :2], output(random_model(CONFIG, INFO, SEEDS["ema"])))
    assert both.shape[1] == 4 and (both[:, 2:] == 0).all()


def test_the_header_says_what_the_weights_need(run_dir, tmp_path):
    with safe_open(export(run_dir, tmp_path / "w.safetensors", weights="raw"), "pt") as file:
        header = file.metadata()
    assert header["time"] == "t=0 noise, t=1 data"
    assert (header["path"], header["prediction"], header["weights"], header["step"]) == ("gvp", "data", "raw", "10")
    assert json.loads(header["latent_shape"]) == [2, 4, 4] and json.loads(header["norm"])["std"] == [0.5, 0.5]
    assert json.loads(header["class_names"]) == INFO.class_names and json.loads(header["config"]) == CONFIG.model_dump()


def test_mistakes_are_explained_and_leave_nothing_behind(run_dir, tmp_path):
    with pytest.raises(UserError, match=".safetensors"):
        export(run_dir, tmp_path / "w.pt")
    with pytest.raises(UserError, match="--format sit"):
        export(run_dir, tmp_path / "w.safetensors", learn_sigma=True)
    with pytest.raises(UserError, match="checkpoint"):
        export(tmp_path, tmp_path / "w.safetensors")
    (tmp_path / "file").touch()
    for name, form in (("w.safetensors", "safetensors"), ("w.pt", "sit")):
        with pytest.raises(UserError, match="cannot write"):
            export(run_dir, tmp_path / "file" / name, form=form)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name,form", [("w.safetensors", "safetensors"), ("w.pt", "sit")])
def test_a_full_disk_leaves_the_old_file(run_dir, tmp_path, monkeypatch, name, form):
    old = tmp_path / name
    old.write_bytes(b"old")

    def full(state, path, *rest):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vr_online.export.save_file", full)
    monkeypatch.setattr("torch.save", full)
    with pytest.raises(UserError, match="No space left on device"):
        export(run_dir, old, form=form)
    assert old.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1
