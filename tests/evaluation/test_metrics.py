import numpy as np
import pytest

from vr_online.errors import UserError
from vr_online.evaluation.metrics import InceptionScoreSums, kernel_inception_distance, precision_recall


def test_kid_is_clean_fids_and_leaves_the_global_generator_alone():
    from cleanfid.fid import kernel_distance

    rng = np.random.default_rng(0)
    real, fake = rng.normal(size=(60, 8)), rng.normal(size=(50, 8)) + 0.5
    np.random.seed(7)
    expected = kernel_distance(real, fake)
    state = np.random.get_state()[1].copy()
    assert kernel_inception_distance(real, fake, seed=7) == expected
    np.testing.assert_array_equal(np.random.get_state()[1], state)
    assert expected > 10 * abs(kernel_inception_distance(real, rng.normal(size=(50, 8))))
    with pytest.raises(UserError, match="at least 2"):
        kernel_inception_distance(real, fake[:1])


def test_inception_score_of_sure_balanced_guesses_is_the_number_of_classes():
    sums = InceptionScoreSums(n=400, classes=5, splits=4)
    sure = np.eye(5)[np.arange(400) % 5]
    for first in range(0, 400, 7):
        sums.add(first, sure[first : first + 7])
    assert sums.score() == (pytest.approx(5), pytest.approx(0, abs=1e-9))


def test_inception_score_of_equal_guesses_is_one():
    sums = InceptionScoreSums(n=30, classes=5)
    sums.add(0, np.full((30, 5), 0.2))
    assert sums.score()[0] == pytest.approx(1)


def test_inception_score_equals_the_definition_split_by_split():
    p = np.random.default_rng(0).dirichlet(np.ones(6), size=103)
    sums = InceptionScoreSums(n=103, classes=6)
    for first in range(0, 103, 10):
        sums.add(first, p[first : first + 10])
    splits = [p[(np.arange(103) * 10 // 103) == s] for s in range(10)]
    scores = [np.exp((part * (np.log(part) - np.log(part.mean(0)))).sum(1).mean()) for part in splits]
    assert sums.score() == (pytest.approx(np.mean(scores)), pytest.approx(np.std(scores)))


def brute_force(support, points, k):
    radii = np.sort(np.linalg.norm(support[:, None] - support[None], axis=2), axis=1)[:, k]
    return (np.linalg.norm(points[:, None] - support[None], axis=2) <= radii).any(1).mean()


@pytest.mark.parametrize("chunk", [13, 1000])
def test_precision_and_recall_equal_brute_force(chunk):
    rng = np.random.default_rng(0)
    real, fake = rng.normal(size=(80, 3)).astype(np.float32), (rng.normal(size=(70, 3)) * 1.6 + 0.4).astype(np.float32)
    precision, recall = precision_recall(real, fake, chunk=chunk)
    assert precision == brute_force(real, fake, 3) and recall == brute_force(fake, real, 3)
    assert 0.1 < precision < recall < 1


def test_precision_and_recall_tell_missing_modes_from_wrong_samples():
    rng = np.random.default_rng(0)
    two_modes = np.concatenate([rng.normal(size=(100, 2)), rng.normal(size=(100, 2)) + 50]).astype(np.float32)
    one_mode = rng.normal(size=(200, 2)).astype(np.float32)
    precision, recall = precision_recall(two_modes, one_mode)
    assert precision > 0.9 and recall < 0.55
    with pytest.raises(UserError, match="more than 3"):
        precision_recall(two_modes[:3], one_mode)
