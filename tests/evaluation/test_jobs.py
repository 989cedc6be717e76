import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import TINY, metrics, train_command
from vr_online.checkpoint import list_checkpoints
from vr_online.config import load_config
from vr_online.data.format import DatasetInfo
from vr_online.errors import UserError
from vr_online.evaluation import claims, jobs, results
from vr_online.evaluation.claims import Claim
from vr_online.evaluation.jobs import Evaluator, untouched_randomness
from vr_online.flow.paths import get_path
from vr_online.flow.targets import Flow
from vr_online.models.sit import build_sit

MODEL = [setting for setting in TINY if setting.startswith("model.")]


class Notes:
    """A monitor that remembers."""

    def __init__(self):
        self.texts = []

    def text(self, tag, markdown, step=0):
        self.texts.append((tag, markdown, step))


@pytest.fixture
def make(digits, tmp_path):
    """An evaluator of a run in tmp_path whose detached jobs run the given command."""

    def make(*settings):
        config = load_config(
            None,
            [
                f"data.shards={digits}/train",
                f"run_dir={tmp_path}/run",
                "evaluation.every=10",
                f"evaluation.reference={digits}/heldout",
                "evaluation.mode=detached",
                *settings,
            ],
        )
        info = DatasetInfo.load(f"{digits}/train")
        return Evaluator(config, info, SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu")), Notes())

    return make


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def write_template(tmp_path, code):
    """The same as a script, since braces in code would be taken for fields of the template."""
    script = tmp_path / "job.py"
    script.write_text(code)
    return f"evaluation.command={sys.executable} {script} {{run}} {{step}} {{device}}"


def test_what_is_due(make):
    evaluator = make(f"evaluation.command={sys.executable}")
    assert [step for step in range(35) if evaluator.due(step)] == [10, 20, 30]
    assert evaluator.missed(10) and not evaluator.missed(11)
    off = make("evaluation.every=null")
    assert not off.enabled and not off.due(10) and off.summary() == {} and off.pending_steps() == set()
    off.poll()
    off.finish()


def test_a_submitted_job_is_pending_until_its_result_is_there(make, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "POLL_S", 0.0)
    gate = tmp_path / "gate"
    later = f"import pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)\n"
    write = "import json, pathlib, sys\np = pathlib.Path(sys.argv[1], 'evals', sys.argv[2])\njson.dump({'step': int(sys.argv[2]), 'metric': 'fd', 'value': 1.5, 'metrics': {'fd': 1.5}}, open(p / 'result.json', 'w'))\n"
    evaluator = make(write_template(tmp_path, later + write))
    evaluator.evaluate(SimpleNamespace(step=10))
    evaluator.evaluate(SimpleNamespace(step=20))
    assert evaluator.pending_steps() == {10, 20}
    gate.touch()
    until(lambda: evaluator.poll() or not evaluator.pending_steps())
    assert evaluator.failures == {} and evaluator.summary() == {"fd": 1.5}


@pytest.mark.parametrize(
    "code, told",
    [
        (
            "import sys; print('first line'); sys.exit('the reference is gone')",
            "the job ended with status 1: the reference is gone",
        ),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9"),
    ],
)
def test_a_failed_job_is_told_and_nothing_more(make, tmp_path, monkeypatch, capsys, code, told):
    monkeypatch.setattr(jobs, "POLL_S", 0.0)
    evaluator = make(write_template(tmp_path, code))
    evaluator.evaluate(SimpleNamespace(step=10))
    until(lambda: evaluator.poll() or evaluator.failures)
    assert told in evaluator.failures[10]
    ((tag, markdown, step),) = evaluator.monitor.texts
    assert tag == "eval/failed" and step == 10 and told in markdown and "vr-online fid" in markdown
    assert told in capsys.readouterr().out
    assert evaluator.pending_steps() == set() and evaluator.summary() == {}


def test_a_submitted_job_that_fails_elsewhere_is_told(make, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "POLL_S", 0.0)
    evaluator = make(write_template(tmp_path, "print('submitted')"))
    evaluator.evaluate(SimpleNamespace(step=10))
    until(lambda: evaluator.poll() or evaluator.detached.running[0].process is None)
    assert evaluator.pending_steps() == {10} and evaluator.failures == {}
    (tmp_path / "run/evals/10/failed.txt").write_text("the node had no network file\n")
    evaluator.poll()
    assert evaluator.failures == {10: "the node had no network file"} and evaluator.pending_steps() == set()


@pytest.mark.parametrize("command", ["no-such-program {run}", "{executable} {nonsense}"])
def test_a_job_that_cannot_start_is_told(make, command):
    evaluator = make("evaluation.command=" + command.replace("{executable}", sys.executable))
    evaluator.evaluate(SimpleNamespace(step=10))
    assert "could not be started" in evaluator.failures[10]
    evaluator.finish()


def test_a_full_disk_does_not_reach_training(make, monkeypatch):
    evaluator = make(f"evaluation.command={sys.executable}")
    monkeypatch.setattr(Path, "mkdir", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    evaluator.evaluate(SimpleNamespace(step=10))
    assert "No space left" in evaluator.failures[10]


def test_what_an_earlier_launch_left_undone_is_made_up(make, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "list_checkpoints", lambda run_dir: [10, 15, 20, 30])
    (tmp_path / "run/evals/20").mkdir(parents=True)
    (tmp_path / "run/evals/20/result.json").write_text("{}")
    evaluator = make()
    assert evaluator.pending_steps() == {10, 30}
    monkeypatch.setattr(jobs, "_command", lambda settings, run_dir, steps: [sys.executable, "-c", f"print({steps})"])
    evaluator.evaluate(SimpleNamespace(step=30))
    evaluator.finish()
    assert set(evaluator.failures) == {10, 30}, "each was run once, and wrote no result"


def test_the_jobs_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    settings = load_config(None).evaluation
    for device, visible in (("cuda:1", "6"), ("cpu", ""), (None, "4,6")):
        environment = jobs._environment(settings.model_copy(update={"device": device}))
        assert environment["CUDA_VISIBLE_DEVICES"] == visible
        assert not {"WORLD_SIZE", "RANK"} & set(environment) and environment["PATH"] == os.environ["PATH"]
    command = jobs._command(settings.model_copy(update={"device": "cuda:1"}), Path("runs/a b"), [10, 20])
    assert command[-6:] == ["vr_online.evaluation.cli", "runs/a b", "--steps", "10,20", "--device", "cuda"]
    slurm = settings.model_copy(update={"command": 'sbatch --wrap "vr-online fid {run} --steps {step}"'})
    assert jobs._command(slurm, Path("/r"), [10]) == ["sbatch", "--wrap", "vr-online fid /r --steps 10"]


@pytest.mark.parametrize(
    "settings, why",
    [
        (["evaluation.reference=none.npz"], "none.npz: no such file"),
        (["evaluation.features=inception(none.pt)", "evaluation.mode=inline"], "none.pt"),
    ],
)
def test_what_cannot_work_is_said_before_training(make, settings, why):
    with pytest.raises(UserError, match=why):
        make(*settings)


def test_a_finished_run_lacks_the_evaluation_of_its_last_step_off_the_grid_too(make, monkeypatch):
    monkeypatch.setattr(jobs, "list_checkpoints", lambda run_dir: [10, 20, 23])
    evaluator = make("train.steps=23", f"evaluation.command={sys.executable}")
    assert evaluator.missed(23) and not evaluator.missed(22) and not evaluator.due(23)
    assert evaluator.pending_steps() == {10, 20, 23}, "what was submitted before is submitted again"


def test_a_submitted_job_that_falls_silent_is_told_and_let_go(make, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "POLL_S", 0.0)
    evaluator = make(write_template(tmp_path, "print('submitted')"))
    evaluator.evaluate(SimpleNamespace(step=10))
    until(lambda: evaluator.poll() or evaluator.detached.running[0].process is None)
    evaluator.poll()
    assert evaluator.pending_steps() == {10} and evaluator.failures == {}
    monkeypatch.setattr(jobs, "SUBMITTED_S", 0.0)
    with Claim.take(tmp_path / "run/evals/10"):
        evaluator.poll()
        assert evaluator.pending_steps() == {10} and evaluator.failures == {}, "someone is at work on it"
    evaluator.poll()
    assert "no result" in evaluator.failures[10] and evaluator.pending_steps() == set()


def test_looking_after_jobs_never_raises(make, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "POLL_S", 0.0)
    evaluator = make(write_template(tmp_path, "print('submitted')"))
    evaluator.evaluate(SimpleNamespace(step=10))
    until(lambda: evaluator.poll() or evaluator.detached.running[0].process is None)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        evaluator.poll()
    assert evaluator.pending_steps() == {10}


@pytest.fixture
def inline(make, tmp_path):
    """An inline evaluator of 20 samples, and a run that stands at the checkpoint of step 10."""
    evaluator = make("evaluation.mode=inline", "evaluation.n=20", "evaluation.batch_size=8", "evaluation.steps=1", *MODEL)
    info, config = evaluator.info, evaluator.config
    model = build_sit(config.model, info.latent_shape, info.num_classes)
    folder = tmp_path / "run/checkpoints/10"
    folder.mkdir(parents=True)
    for name in ("manifest.json", "config.yaml", "sampler.safetensors"):
        (folder / name).write_text("{}")
    ema = SimpleNamespace(decay=SimpleNamespace(name="ema"))
    flow = Flow(get_path("linear"), "velocity")
    return evaluator, SimpleNamespace(step=10, images=160, ema=ema, flow=flow, average_model=lambda *args: model)


def test_an_inline_evaluation_holds_the_claim_of_its_step(inline, tmp_path, monkeypatch):
    evaluator, run = inline
    evaluate, held = jobs.evaluate_model, []

    def looking(*args, **kwargs):
        held.append(claims.claimed_steps(tmp_path / "run"))
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(jobs, "evaluate_model", looking)
    evaluator.evaluate(run)
    assert held == [{10}] and claims.claimed_steps(tmp_path / "run") == set()
    assert evaluator.failures == {} and not evaluator.missed(10)


def test_an_inline_evaluation_leaves_a_step_to_whoever_is_at_work_on_it(inline, tmp_path, capsys):
    evaluator, run = inline
    with Claim.take(tmp_path / "run/evals/10"):
        evaluator.evaluate(run)
    assert "left to the evaluator" in capsys.readouterr().out
    assert evaluator.failures == {} and evaluator.missed(10) and evaluator.summary() == {}
    (tmp_path / "run/evals/10/claim.json").write_text(json.dumps({"host": "elsewhere", "pid": 1, "owner": "training"}))
    evaluator.evaluate(run)
    assert not evaluator.missed(10), "the claim was this run's own, of a launch that was killed"


def test_an_inline_evaluation_told_to_stop_is_made_up_for_from_where_it_was(inline, tmp_path, capsys):
    evaluator, run = inline
    evaluator.evaluate(run, should_stop=lambda: True)
    assert "left for when the run continues" in capsys.readouterr().out
    assert evaluator.failures == {} and evaluator.missed(10)
    evaluator.evaluate(run, should_stop=lambda: False)
    result = results.read(tmp_path / "run/evals/10/result.json")
    assert (result["continued"], result["n"]) == (8, 20) and not evaluator.missed(10)


def test_the_result_of_another_checkpoint_of_the_step_does_not_count(inline, tmp_path):
    evaluator, run = inline
    evaluator.evaluate(run)
    assert not evaluator.missed(10)
    manifest = tmp_path / "run/checkpoints/10/manifest.json"
    manifest.write_text('{"other": 1}')
    os.utime(manifest, (1, 1))
    assert evaluator.missed(10)


def test_randomness_is_restored():
    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()

    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    expected = draw()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    with untouched_randomness():
        torch.manual_seed(9)
        draw()
    assert draw() == expected


def test_a_stop_signal_ends_an_inline_evaluation_and_the_next_launch_finishes_it(tiny, tmp_path):
    """Through the real launcher on two processes, as a scheduler does it."""
    options = [*tiny, "evaluation.every=3", "evaluation.n=500", "evaluation.steps=10", "evaluation.batch_size=8"]
    (tmp_path / "empty.yaml").write_text("{}\n")
    with open(tmp_path / "log", "w") as log:
        command = train_command(tmp_path / "empty.yaml", options)
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        until((tmp_path / "run/evals/3/claim.json").exists, seconds=120)
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)
        until((tmp_path / "run/summary.json").exists)  # the launcher does not wait for its ranks
    evals, told = tmp_path / "run/evals", (tmp_path / "log").read_text()
    assert "left for when the run continues" in told and list_checkpoints(tmp_path / "run") == [3], told
    assert len(list((evals / "3/partial").glob("sums-*.npz"))) == 2, "one of each rank"
    assert not (evals / "3/result.json").exists() and not (evals / "3/claim.json").exists()
    done = subprocess.run(train_command(tmp_path / "empty.yaml", options), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = (results.read(evals / str(step) / "result.json") for step in (3, 6))
    assert 16 <= first["continued"] < 500 and (first["n"], last["n"], last["continued"]) == (500, 500, 0)


def test_detached_jobs_do_not_change_training(launch, digits, tmp_path):
    """Through the real launcher on two processes: the same losses, bitwise, with jobs at steps 3 and 6 as with none."""
    jobs_on = [
        "evaluation.mode=detached",
        "evaluation.every=3",
        "evaluation.n=30",
        "evaluation.steps=2",
        "evaluation.batch_size=8",
        f"evaluation.reference={digits}/heldout",
    ]
    losses = {}
    for name, settings in (("none", []), ("detached", jobs_on)):
        done = launch([*TINY, f"data.shards={digits}/train", f"run_dir={tmp_path}/{name}", *settings])
        assert done.returncode == 0, done.output
        losses[name] = {step: line["train/loss"] for step, line in metrics(tmp_path / name).items()}
    assert len(losses["none"]) == 6 and losses["detached"] == losses["none"]
    found = {
        int(path.parent.name): results.read(path)["value"] for path in (tmp_path / "detached").glob("evals/*/result.json")
    }
    assert set(found) == {3, 6}
    (summary,) = [json.loads(line) for line in done.output.splitlines() if line.startswith('{"steps"')]
    assert summary["fd_latent"] == found[6]
