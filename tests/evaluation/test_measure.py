import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.evaluation.fakes import DIM, Identity, Noise, reference
from vr_online.errors import UserError
from vr_online.evaluation import npz
from vr_online.evaluation.accumulate import Segments
from vr_online.evaluation.frechet import Moments, frechet_distance
from vr_online.evaluation.measure import Interrupted, measure
from vr_online.evaluation.samples import SampleKeeper, prune_samples

ALL = ("fd", "kid", "is", "pr")


def run(generate, n=1003, batch_size=64, **kwargs):
    return measure(generate, Identity(), reference(), n=n, batch_size=batch_size, progress=False, **kwargs)


def test_exactly_n_samples_each_once():
    generate = Noise()
    found = run(generate)
    assert found.n == 1003 and generate.asked == list(range(1003))
    assert found.nfe == 3
    rows = Noise()(0, 1003).flatten(1).double().numpy()
    expected = frechet_distance(Moments(rows.mean(0), np.cov(rows, rowvar=False)), reference().moments)
    assert found.value == pytest.approx(expected, rel=1e-9)
    assert found.metrics["fd_identity"] == found.value


def test_batch_size_does_not_matter():
    a, b, c = (run(Noise(), n=150, batch_size=size, metrics=ALL).metrics for size in (64, 7, 200))
    assert set(a) == {"fd_identity", "kid", "inception_score", "inception_score_std", "precision", "recall"}
    assert b == pytest.approx(a, rel=1e-9) and c == pytest.approx(a, rel=1e-9)


def test_global_random_state_is_left_alone():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    run(Noise(), metrics=ALL, n=200)
    assert torch.equal(torch_state, torch.get_rng_state())
    np.testing.assert_array_equal(numpy_state, np.random.get_state()[1])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> list[dict]:
    """What two processes told, rank by rank: of 205 samples, and of 205 of which rank 1 cannot make number 90."""
    folder, root = tmp_path_factory.mktemp("ranks"), Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.evaluation.ranks_check", str(folder)]
    processes = [subprocess.Popen([*command, str(rank), "2", "205", "90"], cwd=root) for rank in range(2)]
    assert [p.wait(timeout=120) for p in processes] == [0, 0]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_two_ranks_equal_one(two_ranks):
    first, second = (told["whole"] for told in two_ranks)
    one = run(Noise(), n=205, batch_size=16, metrics=ALL)
    assert sorted(first["asked"] + second["asked"]) == list(range(205))
    assert abs(len(first["asked"]) - len(second["asked"])) <= 16
    for told in (first, second):
        assert told["n"] == 205 and told["nfe"] == 3
        assert told["metrics"] == pytest.approx(one.metrics, rel=1e-9)


def test_a_failure_on_one_rank_ends_all(two_ranks):
    first, second = (told["failing"]["error"] for told in two_ranks)
    assert "cannot make sample 90" in second
    assert "rank 1" in first and "cannot make sample 90" in first


def test_a_sample_that_is_not_finite_is_an_error():
    with pytest.raises(UserError, match="not finite"):
        run(Noise(nan_at=500))


class Killed(BaseException):
    """Ends a process on the spot as far as the code under test is concerned."""


def saving_always(folder, fingerprint="f"):
    segments = Segments(folder, fingerprint)
    segments.FIRST_S = segments.interval = 0.0
    return segments


def test_a_killed_evaluation_continues_and_ends_the_same(tmp_path):
    whole = run(Noise(), metrics=ALL)
    with pytest.raises(Killed):
        run(Noise(fail_at=400, error=Killed), metrics=ALL, segments=saving_always(tmp_path))
    with pytest.raises(Killed):
        run(Noise(fail_at=700, error=Killed), metrics=ALL, segments=saving_always(tmp_path))
    generate = Noise()
    found = run(generate, metrics=ALL, segments=saving_always(tmp_path))
    assert found.continued == 640 and generate.asked == list(range(640, 1003))
    assert found.metrics == pytest.approx(whole.metrics, rel=1e-9)
    assert found.n == 1003 and found.nfe == 3


def test_sums_of_another_evaluation_and_damaged_ones_are_not_continued_from(tmp_path):
    with pytest.raises(Killed):
        run(Noise(fail_at=400, error=Killed), segments=saving_always(tmp_path, "other settings"))
    files = sorted(tmp_path.glob("sums-*.npz"))
    assert len(files) == 6
    assert run(Noise(), segments=saving_always(tmp_path)).continued == 0

    files = sorted(tmp_path.glob("sums-*.npz"))
    mine = [path for path in files if str(np.load(path)["fingerprint"]) == "f"]
    for path in mine[:-2]:
        path.write_bytes(path.read_bytes()[:-200])
    found = run(Noise(), segments=saving_always(tmp_path))
    assert 0 < found.continued < 1003
    assert found.value == pytest.approx(run(Noise()).value, rel=1e-9)


