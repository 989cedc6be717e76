"""Sampling: reproducible image by image, guidance exactly off where it is off, and the command."""

import collections
import multiprocessing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.models.checkpoints import random_model, tiny_config, tiny_info, write_checkpoint
from vr_online.cli import main
from vr_online.config import EvaluationConfig, MonitorConfig
from vr_online.data import codecs
from vr_online.data.codecs import get_codec
from vr_online.errors import UserError
from vr_online.evaluation.generation import NoiseStreams, Sampler, decode_images, load_model, preview, sample_labels
from vr_online.evaluation.sample_cli import parse_classes
from vr_online.flow import Flow, get_path
from vr_online.train import show_samples

SOLVERS = ["euler", "heun", "dopri5", "euler_maruyama"]
CONFIG, INFO = tiny_config(), tiny_info()


def sampler(model=None, flow=None, norm=INFO.norm, **settings):
    settings = EvaluationConfig(**{"steps": 4, "batch_size": 4, **settings})
    return Sampler(model or random_model(CONFIG, INFO, 1), flow or Flow(get_path("linear")), settings, norm, 4, latent_shape=INFO.latent_shape)


class Elementwise(nn.Module):
    """A network without matrix products: its outputs cannot depend on the batch even in the last bit."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([0.3, -0.2, 0.5, 0.1, 0.7]))
        self.rows = []

    def forward(self, x, t, y):
        self.rows.append(len(x))
        return torch.tanh(x * self.gain[y][:, None, None, None]) - t[:, None, None, None]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("cfg", [1.0, 2.0])
def test_an_image_is_bitwise_the_same_in_any_batch_and_on_any_rank(solver, cfg):
    whole = sampler(Elementwise(), solver=solver, cfg=cfg, batch_size=16).latents(0, 11)
    for batch_size in (1, 3):
        parts = sampler(Elementwise(), solver=solver, cfg=cfg, batch_size=batch_size)
        assert torch.equal(torch.cat([parts.latents(7, 11), parts.latents(0, 7)]).roll(7, 0), whole)
    assert len({image.numpy().tobytes() for image in whole}) == 11


@pytest.mark.parametrize("solver", SOLVERS)
def test_with_a_network_an_image_is_the_same_up_to_rounding(solver):
    whole = sampler(solver=solver, batch_size=8, cfg=1.5, dtype="float64").latents(0, 8)
    alone = sampler(solver=solver, batch_size=1, cfg=1.5, dtype="float64").latents(5, 6)
    torch.testing.assert_close(alone[0], whole[5], rtol=1e-4, atol=1e-5)


def _in_a_process(span):
    torch.manual_seed(span[0])  # the global generator must not matter
    return sampler(Elementwise(), solver="euler_maruyama").latents(*span).numpy()


def test_two_processes_make_what_one_makes():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        parts = pool.map(_in_a_process, [(0, 5), (5, 9)])
    assert np.array_equal(np.concatenate(parts), _in_a_process((0, 9)))


def test_global_random_state_is_neither_used_nor_moved():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = sampler(Elementwise(), solver="euler_maruyama").latents(0, 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(sampler(Elementwise(), solver="euler_maruyama").latents(0, 3), first)


def test_noise_is_keyed_by_sample_and_step():
    streams, shifted = NoiseStreams(range(3, 7), (2, 5)), NoiseStreams([5], (2, 5))
    steps, alone = [streams.draw() for _ in range(3)], [shifted.draw() for _ in range(3)]
    assert all(torch.equal(a[2:3], b) for a, b in zip(steps, alone))
    assert len({row.numpy().tobytes() for step in steps for row in step}) == 12


def test_the_seed_moves_the_index():
    model = Elementwise()
    labels = torch.tensor([2])
    assert torch.equal(sampler(model, seed=10).latents(3, 4, labels), sampler(model, seed=0).latents(13, 14, labels))
    assert not torch.equal(sampler(model, seed=10).latents(3, 4, labels), sampler(model, seed=0).latents(3, 4, labels))


@pytest.mark.parametrize("solver", SOLVERS)
def test_guidance_one_and_an_empty_interval_are_no_guidance_bitwise_and_cost_nothing(solver):
    plain, one, empty = Elementwise(), Elementwise(), Elementwise()
    expected = sampler(plain, solver=solver).latents(0, 5)
    assert torch.equal(sampler(one, solver=solver, cfg=1.0, cfg_interval=[0.2, 0.8]).latents(0, 5), expected)
    for point in (0.0, 0.5, 1.0):
        empty.rows.clear()
        assert torch.equal(sampler(empty, solver=solver, cfg=4.0, cfg_interval=[point, point]).latents(0, 5), expected)
        assert plain.rows == one.rows == empty.rows
    assert not torch.equal(sampler(plain, solver=solver, cfg=4.0).latents(0, 5), expected)


def test_guidance_is_null_plus_scale_times_difference():
    model, x, t, y = Elementwise(), torch.randn(3, 1, 4, 4), torch.full((3,), 0.5), torch.tensor([0, 1, 3])
    conditional, null = model(x, t, y), model(x, t, torch.full_like(y, 4))
    for scale in (0.0, 0.5, 3.0):
        torch.testing.assert_close(sampler(model, cfg=scale)._output(x, t, y), null + scale * (conditional - null))


def test_an_interval_guides_only_the_times_inside_it():
    model, x, y = Elementwise(), torch.randn(4, 1, 4, 4), torch.tensor([0, 1, 2, 3])
    t = torch.tensor([0.1, 0.3, 0.6, 0.9])
    conditional, null = model(x, t, y), model(x, t, torch.full_like(y, 4))
    output = sampler(model, cfg=3.0, cfg_interval=[0.3, 0.7])._output(x, t, y)
    torch.testing.assert_close(output[1:3], (null + 3 * (conditional - null))[1:3])
    assert torch.equal(output[[0, 3]], conditional[[0, 3]])
    assert model.rows[-1] == 4 + 2  # only two are evaluated twice


def test_the_whole_interval_equals_guidance_without_one():
    a = sampler(Elementwise(), cfg=2.0).latents(0, 4)
    assert torch.equal(sampler(Elementwise(), cfg=2.0, cfg_interval=[0.0, 1.0]).latents(0, 4), a)


@pytest.mark.parametrize("interval", [[0.8, 0.2], [-0.1, 0.5], [0.5, 1.1]])
def test_impossible_intervals_are_refused(interval):
    with pytest.raises((UserError, ValueError), match="cfg_interval"):
        sampler(cfg_interval=interval)


def test_balanced_labels_are_as_even_as_n_allows():
    for n in (1, 10, 103):
        counts = collections.Counter(sample_labels("balanced", 0, n, 10, 0).tolist())
        assert max(counts.values()) - min(counts.get(c, 0) for c in range(10)) <= 1


@pytest.mark.parametrize("protocol", ["balanced", "random"])
def test_a_label_depends_only_on_its_index_and_seed(protocol):
    whole = sample_labels(protocol, 0, 500, 10, 3)
    assert torch.equal(torch.cat([sample_labels(protocol, i, i + 50, 10, 3) for i in range(0, 500, 50)]), whole)
    assert whole.dtype == torch.int64 and set(whole.tolist()) == set(range(10))


def test_random_labels_are_uniform_and_move_with_the_seed():
    labels = sample_labels("random", 0, 4000, 10, 0)
    assert ((labels.bincount(minlength=10) - 400).abs() < 4 * (4000 * 0.09) ** 0.5).all()
    assert not torch.equal(labels, sample_labels("random", 0, 4000, 10, 1))
    with pytest.raises(UserError, match="balanced or random"):
        sample_labels("sorted", 0, 1, 10, 0)


@pytest.mark.parametrize("solver,per_image", [("euler", 6), ("heun", 12), ("euler_maruyama", 6)])
def test_evaluations_are_counted_per_image_and_not_doubled_by_guidance(solver, per_image):
    for cfg in (1.0, 3.0):
        counted = sampler(solver=solver, steps=6, cfg=cfg)
        counted.latents(0, 5)
        assert counted.evaluations == 5 * per_image


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("path", ["linear", "gvp", "vp"])
@pytest.mark.parametrize("prediction", ["velocity", "noise", "data"])
def test_a_perfect_network_makes_the_data_set(solver, path, prediction):
    """Data N(m, s^2) in every pixel: the exact conditional expectation, in each prediction, gives back m and s."""
    mean, spread, path = 0.7, 0.5, get_path(path)

    class Exact(nn.Module):
        def forward(self, x, t, y):
            alpha, sigma = (f(path.clamp(t.double()))[:, None, None, None] for f in (path.alpha, path.sigma))
            centred = (x.double() - alpha * mean) / (alpha**2 * spread**2 + sigma**2)
            x_1, x_0 = mean + alpha * spread**2 * centred, sigma * centred
            d_alpha, d_sigma = (f(path.clamp(t.double()))[:, None, None, None] for f in (path.d_alpha, path.d_sigma))
            return {"velocity": d_alpha * x_1 + d_sigma * x_0, "noise": x_0, "data": x_1}[prediction]

    settings = {"solver": solver, "steps": 200, "dtype": "float64", "batch_size": 400, "diffusion": "sigma", "last_step_size": 0.01}
    pixels = sampler(Exact(), Flow(path, prediction), norm=None, **settings).latents(0, 400).double()
    n = pixels.numel()
    assert abs(pixels.mean() - mean) < 4 * spread / n**0.5 + 0.01
    assert abs(pixels.std() - spread) < 4 * spread / (2 * n) ** 0.5 + 0.01


@pytest.mark.parametrize("solver", ["euler", "heun", "euler_maruyama"])
@pytest.mark.parametrize("path", ["linear", "gvp"])
@pytest.mark.parametrize("prediction", ["velocity", "noise", "data"])
def test_errors_of_the_network_are_not_magnified_at_the_ends(solver, path, prediction):
    """Data N(0, 1): a network off by noise of size 0.02 must not move the samples by many times that."""
    path, size = get_path(path), 0.02

    def latents(error):
        generator = torch.Generator().manual_seed(0)

        class Inexact(nn.Module):
            def forward(self, x, t, y):
                alpha, sigma, d_alpha, d_sigma = (c[:, None, None, None] for c in path.coefficients(t))
                x_1, x_0 = alpha * x / (alpha**2 + sigma**2), sigma * x / (alpha**2 + sigma**2)
                exact = {"velocity": d_alpha * x_1 + d_sigma * x_0, "noise": x_0, "data": x_1}[prediction]
                return exact + error * torch.randn(x.shape, generator=generator)

        settings = {"solver": solver, "steps": 25, "batch_size": 50, "diffusion": "sigma"}
        return sampler(Inexact(), Flow(path, prediction), norm=None, **settings).latents(0, 50)

    moved = float((latents(size) - latents(0.0)).std())
    assert 0 < moved < 8 * size


def test_latents_are_on_the_scale_of_the_shards():
    model = Elementwise()
    assert torch.equal(sampler(model).latents(0, 3), INFO.norm.denormalize(sampler(model, norm=None).latents(0, 3)))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    ema, raw = random_model(CONFIG, INFO, 1), random_model(CONFIG, INFO, 2)
    for step in (5, 10):
        write_checkpoint(folder, step, CONFIG, INFO, ema, raw)
    return folder


def test_a_loaded_model_is_the_saved_one(run_dir):
    x, t, y = torch.randn(2, 1, 4, 4), torch.tensor([0.3, 0.6]), torch.tensor([0, 4])
    for kind, seed in (("ema", 1), ("raw", 2)):
        loaded = load_model(run_dir, kind)
        assert torch.equal(loaded.model(x, t, y), random_model(CONFIG, INFO, seed)(x, t, y))
        assert loaded.step == 10 and not loaded.model.training and loaded.config == CONFIG and loaded.info == INFO
    assert load_model(run_dir, step=5).step == load_model(run_dir / "checkpoints" / "5").step == 5


def test_a_checkpoint_that_is_not_there_is_refused(run_dir, tmp_path):
    with pytest.raises(UserError, match="step 7"):
        load_model(run_dir, step=7)
    with pytest.raises(UserError, match="checkpoint"):
        load_model(tmp_path)


def test_preview_is_a_labelled_grid_and_repeats(run_dir):
    loaded = load_model(run_dir)
    settings = MonitorConfig(samples_steps=2, samples_per_class=3)
    grid = preview(loaded.model, loaded.flow, loaded.info, settings)
    assert grid.dtype == np.uint8 and grid.ndim == 3 and grid.shape[-1] == 3
    assert np.array_equal(grid, preview(loaded.model, loaded.flow, loaded.info, settings))


def test_preview_shows_latents_where_the_codec_is_missing(run_dir):
    loaded = load_model(run_dir)
    elsewhere = loaded.info.model_copy(update={"codec": "tae", "codec_path": "/nowhere"})
    assert preview(loaded.model, loaded.flow, elsewhere, MonitorConfig(samples_steps=1, samples_per_class=2)).ndim == 3


@pytest.fixture
def asked(monkeypatch):
    """Where the codec's weights were looked for."""
    places = []
    monkeypatch.setattr(codecs, "codec_for", lambda info, path=None, device="cpu": places.append(path) or codecs.PixelCodec())
    return places


