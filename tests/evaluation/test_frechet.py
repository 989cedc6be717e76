import numpy as np
import pytest
import torch

from vr_online.errors import UserError
from vr_online.evaluation.frechet import Moments, MomentSums, frechet_distance


def sums_of(x):
    sums = MomentSums(x.shape[1])
    for part in np.array_split(x, 7):
        sums.add(torch.from_numpy(part))
    return sums


def test_moments_equal_numpy_at_a_mean_far_from_zero():
    x = np.random.default_rng(0).normal(size=(500, 6)) @ np.random.default_rng(1).normal(size=(6, 6)) + 1e3
    moments = sums_of(x).moments()
    assert moments.n == 500
    np.testing.assert_allclose(moments.mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.cov, np.cov(x, rowvar=False), rtol=1e-6, atol=1e-7)


def test_distance_of_commuting_gaussians_has_its_closed_form():
    # C_1 = Q diag(a) Q^T and C_2 = Q diag(b) Q^T: d^2 = |m|^2 + sum (sqrt a - sqrt b)^2.
    rng = np.random.default_rng(0)
    q, _ = np.linalg.qr(rng.normal(size=(20, 20)))
    a, b, m = rng.uniform(0, 3, 20), rng.uniform(0, 3, 20), rng.normal(size=20)
    a[:5] = 0  # singular
    expected = m @ m + ((np.sqrt(a) - np.sqrt(b)) ** 2).sum()
    got = frechet_distance(Moments(np.zeros(20), q * a @ q.T), Moments(m, q * b @ q.T))
    assert got == pytest.approx(expected, rel=1e-7)


def test_distance_of_general_gaussians_equals_the_matrix_square_root():
    import scipy.linalg

    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(90, 12)) @ rng.normal(size=(12, 12)), rng.normal(size=(80, 12)) @ rng.normal(size=(12, 12)) + 0.3
    a, b = sums_of(x).moments(), sums_of(y).moments()
    root = scipy.linalg.sqrtm(a.cov @ b.cov).real
    expected = ((a.mean - b.mean) ** 2).sum() + np.trace(a.cov + b.cov - 2 * root)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [30, 2000])
def test_distance_to_itself_vanishes_even_with_fewer_samples_than_features(n):
    x = np.abs(np.random.default_rng(0).normal(size=(n, 256))) * np.exp(-np.arange(256) / 20) * 30
    moments = sums_of(x).moments()
    assert np.trace(moments.cov) > 100  # so that the bound below means something
    assert abs(frechet_distance(moments, moments)) < 1e-3


def test_constant_features_are_points():
    zero = np.zeros((4, 4))
    assert frechet_distance(Moments(np.zeros(4), zero), Moments(np.full(4, 2.0), zero)) == pytest.approx(16)


def test_sums_of_parts_merge_to_the_sums_of_the_whole():
    x = np.random.default_rng(0).normal(size=(101, 5))
    merged = sums_of(x[:40])
    other = sums_of(x[40:])
    merged.merge(other.n, other.total, other.outer)
    whole = sums_of(x).moments()
    assert merged.n == 101
    np.testing.assert_allclose(merged.moments().cov, whole.cov, rtol=1e-12)


def test_what_cannot_be_a_covariance_is_refused():
    with pytest.raises(UserError, match="not finite"):
        MomentSums(2).add(torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(UserError, match=r"\(1, 3\).*\(batch, 2\)"):
        MomentSums(2).add(torch.ones(1, 3))
    with pytest.raises(UserError, match="at least 2"):
        sums_of(np.ones((1, 2))).moments()
    with pytest.raises(UserError, match="3 and 2"):
        frechet_distance(Moments(np.zeros(3), np.eye(3)), Moments(np.zeros(2), np.eye(2)))
