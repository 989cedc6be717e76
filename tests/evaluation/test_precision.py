"""Evaluation computes in full float32, whatever the process around it allows, and leaves that as it was."""

import numpy as np
import pytest
import torch

from tests.evaluation.fakes import Identity
from tests.models.checkpoints import random_model, tiny_config, tiny_info, write_checkpoint
from vr_online.cli import main
from vr_online.evaluation.evaluate import Task, evaluate_model
from vr_online.evaluation.features import build_extractor
from vr_online.evaluation.frechet import Moments
from vr_online.evaluation.precision import full_float32, uses_tf32
from vr_online.evaluation.statistics import Statistics, compute_statistics
from vr_online.flow import Flow, get_path
from vr_online.models.sit import SiT

CONFIG, INFO = tiny_config(), tiny_info()


@pytest.fixture(params=[True, False])
def allowed(request):
    """TF32 allowed or not by the process; must be so again when the test ends."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = request.param
    yield request.param
    after = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32, cudnn.allow_tf32 = before
    assert after == (request.param, request.param)


def test_a_failure_restores_what_was_allowed(allowed):
    with pytest.raises(ZeroDivisionError), full_float32():
        assert not uses_tf32()
        1 / 0
    assert uses_tf32() is allowed


def test_samples_are_evaluated_without_tf32_and_the_result_says_so(allowed):
    seen, model = [], random_model(CONFIG, INFO, 1)
    model.register_forward_hook(lambda *_: seen.append(uses_tf32()))
    reference = Statistics(Moments(np.zeros(16), np.eye(16), 100), "vr_online", {})
    task = Task(CONFIG.evaluation, INFO, build_extractor("latent", info=INFO), reference, None)
    result = evaluate_model(model, Flow(get_path("linear")), CONFIG, INFO, task=task, progress=False)
    assert seen and not any(seen) and result["tf32"] is False


def test_reference_statistics_are_computed_without_tf32(allowed):
    class Source:
        count = origin = None

        def samples(self, rank, world_size):
            yield from np.eye(4, dtype=np.float32)[:, None, None]

        def describe(self):
            return {}

    class Watching(Identity):
        seen: list = []

        def __call__(self, samples):
            self.seen.append(uses_tf32())
            return super().__call__(samples)

    Watching.norm = INFO.norm
    assert compute_statistics(Source(), Watching(), progress=False).moments.n == 4
    assert Watching.seen and not any(Watching.seen)


def test_the_sample_command_draws_without_tf32(allowed, tmp_path, monkeypatch):
    seen, forward = [], SiT.forward
    monkeypatch.setattr(SiT, "forward", lambda self, *args: seen.append(uses_tf32()) or forward(self, *args))
    model = random_model(CONFIG, INFO, 1)
    write_checkpoint(tmp_path / "run", 5, CONFIG, INFO, model, model)
    assert main(["sample", str(tmp_path / "run"), "--n", "2", "--device", "cpu", "--out", str(tmp_path / "s.npz")]) == 0
    assert seen and not any(seen)