def test_grids_look_for_the_codec_where_the_evaluation_does(run_dir, asked):
    loaded, shown = load_model(run_dir), []
    config = CONFIG.model_copy(update={"evaluation": EvaluationConfig(codec_path="moved/here"),
                                       "monitor": MonitorConfig(samples_steps=1, samples_per_class=1)})  # fmt: skip
    run = SimpleNamespace(
        step=1, config=config, info=INFO, flow=loaded.flow, ranks=SimpleNamespace(is_main=True), average_model=lambda: loaded.model,
        monitor=SimpleNamespace(images=lambda *image: shown.append(image)), directory=run_dir,
    )  # fmt: skip
    show_samples(run)
    assert asked == ["moved/here"] and len(shown) == 1


@pytest.mark.parametrize("options, place", [([], "moved/here"), (["--codec", "elsewhere"], "elsewhere")])
def test_sample_command_looks_for_the_codec_where_the_evaluation_does(tmp_path, asked, options, place):
    config = tiny_config(evaluation={"codec_path": "moved/here", "steps": 2})
    write_checkpoint(tmp_path / "run", 5, config, INFO, random_model(config, INFO, 1), random_model(config, INFO, 2))
    assert main(["sample", str(tmp_path / "run"), "--n", "2", "--out", str(tmp_path / "s.npz"), *options]) == 0
    assert asked == [place]


