"""Fixed densities against their published forms, and what is said about wrong specs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats

from vr_online.config import ConfigError, TimestepConfig, validate
from vr_online.timesteps import densities, rules
from vr_online.timesteps.densities import DensityError, bin_masses, cdf

GRID = np.linspace(0.01, 0.99, 25)


def sd3_mode(u, s):
    return 1 - u - s * (np.cos(np.pi * u / 2) ** 2 - 1 + u)


# Samples of SD3's and FLUX's own t (1 is noise there) from uniform u, and the density here that must match.
PUBLISHED_SAMPLES = {
    "mode(1.29)": lambda u: sd3_mode(u, 1.29),
    "mode(-0.8)": lambda u: sd3_mode(u, -0.8),
    "cosmap": lambda u: 1 - 1 / (np.tan(np.pi * u / 2) + 1),
    "shift(3)": lambda u: 3 * u / (1 + 2 * u),
    "shift(0.5)": lambda u: 0.5 * u / (1 - 0.5 * u),
    "logit_normal(-0.5, 0.7)": lambda u: 1 / (1 + np.exp(-(0.5 + 0.7 * stats.norm.ppf(u)))),
}


@pytest.mark.parametrize("spec", PUBLISHED_SAMPLES)
def test_published_sampling_rules_translated_to_our_time(spec):
    u = (np.arange(200_000) + 0.5) / 200_000
    t = 1 - PUBLISHED_SAMPLES[spec](u)
    empirical = (t[None, :] <= GRID[:, None]).mean(1)
    np.testing.assert_allclose(cdf(spec, GRID), empirical, atol=1e-5)


# (spec, probability density in our t)
PUBLISHED_DENSITIES = {
    "uniform": lambda t: np.ones_like(t),
    "logit_normal(0.75, 1.2)": lambda t: stats.norm.pdf(np.log(t / (1 - t)), 0.75, 1.2) / (t * (1 - t)),
    "cosmap": lambda t: 2 / (np.pi - 2 * np.pi * t + 2 * np.pi * t**2),
    "beta(2.5, 1.5)": lambda t: stats.beta.pdf(t, 2.5, 1.5),
}


@pytest.mark.parametrize("spec", PUBLISHED_DENSITIES)
def test_distribution_function_integrates_the_published_density(spec):
    step = 1e-6
    slope = (cdf(spec, GRID + step) - cdf(spec, GRID - step)) / (2 * step)
    np.testing.assert_allclose(slope, PUBLISHED_DENSITIES[spec](GRID), rtol=1e-6)


@pytest.mark.parametrize("spec", [*PUBLISHED_SAMPLES, *PUBLISHED_DENSITIES])
@pytest.mark.parametrize("bins", [1, 7, 32])
def test_bins_hold_all_the_mass_and_refine_consistently(spec, bins):
    masses = bin_masses(spec, bins)
    assert masses.shape == (bins,) and (masses > 0).all() and math.isclose(masses.sum(), 1)
    np.testing.assert_allclose(bin_masses(spec, 3 * bins).reshape(bins, 3).sum(1), masses, rtol=1e-9)


def test_direction_of_time():
    """Positive m and a large first beta parameter lean to the data (t = 1), a large shift to the noise."""
    data_share = {s: bin_masses(s, 2)[1] for s in ("logit_normal(1, 1)", "beta(4, 1)", "shift(3)", "mode(0)", "cosmap")}
    assert data_share["logit_normal(1, 1)"] > 0.7 and data_share["beta(4, 1)"] > 0.9
    assert data_share["shift(3)"] < 0.3
    assert data_share["mode(0)"] == pytest.approx(0.5) and data_share["cosmap"] == pytest.approx(0.5)


@pytest.mark.parametrize("suffix", ["npz", "json"])
def test_table_round_trips_and_rebins(tmp_path, suffix):
    file = tmp_path / f"density, of mine.{suffix}"
    densities.write_table(file, np.array([0, 0.25, 1.0]), np.array([3.0, 1.0]), kind="mine", path="gvp")
    np.testing.assert_allclose(bin_masses(f"table({file})", 4), [0.5, 1 / 6, 1 / 6, 1 / 6])
    np.testing.assert_allclose(bin_masses(f"vr_static({file})", 8)[:2], [0.25, 0.25])
    assert densities.read_table(str(file)).notes == {"kind": "mine", "path": "gvp"}
    with pytest.raises(DensityError, match="made for the gvp path, but flow.path is linear"):
        bin_masses(f"vr_static({file})", 4, "linear")


def test_table_without_edges_is_evenly_spaced(tmp_path):
    file = tmp_path / "d.json"
    file.write_text(json.dumps({"density": [1, 3]}))
    np.testing.assert_allclose(bin_masses(f"table({file})", 2), [0.25, 0.75])


@pytest.mark.parametrize(
    "content, message",
    [
        ({"density": [1, -1]}, "not negative"), ({"density": [0, 0]}, "zero everywhere"), ({"weights": [1]}, "`density`"),
        ({"density": [1, 2], "edges": [0, 1]}, "one entry more"), ({"density": [1, 2], "edges": [0, 0.5, 2]}, "from 0 to 1"),
        ({"density": [1, float("nan")]}, "finite"), ({"density": "abc"}, "not a readable"), ([1, 2], "not a readable"),
    ],
)
def test_a_broken_table_is_refused_by_name(tmp_path, content, message):
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(content))
    with pytest.raises(DensityError, match=message) as error:
        densities.parse(f"table({file})")
    assert str(file) in str(error.value)


def test_a_pickled_table_is_refused(tmp_path):
    file = tmp_path / "pickle.npz"
    np.savez(file, density=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DensityError, match="not a readable"):
        densities.parse(f"table({file})")


@pytest.mark.parametrize(
    "key, spec, message",
    [
        ("target", "logitnormal(0, 1)", "nearest valid name: logit_normal"), ("target", "gradvariance", "nearest valid name: grad_variance"),
        ("proposal", "online", "nearest valid name: online_vr"), ("target", "logit_normal(0)", r"takes \(m, s\), got 1"),
        ("target", "uniform(3)", "no arguments"), ("target", "logit_normal(0, -1)", "s must be above 0"),
        ("target", "beta(1, x)", "must be numbers"), ("target", "mode(2)", "s must lie in"), ("target", "shift(nan)", "finite"),
        ("target", "shift(3", "expected a form"), ("target", "table()", "one file name"), ("target", "vr_static(no.npz)", "no such density table"),
        ("target", "entropy_rate(-1)", "must not be negative"), ("target", "online_vr", "unknown density"), ("proposal", "grad_variance", "unknown density"),
    ],
)
def test_wrong_specs_are_refused_with_the_configuration(key, spec, message):
    with pytest.raises(ConfigError, match=message) as error:
        validate({"timesteps": {key: spec}})
    assert f"timesteps.{key}" in str(error.value)


def test_learned_specs_take_their_defaults():
    assert rules.parse_target("entropy_rate").args == (0.15,)
    assert rules.parse_target("grad_variance").args == (1.0,)
    assert rules.parse_target("grad_variance(2)").args == (2.0,)
    assert rules.parse_proposal(" same ").name == "same"


def test_a_memory_shorter_than_the_warm_up_is_refused():
    with pytest.raises(ConfigError, match="never reaches warmup"):
        validate({"timesteps": {"half_life": 10, "bins": 32}})
    assert TimestepConfig(half_life=100, bins=32)


@pytest.mark.parametrize(
    "keys, attached",
    [({}, False), ({"proposal": "online_vr"}, True), ({"target": "grad_variance"}, True), ({"target": "signal(0.5)"}, True),
     ({"probe": {"enabled": True}}, True), ({"proposal": "online_vr", "probe": {"enabled": False}}, False)],
)
def test_the_probe_is_attached_where_it_is_needed(keys, attached):
    assert validate({"timesteps": keys}).timesteps.wants_probe == attached
