"""Per-bin statistics: exact sums, count decay, finite-sample correction, and what is left out."""

from __future__ import annotations

import pytest
import torch

from vr_online.timesteps.recent import RecentLosses
from vr_online.timesteps.statistics import BinStatistics, History, borrow

K = 4


def step(stats: BinStatistics, bin, loss, sketch=None, weight=None, skipped=None) -> None:
    bin, loss = torch.as_tensor(bin), torch.as_tensor(loss, dtype=torch.float32)
    weight = torch.ones(len(bin)) if weight is None else torch.as_tensor(weight)
    stats.fold(stats.step_sums(bin, loss, weight, sketch).float(), len(bin), skipped)


def test_moments_of_one_step_are_those_of_its_samples():
    torch.manual_seed(0)
    stats = BinStatistics(K, k=3, half_life=1e12)
    bin, loss, sketch = torch.arange(80) % 3, torch.rand(80), torch.randn(80, 3) + 2
    step(stats, bin, loss, sketch)
    view = stats.view()
    for b in range(3):
        mine = sketch[bin == b].double()
        torch.testing.assert_close(view.loss[b], loss[bin == b].double().mean())
        torch.testing.assert_close(view.loss_sq[b], loss[bin == b].double().square().mean())
        torch.testing.assert_close(view.grad_sq[b], mine.square().sum(1).mean() / 3)
        torch.testing.assert_close(view.grad_var[b], mine.var(0, unbiased=True).sum() / 3)
        assert view.n_eff[b] == len(mine)


def test_variance_is_unbiased_under_decay():
    """The correction for decay weights: the mean over many short runs is the true variance, 1."""
    torch.manual_seed(0)
    stats = BinStatistics(200, k=50, half_life=200 * 2.0)
    for _ in range(12):
        step(stats, torch.arange(200), torch.ones(200), torch.randn(200, 50) + 3)
    view = stats.view()
    assert view.n_eff.max() < 8  # few enough that an uncorrected variance would be 14 % low
    assert abs(view.grad_var.mean() - 1) < 4 * (2 / (200 * 50 * 5)) ** 0.5
    assert abs(view.signal.mean() / 9 - 1) < 0.05


def test_decay_is_by_count():
    stats = BinStatistics(2, k=0, half_life=2 * 100)
    step(stats, [0] * 400 + [1] * 400, [1.0] * 800)
    before = stats.sums.clone()
    step(stats, [0] * 100, [1.0] * 100)
    assert torch.equal(stats.sums[1], before[1])
    assert stats.sums[0, 0] == pytest.approx(before[0, 0].item() / 2 + 100)
    assert stats.sums[0, 1] == pytest.approx(before[0, 1].item() / 4 + 100)
    assert stats.age.tolist() == [0, 100] and stats.visits.tolist() == [500, 400]


def test_early_samples_are_forgotten_early():
    """With a very long half-life the first steps of a run still lose their weight."""
    stats = BinStatistics(1, k=0, half_life=1e9)
    step(stats, [0] * 10, [100.0] * 10)
    for _ in range(50):
        step(stats, [0] * 10, [1.0] * 10)
    assert stats.view().loss[0] < 1.05  # the plain mean is 2.9


def test_follows_a_distribution_that_moves_fast():
    stats = BinStatistics(K, k=1, half_life=K * 20)
    for value in (1.0, 50.0, 3.0):
        torch.manual_seed(0)
        for _ in range(30):
            step(stats, torch.arange(40) % K, torch.full((40,), value), value * torch.randn(40, 1))
        view = stats.view()
        torch.testing.assert_close(view.loss, torch.full((K,), value, dtype=torch.float64), rtol=0.01, atol=0)
        assert ((view.grad_var / value**2 - 1).abs() < 0.6).all()


@pytest.mark.parametrize("where", ["loss", "sketch"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_samples_are_left_out_and_counted(where, bad):
    loss, sketch = torch.ones(4), torch.ones(4, 2)
    dirty_loss, dirty_sketch = torch.ones(5), torch.ones(5, 2)
    (dirty_loss if where == "loss" else dirty_sketch)[2] = bad
    clean, dirty = BinStatistics(K, 2, 1e3), BinStatistics(K, 2, 1e3)
    step(clean, [0, 0, 1, 1], loss, sketch)
    step(dirty, [0, 0, 2, 1, 1], dirty_loss, dirty_sketch)
    assert torch.equal(clean.sums, dirty.sums) and dirty.sums.isfinite().all()
    assert dirty.nonfinite.tolist() == [0, 0, 1, 0] and clean.nonfinite.sum() == 0


def test_samples_without_weight_are_left_out_but_not_counted_as_bad():
    stats = BinStatistics(K, 1, 1e3)
    step(stats, [0, 1], [1.0, 2.0], torch.tensor([[1.0], [float("nan")]]), weight=[1.0, 0.0])
    assert stats.sums[1].abs().sum() == 0 and stats.nonfinite.sum() == 0 and stats.sums[0, 0] == 1


def test_a_skipped_step_only_counts_bad_samples():
    stats = BinStatistics(K, 1, 1e3)
    step(stats, [0, 1], [1.0, 2.0], torch.ones(2, 1))
    before = {n: v.clone() for n, v in (("sums", stats.sums), ("visits", stats.visits), ("age", stats.age))}
    step(stats, [2, 3], [5.0, float("nan")], torch.ones(2, 1), skipped=torch.tensor(1.0))
    assert all(torch.equal(getattr(stats, n), v) for n, v in before.items())
    assert stats.nonfinite.tolist() == [0, 0, 0, 1]
    step(stats, [2, 3], [5.0, 1.0], torch.ones(2, 1), skipped=torch.tensor([0.0]))
    assert stats.visits.tolist() == [1, 1, 1, 1]


def test_an_empty_bin_borrows_from_its_neighbours():
    values, n = torch.tensor([1.0, 9.0, 3.0], dtype=torch.float64), torch.tensor([5.0, 0.0, 5.0], dtype=torch.float64)
    filled = borrow(values, n, n > 0)
    assert filled.tolist() == pytest.approx([1.0, 2.0, 3.0])


def test_history_is_thinned_and_spans_the_run():
    history = History(capacity=8)
    for i in range(100):
        history.record(i, 10 * i, torch.tensor([float(i)]), torch.tensor([0.0]))
    assert 4 <= len(history.images) <= 8
    assert history.images[0] == 0 and history.images[-1] >= 900 - 10 * history.every
    assert [int(row) * 10 for row in history.loss] == history.images
    steps = torch.tensor(history.images).diff()
    assert (steps == steps[0]).all()


def test_recent_losses_keep_the_last_ones_in_order():
    torch.manual_seed(0)
    recent, plain = RecentLosses(3, "cpu", length=4), [[], [], []]
    for size in (1, 30, 2, 5, 3):
        bin, loss = torch.randint(3, (size,)), torch.rand(size)
        loss[0] = float("nan")
        recent.values, recent.count = recent.updated(bin, loss)
        for b, value in zip(bin.tolist(), loss.double().tolist()):
            if value == value:
                plain[b].append(value)
        for b in range(3):
            last = plain[b][-4:]
            assert recent.count[b] == len(last)
            assert recent.values[b, 4 - len(last):].tolist() == last