def test_sample_command_writes_npz_folder_and_grid(run_dir, tmp_path):
    loaded = load_model(run_dir)
    expected = Sampler(loaded.model, loaded.flow, CONFIG.evaluation, INFO.norm, 4).latents(0, 6, torch.tensor([3, 1] * 3))
    images = decode_images(get_codec("pixel"), expected)
    common = ["sample", str(run_dir), "--classes", "3,class 1", "--n", "6"]
    assert main(common + ["--out", str(tmp_path / "s.npz")]) == 0
    with np.load(tmp_path / "s.npz") as file:
        assert file["arr_1"].tolist() == [3, 1] * 3
        assert file["arr_0"].shape == (6, 4, 4, 3) and np.array_equal(file["arr_0"][..., :1], images)
    assert main(common + ["--out", str(tmp_path / "folder")]) == 0
    files = sorted((tmp_path / "folder").iterdir())
    assert [f.name for f in files][:2] == ["000000-class3.png", "000001-class1.png"] and len(files) == 6
    assert np.array_equal(np.asarray(Image.open(files[2])), images[2, ..., 0])
    assert main(common + ["--out", str(tmp_path / "grid.png"), "--columns", "3"]) == 0
    assert Image.open(tmp_path / "grid.png").size[0] > 3 * 4


