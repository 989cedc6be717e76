"""Initial weights from files: every accepted form gives the same outputs, every misfit names its key."""

import argparse
import os

import pytest
import torch
from safetensors.torch import save_file

from vr_online.errors import UserError
from vr_online.models.sit import SiT, Size
from vr_online.models.weights import load_init

TINY = Size(depth=2, hidden_size=32, num_heads=4, patch_size=2)
SHAPE = (4, 8, 8)


def model(seed=0, shape=SHAPE, classes=10, size=TINY, **options):
    generator = torch.Generator().manual_seed(seed)
    built = SiT(size, shape, classes, **options)
    with torch.no_grad():
        for p in built.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return built


def output(net):
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(2, *net.latent_shape, generator=generator)
    with torch.no_grad():
        return net(x, torch.tensor([0.2, 0.8]), torch.tensor([1, 10]))


@pytest.mark.parametrize("form", ["state", "ema", "training", "module", "safetensors"])
def test_every_form_of_file_gives_the_same_outputs(tmp_path, form):
    source, other = model(1), model(2)
    state = source.state_dict()
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pt")
    if form == "safetensors":
        save_file(state, path)
    else:
        content = {
            "state": state,
            "ema": {"ema": state},
            "training": {"model": other.state_dict(), "ema": state, "opt": {"lr": 1e-4}, "args": argparse.Namespace(lr=1)},
            "module": {f"module.{name}": value for name, value in state.items()},
        }[form]
        torch.save(content, path)
    loaded = model(3)
    assert not torch.equal(output(loaded), output(source))
    load_init(loaded, path)
    assert torch.equal(output(loaded), output(source))


def test_raw_weights_can_be_asked_for(tmp_path):
    raw, ema, loaded = model(1), model(2), model(3)
    torch.save({"model": raw.state_dict(), "ema": ema.state_dict()}, tmp_path / "w.pt")
    load_init(loaded, tmp_path / "w.pt", kind="raw")
    assert torch.equal(output(loaded), output(raw))


def test_learned_sigma_loads_with_and_without_the_channels(tmp_path):
    source = model(1, learn_sigma=True)
    torch.save(source.state_dict(), tmp_path / "w.pt")
    with_sigma, without = model(2, learn_sigma=True), model(3)
    for net in (with_sigma, without):
        load_init(net, tmp_path / "w.pt")
    assert torch.equal(output(with_sigma), output(source))
    torch.testing.assert_close(output(without), output(source)[:, : SHAPE[0]])


def test_another_latent_size_keeps_its_own_positions(tmp_path):
    torch.save(model(1).state_dict(), tmp_path / "w.pt")
    larger = model(2, shape=(4, 16, 8))
    positions = larger.pos_embed.clone()
    load_init(larger, tmp_path / "w.pt")
    assert torch.equal(larger.pos_embed, positions)
    assert torch.equal(larger.blocks[0].attn.qkv.weight, model(1).blocks[0].attn.qkv.weight)


@pytest.mark.parametrize("source,target,message", [
    ({"classes": 7}, {}, r"embedding_table.weight has shape \(8, 32\).*model.num_classes: 7"),
    ({}, {"learn_sigma": True}, r"final_layer.linear.*model.learn_sigma: false"),
    ({"size": Size(3, 32, 4, 2)}, {}, r"unknown blocks.2.*model.name"),
    ({"size": Size(1, 32, 4, 2)}, {}, r"missing blocks.1.*model.name"),
    ({"size": Size(2, 64, 4, 2)}, {}, r"has shape .* the model wants .*model.name"),
    ({"shape": (3, 8, 8)}, {}, r"latent channels"),
])  # fmt: skip
def test_a_misfit_names_its_key_and_the_remedy(tmp_path, source, target, message):
    torch.save(model(1, **source).state_dict(), tmp_path / "w.pt")
    net = model(2, **target)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(UserError, match=message) as error:
        load_init(net, tmp_path / "w.pt")
    assert "w.pt" in str(error.value)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


class Payload:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def test_code_in_a_file_is_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"ema": Payload()}, tmp_path / "w.pt")
    with pytest.raises(UserError, match="plain tensors"):
        load_init(model(), tmp_path / "w.pt")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_missing_and_damaged_files_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="no such file"):
        load_init(model(), tmp_path / name)
    whole = tmp_path / name
    save_file(model().state_dict(), whole) if name.endswith("safetensors") else torch.save(model().state_dict(), whole)
    whole.write_bytes(whole.read_bytes()[:5000])
    with pytest.raises(UserError, match="w.*(readable|plain tensors)"):
        load_init(model(), whole)


def test_a_file_without_weights_is_refused(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "w.pt")
    with pytest.raises(UserError, match="no state dict"):
        load_init(model(), tmp_path / "w.pt")
