"""Which results may be ranked, on results written by hand."""

import pytest

from vr_online.evaluation import results
from vr_online.evaluation.compare import NotComparable, compare

RESULT = {
    "step": 5, "images": 80, "metric": "fd_latent", "value": 3.0, "metrics": {"fd_latent": 3.0}, "n": 20, "solver": "heun",
    "solver_steps": 2, "nfe": 4.0, "cfg": 1.0, "weights": "ema", "weights_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def runs(tmp_path):
    def write(**changes):
        results.write(tmp_path / "a/evals/5/result.json", {**RESULT, **changes.pop("both", {})})
        results.write(tmp_path / "b/evals/5/result.json", {**RESULT, **changes})
        return [str(tmp_path / "a"), str(tmp_path / "b")]

    return write


def test_equal_settings_are_ranked(runs):
    a, b = runs(value=2.0)
    assert [line.split()[0] for line in compare([a, b]).splitlines()[1:]] == [b, a]


@pytest.mark.parametrize(
    "change, why",
    [({"nfe": 3.0}, r"nfe: 4.0 \(\S+a\), 3.0 \(\S+b\)"), ({"weights_dtype": "bfloat16"}, "weights_dtype: float32 .* bfloat16")],
)
def test_results_of_unequal_work_or_precision_are_not(runs, change, why):
    with pytest.raises(NotComparable, match=why):
        compare(runs(**change))


def test_an_adaptive_solver_may_take_another_number_of_evaluations_for_another_model(runs):
    adaptive = {"solver": "dopri5", "solver_steps": None, "rtol": 1e-3, "atol": 1e-6}
    a, b = runs(both=adaptive, **{**adaptive, "nfe": 97.5, "value": 2.0})
    assert [line.split()[0] for line in compare([a, b]).splitlines()[1:]] == [b, a]
    with pytest.raises(NotComparable, match="rtol"):
        compare(runs(both=adaptive, **{**adaptive, "rtol": 1e-5}))
