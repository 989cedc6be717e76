"""Every ZeRO stage, precision and accumulation trains like a plain loop, skips alike, and keeps only its share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import free_port

CASES = [(p, s, a) for p in ("fp32", "bf16") for s in (0, 1, 2, 3) for a in (1, 2)]


@pytest.fixture(scope="module")
def results() -> dict:
    command = [
        str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2", "--master_port", str(free_port()),
        "--module", "tests.engine_check",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line.split("RESULT ", 1)[1]) for line in done.stdout.splitlines() if "RESULT " in line]
    return {(r[0]["precision"], r[0]["stage"], r[0]["accumulation"]): r for r in lines}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-zero{c[1]}-accumulation{c[2]}")
def test_trains_like_a_plain_loop(results, case):
    precision = case[0]
    close = 2e-6 if precision == "fp32" else 4e-3
    for rank in results[case]:
        assert rank["moved"] > 1e-2  # something was learned, or closeness would mean nothing
        assert rank["weights"] < close and rank["average"] < close, rank
        assert rank["norm"] < (1e-5 if precision == "fp32" else 2e-2), rank


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-zero{c[1]}-accumulation{c[2]}")
def test_nan_on_one_rank_skips_the_step_on_all(results, case):
    for rank in results[case]:
        assert rank["skips"] == [0, 0, 1, 0, 0] and rank["optimizer_steps"] == 4, rank


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-zero{c[1]}-accumulation{c[2]}")
def test_each_rank_owns_its_share_and_nothing_twice(results, case):
    shares = [rank["share"] for rank in results[case]]
    assert sum(shares) == pytest.approx(1.0) and all(0.3 < share < 0.7 for share in shares), shares
