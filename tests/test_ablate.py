from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vr_online.config import load_config
from vr_online.timesteps.densities import write_table

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO / "tools"))
import ablate  # noqa: E402


def curve(*distance, step=100):
    return {"images": [step * (i + 1) for i in range(len(distance))], "wall_s": list(range(1, len(distance) + 1)), "distance": list(distance)}


def test_where_a_curve_first_comes_down_to_a_value():
    x, y = [100, 200, 300], [16.0, 4.0, 1.0]
    assert ablate.first_reached(x, y, 8.0) == pytest.approx(150) and ablate.first_reached(x, y, 17.0) == 100
    assert ablate.first_reached(x, y, 4.0) == 200 and ablate.first_reached(x, y, 0.5) is None
    assert ablate.first_reached(x, [4.0, 16.0, 1.0], 2.0) == pytest.approx(275)  # a rise does not move the goal


def test_ratio_and_interval_are_students_t_over_seeds():
    reference = {s: curve(8, 4, 2) for s in range(3)}
    same = ablate.cost_ratio(reference, reference)
    assert same["ratio"] == pytest.approx(1) and same["low"] == pytest.approx(1) and same["high"] == pytest.approx(1)
    faster = {0: curve(4, 2, 1), 1: curve(4, 2, 1), 2: curve(2, 1, 1)}
    ratio = ablate.cost_ratio(faster, reference)
    logs = [math.log(2 / 3), math.log(2 / 3), math.log(1 / 3)]
    mean = sum(logs) / 3
    half = 4.303 * math.sqrt(sum((v - mean) ** 2 for v in logs) / 2 / 3)
    assert ratio["ratio"] == pytest.approx(math.exp(mean)) and ratio["low"] == pytest.approx(math.exp(mean - half))


def test_an_arm_that_never_gets_there_is_read_the_other_way_round():
    reference = {0: curve(8, 4, 2)}
    assert ablate.cost_ratio({0: curve(9, 9, 4)}, reference) == {"ratio": pytest.approx(300 / 200), "low": None, "high": None}
    assert ablate.cost_ratio(reference, {0: curve(9, 9, 4)})["ratio"] == pytest.approx(200 / 300)  # the two readings are inverse
    assert ablate.cost_ratio({0: curve(9, 8, 2 + 1e-9)}, reference)["ratio"] == pytest.approx(1)


@pytest.mark.parametrize("name", ablate.ARMS)
def test_every_arm_is_something_a_user_can_set(name, tmp_path):
    write_table(tmp_path / "vr_static.npz", np.linspace(0, 1, 9), np.ones(8))
    keys = ablate._keys(ablate.ARMS[name], tmp_path, images=1000)
    timesteps = load_config(None, keys).timesteps
    assert not any("{" in key for key in keys)
    if name == "default":
        assert timesteps == load_config(None).timesteps and timesteps.target == "learnable"
    if name == "curriculum":
        assert timesteps.anneal == [500, 500]


def test_the_median_of_paired_ratios_and_its_interval():
    logs = np.log(np.linspace(0.9, 1.1, 101))
    ratio = ablate._median_ratio(np.random.default_rng(0).permutation(logs))
    assert ratio["ratio"] == pytest.approx(1.0) and 0.9 < ratio["low"] < 1.0 < ratio["high"] < 1.1


def test_smoke_run_writes_report_results_and_figures(tmp_path):
    done = subprocess.run(
        [sys.executable, str(REPO / "tools/ablate.py"), "--quick", "--arms", "uniform,online_vr", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["seeds"] == [0]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["arms"].keys() == {"uniform", "online_vr"} and results["arms"]["uniform"]["vs_uniform"]["ratio"] == 1
    assert all(len(arm["distance"][0]) == len(arm["images"][0]) == 2 for arm in results["arms"].values())
    assert {p.name for p in tmp_path.iterdir()} >= {"report.md", "distance_images.png", "distance_seconds.png", "gain.png", "density.png"}