def test_a_full_disk_while_saving_is_a_clear_error_and_loses_nothing(tmp_path, monkeypatch):
    with pytest.raises(Killed):
        run(Noise(fail_at=400, error=Killed), segments=saving_always(tmp_path))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(npz.np, "savez", full)
        with pytest.raises(UserError, match="No space left on device"):
            run(Noise(), segments=saving_always(tmp_path))
    assert not list(tmp_path.glob(".*part"))
    assert run(Noise(), segments=saving_always(tmp_path)).continued == 384


def test_a_lost_claim_stops_the_evaluation():
    beats = []

    def heartbeat():
        beats.append(1)
        if len(beats) == 3:
            raise UserError("taken over")

    generate = Noise()
    with pytest.raises(UserError, match="taken over"):
        run(generate, heartbeat=heartbeat)
    assert len(generate.asked) == 3 * 64


def test_an_evaluation_told_to_stop_keeps_what_is_finished(tmp_path):
    looks, generate = iter([False, False, True]), Noise()
    with pytest.raises(Interrupted):
        run(generate, segments=Segments(tmp_path, "f"), should_stop=lambda: next(looks))
    assert len(generate.asked) == 3 * 64
    found = run(Noise(), segments=Segments(tmp_path, "f"))
    assert found.continued == 3 * 64 and found.value == pytest.approx(run(Noise()).value, rel=1e-9)
    assert run(Noise(), n=64, should_stop=lambda: True).n == 64, "there was nothing left to do"


class Pictures:
    evaluations = 0

    def __call__(self, first, last):
        return torch.stack([torch.full((3, 4, 5), i % 256, dtype=torch.uint8) for i in range(first, last)])


class Pixels(Identity):
    def __call__(self, samples):
        return samples[:, :, 0, :2].flatten(1).float() + torch.arange(DIM)


@pytest.mark.parametrize("kind", ["npz", "png"])
def test_samples_are_kept_in_order_when_asked_for(tmp_path, kind):
    keeper = SampleKeeper(tmp_path / "partial")
    measure(Pictures(), Pixels(), reference(), n=53, batch_size=10, keeper=keeper, progress=False)
    target = tmp_path / ("samples.npz" if kind == "npz" else "samples")
    keeper.join(target, 53, 6)
    if kind == "npz":
        images = np.load(target)["arr_0"]
    else:
        from PIL import Image

        images = np.stack([np.asarray(Image.open(p)) for p in sorted(target.iterdir())])
    assert images.shape == (53, 4, 5, 3) and images.dtype == np.uint8
    assert images[:, 0, 0, 0].tolist() == list(range(53))
    keeper.join(target, 53, 6)  # what comes after may fail, and be tried again
    keeper.clear()
    assert not list((tmp_path / "partial").iterdir())


def test_sums_whose_samples_are_gone_are_not_continued_from(tmp_path):
    class Cut(Pictures):
        def __call__(self, first, last):
            if first >= 30:
                raise Killed
            return super().__call__(first, last)

    def attempt(generate):
        keeper = SampleKeeper(tmp_path)
        return measure(
            generate, Pixels(), reference(), n=53, batch_size=10, keeper=keeper, segments=saving_always(tmp_path), progress=False
        )

    with pytest.raises(Killed):
        attempt(Cut())
    (tmp_path / "images-0000001.npy").unlink()
    assert attempt(Pictures()).continued == 20
    assert len(list(tmp_path.glob("images-*.npy"))) == 6


@pytest.fixture
def kept(tmp_path) -> Path:
    """Evaluations of steps 1 to 3 that kept their samples, step 2's as PNGs, and one of other settings at step 1."""
    for age, (place, name) in enumerate([("1/other", "samples.npz"), ("1", "samples.npz"), ("2", "samples"), ("3", "samples.npz")]):
        path = tmp_path / place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch() if path.suffix else path.mkdir()
        os.utime(path, (1000 + age, 1000 + age))
    return tmp_path


@pytest.mark.parametrize(
    "keep, variant, left",
    [
        (0, "", ["1", "1/other", "2", "3"]),
        (2, "", ["1/other", "2", "3"]),
        (1, "", ["1/other", "3"]),
        (1, "other", ["1", "1/other", "2", "3"]),
        (9, "", ["1", "1/other", "2", "3"]),
    ],
)
def test_kept_samples_are_pruned_within_their_settings_and_only_when_asked(kept, keep, variant, left):
    prune_samples(kept, keep, variant)
    assert sorted(str(path.parent.relative_to(kept)) for path in kept.rglob("samples*")) == left


def test_an_array_named_npz_is_a_clear_error(tmp_path):
    with open(tmp_path / "x.npz", "wb") as file:
        np.save(file, np.zeros((3, 4)))
    with pytest.raises(UserError, match="x.npz: expected an npz file, but it is a single array"):
        npz.load_npz(tmp_path / "x.npz", ("mu",))


def test_measurement_is_plain_data():
    assert json.loads(json.dumps(dataclasses.asdict(run(Noise(), n=50))))["n"] == 50
