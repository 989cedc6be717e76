"""The offline density: closed form on Gaussian data, brute force on two points, and its command."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vr_online.cli import main
from vr_online.errors import UserError
from vr_online.flow.paths import get_path
from vr_online.timesteps import densities, vr_static


def factor(path, t, prediction):
    alpha, sigma, d_alpha, d_sigma = path.coefficients(t)
    return {"velocity": d_alpha - alpha * d_sigma / sigma, "noise": alpha / sigma, "data": torch.ones_like(t)}[prediction]


@pytest.mark.parametrize("name", ["linear", "gvp", "vp"])
@pytest.mark.parametrize("prediction", ["velocity", "data"])
def test_gaussian_data_has_its_closed_form(name, prediction):
    """x_1 ~ N(0, s^2): the posterior variance is s^2 sigma^2 / (alpha^2 s^2 + sigma^2), whatever x_t."""
    path, s2, bins, queries = get_path(name), 0.64, 8, 200
    # The normal distribution's quantiles: a reference set without sampling error.
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    references = (s2**0.5 * torch.special.ndtri(grid))[:, None]
    found = vr_static.estimate(references, path, prediction=prediction, bins=bins, queries=queries, seed=1)
    t = ((torch.arange(bins * queries, dtype=torch.float64) + 0.5) / (bins * queries)).view(bins, queries)
    alpha, sigma, *_ = path.coefficients(t)
    exact = (factor(path, t, prediction) ** 2 * s2 * sigma**2 / (alpha**2 * s2 + sigma**2)).mean(1).numpy()
    inner = slice(0, bins - 1)  # in the last bin VP's variance has no finite mean and sigma falls below the grid
    assert (np.abs(found.variance - exact) <= 0.02 * exact + 3 * found.stderr)[inner].all()
    assert (found.stderr[inner] < 0.1 * exact[inner]).all()  # so that the line above says something


@pytest.mark.parametrize("name", ["linear", "gvp", "vp"])
def test_two_points_equal_brute_force(name):
    path = get_path(name)
    points = torch.tensor([[-1.0, 0.5, 2.0], [1.0, 0.0, -1.0]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    t = torch.rand(50, generator=generator, dtype=torch.float64)
    alpha, sigma = path.alpha(t)[:, None], path.sigma(t)[:, None]
    x_t = alpha * points[torch.arange(50) % 2] + sigma * torch.randn(50, 3, generator=generator, dtype=torch.float64)
    got = vr_static.posterior_trace(points, x_t, alpha, sigma)
    density = [torch.exp(-(x_t - alpha * x).square().sum(1) / (2 * sigma[:, 0] ** 2)) for x in points]
    first = density[0] / (density[0] + density[1])
    brute = first * (1 - first) * (points[0] - points[1]).square().sum()
    torch.testing.assert_close(got, brute, rtol=1e-9, atol=1e-12)
    assert brute.max() > 0.5


def test_chunks_do_not_matter(monkeypatch):
    references = torch.randn(101, 300, generator=torch.Generator().manual_seed(0)).half()
    whole = vr_static.estimate(references, get_path("linear"), bins=4, queries=8)
    monkeypatch.setattr(vr_static, "_CHUNK_ELEMENTS", 300 * 7)
    parts = vr_static.estimate(references, get_path("linear"), bins=4, queries=8)
    np.testing.assert_allclose(parts.variance, whole.variance, rtol=1e-4, atol=1e-6)


def test_command_writes_a_table_that_a_target_reads(tmp_path, digits, capsys):
    out = tmp_path / "digits.npz"
    status = main(["density", "vr-static", "--shards", str(digits / "train"), "--path", "gvp", "--subset", "300", "--bins", "8",
                   "--queries", "16", "--out", str(out)])
    assert status == 0 and out.with_suffix(".png").stat().st_size > 5000
    masses = densities.bin_masses(f"vr_static({out})", 16, "gvp")
    assert masses.sum() == pytest.approx(1) and masses.std() > 0.001 and masses.min() >= 0.05 / 16 * (1 - 1e-9)
    notes = densities.read_table(str(out)).notes
    assert notes["path"] == "gvp" and notes["references"] == 300 and notes["stderr"].shape == (8,)
    assert "vr_static(" in capsys.readouterr().out


def test_the_collapse_of_a_finite_set_is_found():
    edges, zeros = np.linspace(0, 1, 5), np.zeros(4)
    assert vr_static.StaticVariance(edges, np.array([0.0, 1.0, 1e-9, 0.0]), zeros).collapse() == 0.5
    assert vr_static.StaticVariance(edges, np.array([1.0, 0.0, 0.0, 0.5]), zeros).collapse() is None


def test_show_and_list(tmp_path, capsys):
    out = tmp_path / "some.png"
    assert main(["density", "show", "uniform", "mode(1)", "--out", str(out)]) == 0
    assert out.stat().st_size > 5000
    assert main(["density", "list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("logit_normal(m, s)", "entropy_rate(c)", "online_vr", "same"))
    assert main(["density", "show", "unifrom"]) == 2
    assert "nearest valid name: uniform" in capsys.readouterr().err


def test_what_cannot_be_read_is_refused(tmp_path):
    integers = tmp_path / "x.npy"
    np.save(integers, np.arange(6).reshape(3, 2))
    with pytest.raises(UserError, match="floating-point latents"):
        vr_static.load_references(str(integers), 10)
    with pytest.raises(UserError, match="missing.npy"):
        vr_static.load_references(str(tmp_path / "missing.npy"), 10)
    with pytest.raises(UserError):
        vr_static.load_references(str(tmp_path), 10)