def test_sample_command_makes_image_k_whatever_n_and_batch_size(run_dir, tmp_path):
    for n, batch in ((3, 1), (7, 5)):
        assert main(["sample", str(run_dir), "--n", str(n), "--batch-size", str(batch), "--solver", "euler_maruyama",
                     "--cfg", "2", "--interval", "0.2", "0.9", "--labels", "random", "--out", str(tmp_path / f"{n}.npz")]) == 0  # fmt: skip
    with np.load(tmp_path / "3.npz") as few, np.load(tmp_path / "7.npz") as many:
        assert np.array_equal(few["arr_1"], many["arr_1"][:3])
        assert np.abs(few["arr_0"].astype(int) - many["arr_0"][:3]).max() <= 1


@pytest.mark.parametrize("options,message", [
    (["--classes", "9"], "out of range"),
    (["--classes", "cat"], "'cat' is no class"),
    (["--out", "samples.txt"], "--out samples.txt"),
    (["--n", "0"], "at least 1"),
    (["--cfg", "-1"], "evaluation.cfg"),
    (["--diffusion", "cubic", "--solver", "euler_maruyama"], "evaluation.diffusion"),
    (["--step", "3"], "step 3"),
])  # fmt: skip
def test_sample_command_explains_mistakes(run_dir, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    assert main(["sample", str(run_dir), *options]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_classes_are_numbers_ranges_and_names():
    names = ["cat", "dog", "t-shirt", "boat"]
    assert parse_classes("3, dog,0-2,t-shirt", names) == [3, 1, 0, 1, 2, 2]


def test_labels_come_from_the_classes_of_the_data_when_the_model_has_more():
    model = torch.nn.Linear(1, 1)
    sampler = Sampler(model, None, EvaluationConfig(labels="random", n=64), None, 10, latent_shape=(1, 2, 2), known_classes=3)
    assert set(sampler.labels(0, 200).tolist()) == {0, 1, 2}
