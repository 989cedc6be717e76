import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import TINY
from vr_online import checkpoint
from vr_online.config import load_config
from vr_online.errors import UserError
from vr_online.evaluation import cli, generation, offline, results
from vr_online.evaluation.accumulate import Segments
from vr_online.evaluation.claims import Claim
from vr_online.evaluation.frechet import frechet_distance
from vr_online.evaluation.offline import Offline
from vr_online.evaluation.statistics import Statistics
from vr_online.monitor.monitor import TENSORBOARD

ROOT = Path(__file__).parents[2]
SMALL = ["n=20", "steps=2", "batch_size=8"]


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory) -> Path:
    """A run with checkpoints of steps 2, 4 and 6, none of them evaluated."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    config = run_dir.parent / "c.yaml"
    config.write_text("{}\n")
    settings = [
        *TINY,
        f"data.shards={digits}/train",
        f"run_dir={run_dir}",
        "checkpoint.every=2",
        "evaluation.n=20",
        "evaluation.steps=2",
        "evaluation.batch_size=8",
        f"evaluation.reference={digits}/heldout",
    ]
    subprocess.run(
        [sys.executable, "-m", "vr_online.train", "--config", config, *settings],
        check=True,
        capture_output=True,
        cwd=ROOT,
        timeout=120,
    )
    return run_dir


@pytest.fixture
def run_dir(trained, tmp_path) -> Path:
    """A copy of it to spoil. The files are shared, so replace, never rewrite them."""
    copy = tmp_path / "run"
    subprocess.run(["cp", "-rl", trained, copy], check=True)
    return copy


def fid(*words) -> int:
    return cli.main([str(word) for word in (*words, "--quiet")])


def result_of(run_dir, step, variant="") -> dict:
    return results.read(run_dir / "evals" / str(step) / variant / "result.json")


def scalars_of(run_dir) -> dict:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / TENSORBOARD / "eval"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_newest_checkpoint_is_evaluated_and_everything_about_it_recorded(run_dir, capsys):
    assert fid(run_dir) == 0
    result = result_of(run_dir, 6)
    assert result["metric"] == "fd_latent" and result["value"] > 0 and result["metrics"]["fd_latent"] == result["value"]
    wanted = {
        "step": 6,
        "images": 96,
        "n": 20,
        "solver": "heun",
        "solver_steps": 2,
        "nfe": 4,
        "cfg": 1.0,
        "labels": "balanced",
        "seed": 0,
        "weights": "ema",
        "time": "t=0 noise, t=1 data",
        "path": "linear",
        "prediction": "velocity",
        "rtol": None,
        "resize": None,
    }
    assert {key: result[key] for key in wanted} == wanted
    assert result["ema"] and result["features"]["hash"] == "none" and len(result["reference"]["hash"]) == 64
    assert {"torch", "numpy", "clean-fid", "vr_online"} <= set(result["versions"])
    assert re.search(r"step 6: fd_latent", capsys.readouterr().out)
    assert (run_dir / "evals/6/samples.png").exists() and (run_dir / "figures/fid.png").exists()
    assert not (run_dir / "evals/6/partial").exists() and not (run_dir / "evals/6/claim.json").exists()
    (points,) = scalars_of(run_dir).values()
    assert points == [(6, pytest.approx(result["value"], rel=1e-6))]


def test_steps_all_and_force(run_dir):
    assert fid(run_dir, "--steps", "2,4") == 0
    first, written = result_of(run_dir, 2), (run_dir / "evals/2/result.json").stat().st_ino
    assert fid(run_dir, "--all") == 0
    assert (run_dir / "evals/2/result.json").stat().st_ino == written and result_of(run_dir, 6)["step"] == 6
    kept = (run_dir / "evals/2/result.json").open()  # so that its inode is not given to the next file
    assert fid(run_dir / "checkpoints/2", "--force") == 0
    assert (run_dir / "evals/2/result.json").stat().st_ino != written and result_of(run_dir, 2)["value"] == first["value"]
    kept.close()


def test_other_settings_are_kept_apart_and_compare_refuses_them(run_dir, tmp_path, capsys):
    assert fid(run_dir) == 0 and fid(run_dir, "n=30", "solver=euler", "weights=raw") == 0
    own = result_of(run_dir, 6)
    (variant,) = [path.name for path in (run_dir / "evals/6").iterdir() if path.is_dir()]
    other = result_of(run_dir, 6, variant)
    assert "euler-2-cfg1-n30-raw" in variant and (other["n"], other["weights"], other["ema"]) == (30, "raw", None)

    twin = tmp_path / "twin"
    subprocess.run(["cp", "-r", run_dir, twin], check=True)
    results.write(twin / "evals/6/result.json", {**own, "value": own["value"] - 1})
    capsys.readouterr()
    assert cli.main(["compare", str(run_dir), str(twin)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 3 and table[1].startswith(str(twin)), "best first"

    results.write(twin / "evals/6/result.json", other)
    assert cli.main(["compare", str(run_dir), str(twin)]) == 2
    message = capsys.readouterr().err
    for line in (
        f"n: 20 ({run_dir}), 30 ({twin})",
        f"solver: heun ({run_dir}), euler ({twin})",
        f"weights: ema ({run_dir}), raw ({twin})",
    ):
        assert line in message


def test_the_samples_stay_when_asked_for(run_dir):
    assert fid(run_dir, "keep=1") == 0
    images = np.load(run_dir / "evals/6/samples.npz")["arr_0"]
    assert images.shape == (20, 8, 8, 3) and images.dtype == np.uint8 and images.std() > 0
    assert fid(run_dir, "keep=1", "--steps", "4") == 0
    assert [p.parent.name for p in run_dir.rglob("samples.npz")] == ["4"]
    assert fid(run_dir, "--steps", "2") == 0
    assert [p.parent.name for p in run_dir.rglob("samples.npz")] == ["4"], "an evaluation that keeps none took another's"


def test_a_full_disk_at_the_end_of_an_evaluation_is_made_up_for_without_sampling_again(run_dir, monkeypatch, capsys):
    monkeypatch.setattr(Segments, "FIRST_S", 0.0)

    def full(*args):
        raise UserError("result.json: cannot write: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(results, "write", full)
        assert fid(run_dir, "keep=1") == 2
    assert "No space left" in capsys.readouterr().out
    assert fid(run_dir, "keep=1") == 0, capsys.readouterr().out
    assert result_of(run_dir, 6)["continued"] == 20
    assert np.load(run_dir / "evals/6/samples.npz")["arr_0"].shape == (20, 8, 8, 3)
    assert not (run_dir / "evals/6/partial").exists()


def test_image_features_in_memory_equal_those_of_the_samples_kept_as_pngs(run_dir, digits, tmp_path):
    torch.jit.script(torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(3), torch.nn.Flatten())).save(str(tmp_path / "pool.pt"))
    features = f"torchscript({tmp_path}/pool.pt, 32)"
    assert fid("stats", f"{digits}/heldout", "--out", tmp_path / "real.npz", "--features", features) == 0
    assert fid(run_dir, f"features='{features}'", f"reference={tmp_path}/real.npz", "keep=1", "keep_format=png") == 0
    (path,) = run_dir.glob("evals/6/*/result.json")
    assert len(list((path.parent / "samples").glob("*.png"))) == 20
    assert fid("stats", path.parent / "samples", "--out", tmp_path / "fake.npz", "--features", features) == 0
    real, fake = (Statistics.load(tmp_path / f"{name}.npz").moments for name in ("real", "fake"))
    result = results.read(path)
    assert result["metric"] == "fd_pool" and result["resize"] == "clean"
    assert result["value"] == pytest.approx(frechet_distance(fake, real), rel=1e-9)


def test_a_half_written_checkpoint_is_named_and_the_others_evaluated(run_dir, capsys):
    (weights,) = (run_dir / "checkpoints/4").glob("weights-*")
    payload = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(payload[: len(payload) // 2])
    assert fid(run_dir, "--steps", "4,2") == 2
    out = capsys.readouterr()
    assert "step 4" in out.out and "whole checkpoint" in out.out and "1 of the evaluations failed" in out.err
    assert result_of(run_dir, 2)["step"] == 2
    assert not (run_dir / "evals/4/result.json").exists()
    assert fid(run_dir, "--all") == 0 and not (run_dir / "evals/4/result.json").exists()


@pytest.mark.parametrize(
    "words, why",
    [
        (["solver=huen"], "solver"),
        (["nn=3"], "nn"),
        (["reference=none.npz"], "none.npz: no such file"),
        (["features=inception(none.pt)"], "none.pt"),
        (["--steps", "7"], "step 7"),
        (["--steps", "a"], "whole numbers"),
        (["metrics=[fd, is]"], "needs a classifier"),
    ],
)
def test_mistakes_are_told_in_one_line(run_dir, capsys, words, why):
    assert fid(run_dir, *words) == 2
    captured = capsys.readouterr()
    assert why in captured.out + captured.err and "Traceback" not in captured.err
    assert not list(run_dir.glob("evals/**/result.json"))


def test_word_of_a_failure_is_left_until_the_step_succeeds(run_dir):
    assert fid(run_dir, "--steps", "4", "reference=none.npz") == 2
    assert "none.npz" in (run_dir / "evals/4/failed.txt").read_text()
    assert fid(run_dir, "--steps", "4") == 0
    assert not (run_dir / "evals/4/failed.txt").exists()


def test_no_run_and_no_words(tmp_path, capsys):
    assert (
        fid(tmp_path / "none") == 2
        and fid(tmp_path) == 2
        and cli.main(["compare", str(tmp_path / "none")]) == 2
        and cli.main([]) == 0
    )
    assert "no such run" in capsys.readouterr().err


KILLED = """
import sys
from vr_online.evaluation.accumulate import Segments
from vr_online.evaluation.cli import main
Segments.FIRST_S = 0.0
sys.exit(main(sys.argv[1:]))
"""


def test_an_evaluation_killed_on_the_spot_continues_to_the_same_number(run_dir, monkeypatch):
    words = [str(run_dir), "n=300", "batch_size=4", "steps=15", "--quiet"]
    job = subprocess.Popen([sys.executable, "-c", KILLED, *words], cwd=ROOT)
    deadline = time.monotonic() + 120
    while len(list(run_dir.glob("evals/6/*/partial/sums-*.npz"))) < 3 and time.monotonic() < deadline and job.poll() is None:
        time.sleep(0.02)
    job.send_signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL, "the job ended before it could be killed"
    assert fid(*words[:-1]) == 0
    (path,) = run_dir.glob("evals/6/*/result.json")
    continued = results.read(path)
    assert 0 < continued["continued"] < 300 and continued["n"] == 300
    assert fid(*words[:-1], "--force") == 0
    whole = results.read(path)
    assert whole["continued"] == 0
    assert continued["value"] == pytest.approx(whole["value"], rel=1e-9) and continued["nfe"] == whole["nfe"]


def test_two_watchers_take_each_checkpoint_once(run_dir):
    taken, failures = [[], []], []

    def watch(mine):
        told = Offline(run_dir, progress=False).watch(lambda result: mine.append(result["step"]), interval=0.05)
        failures.extend(told)

    threads = [threading.Thread(target=watch, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failures == [] and sorted(taken[0] + taken[1]) == [2, 4, 6]


def test_a_watcher_takes_checkpoints_as_they_appear_and_ends_with_the_run(run_dir, tmp_path):
    late = tmp_path / "late"
    (run_dir / "checkpoints/6").rename(late)
    seen = []
    watcher = threading.Thread(
        target=lambda: Offline(run_dir, progress=False).watch(lambda r: seen.append(r["step"]), interval=0.05)
    )
    watcher.start()
    deadline = time.monotonic() + 60
    while len(seen) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert seen == [2, 4] and watcher.is_alive()
    late.rename(run_dir / "checkpoints/6")
    watcher.join(timeout=60)
    assert seen == [2, 4, 6] and not watcher.is_alive()


def test_a_watcher_told_to_evaluate_again_does_so_once(run_dir):
    assert fid(run_dir, "--all") == 0
    seen = []
    assert Offline(run_dir, progress=False, force=True).watch(lambda r: seen.append(r["step"]), interval=0.01) == []
    assert seen == [2, 4, 6]


def test_a_watcher_goes_on_after_whatever_fails(run_dir, monkeypatch):
    evaluate = offline.evaluate_model

    def tight(model, *args, origin, **kwargs):
        if origin.step == 4:
            raise RuntimeError("CUDA out of memory")
        return evaluate(model, *args, origin=origin, **kwargs)

    monkeypatch.setattr(offline, "evaluate_model", tight)
    seen = []
    failures = Offline(run_dir, progress=False).watch(lambda r: seen.append(r["step"]), interval=0.01)
    assert seen == [2, 6] and failures == ["step 4: RuntimeError: CUDA out of memory"]
    assert "out of memory" in (run_dir / "evals/4/failed.txt").read_text()


def test_a_watcher_passes_over_checkpoints_that_are_pruned_meanwhile(run_dir, monkeypatch):
    there, load = checkpoint.list_checkpoints, generation.load_model

    def pruning(path, *args, **kwargs):
        if path.name == "4":
            shutil.rmtree(path)
        return load(path, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "list_checkpoints", lambda run: sorted({*there(run), 3}))  # gone when it is looked at
    monkeypatch.setattr(generation, "load_model", pruning)
    seen = []
    assert Offline(run_dir, progress=False).watch(lambda r: seen.append(r["step"]), interval=0.01) == []
    assert seen == [2, 6] and not (run_dir / "evals/4/failed.txt").exists()


def test_settings_that_cannot_be_end_a_watch_with_a_failure_for_every_step(run_dir):
    failures = Offline(run_dir, ("solver=huen",), progress=False).watch(lambda r: None, interval=0.01)
    assert len(failures) == 3 and all("solver" in failure for failure in failures)


def test_a_result_belongs_to_one_checkpoint_of_its_step_and_to_its_copies(run_dir, tmp_path):
    assert fid(run_dir) == 0
    first = result_of(run_dir, 6)
    subprocess.run(["cp", "-r", run_dir, tmp_path / "copy"], check=True)
    assert Offline(run_dir).is_done(6) and Offline(tmp_path / "copy").is_done(6)
    for path in (run_dir / "checkpoints/4").glob("weights-*"):  # as if the run had gone on otherwise from step 4
        path.replace(run_dir / "checkpoints/6" / path.name)
    manifest = run_dir / "checkpoints/6/manifest.json"
    text = manifest.read_text()
    manifest.unlink()
    manifest.write_text(text)
    assert not Offline(run_dir).is_done(6)
    assert fid(run_dir) == 0
    again = result_of(run_dir, 6)
    assert again["value"] != first["value"] and again["checkpoint"] != first["checkpoint"] and Offline(run_dir).is_done(6)


def test_a_step_claimed_elsewhere_is_left_alone(run_dir, capsys):
    with Claim.take(run_dir / "evals/6"):
        assert fid(run_dir) == 0
    assert "another evaluator" in capsys.readouterr().out
    assert not (run_dir / "evals/6/result.json").exists()


def test_statistics_from_the_command_line_serve_as_reference(run_dir, digits, tmp_path, capsys):
    assert fid("stats", f"{digits}/heldout", "--out", tmp_path / "x.npz") == 0
    assert "297 samples, 64 features of latent" in capsys.readouterr().out
    assert fid(run_dir) == 0 and fid(run_dir, f"reference={tmp_path}/x.npz") == 0
    (path,) = run_dir.glob("evals/6/*/result.json")
    assert results.read(path)["reference"]["hash"] == result_of(run_dir, 6)["reference"]["hash"]
    assert results.read(path)["value"] == pytest.approx(result_of(run_dir, 6)["value"], rel=1e-9)


def test_a_damaged_result_is_named(run_dir):
    results.write(run_dir / "evals/6/result.json", {"step": 6})
    with pytest.raises(UserError, match="evals/6/result.json: cannot read this result"):
        Offline(run_dir).evaluate(6)


def test_settings_decide_where_a_result_goes():
    own = load_config(None).evaluation
    assert results.variant(own, own) == ""
    assert results.variant(own.model_copy(update={"batch_size": 3, "every": 5, "keep": 2}), own) == ""
    names = {results.variant(own.model_copy(update={"seed": seed}), own) for seed in (1, 2)}
    assert len(names) == 2 and all(name.startswith("heun-50-cfg1-n50000-ema-") for name in names)


def test_results_are_json_without_nan(run_dir):
    fid(run_dir)
    json.loads((run_dir / "evals/6/result.json").read_text(), parse_constant=lambda name: pytest.fail(name))
