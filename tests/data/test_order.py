"""The order of samples, on indices alone."""

import random
from collections import Counter

import numpy as np
import pytest

from vr_online.data.order import LanePlan, Layout, Order, Past, Piece, stream_key

COUNTS = [7, 3, 0, 12, 5, 9, 1, 8]
EVERY_SAMPLE = Counter((shard, offset) for shard, count in enumerate(COUNTS) for offset in range(count))


def samples_of(plan, n=0):
    """(shard, offset) in the order they leave, from the n-th on."""
    read = []
    for piece in plan.pieces:
        offsets = range(piece.count) if piece.offsets is None else piece.offsets.tolist()
        read += [(piece.shard, offset) for offset in offsets]
    return [read[i] for i in plan.leaving(n)]


@pytest.mark.parametrize("size, shuffle", [(1, 1), (50, 1), (50, 2), (1000, 7), (3000, 300), (40, 4096), (5000, 1000)])
def test_a_plan_can_be_entered_anywhere(size, shuffle):
    plan = LanePlan([Piece(0, size)], shuffle, stream_key(3, 1))
    whole = list(plan.leaving())
    assert sorted(whole) == list(range(size))
    for n in sorted({0, 1, size - 1, size, *random.Random(size).sample(range(size), min(20, size))}):
        assert list(plan.leaving(n)) == whole[n:]
        first, mask = plan.left(n)
        assert set(range(first)) | set((first + np.flatnonzero(mask)).tolist()) == set(whole[:n])


def test_shuffle_one_keeps_the_stored_order():
    assert list(LanePlan([Piece(0, 100)], 1, stream_key(0)).leaving()) == list(range(100))


def test_the_buffer_holds_about_as_many_samples_as_asked_for():
    shuffle = 500
    order = np.array(list(LanePlan([Piece(0, 20_000)], shuffle, stream_key(5)).leaving()))
    waiting = np.maximum.accumulate(order) + 1 - np.arange(len(order))
    assert waiting.max() < 1.2 * shuffle
    assert 0.8 * shuffle < waiting[2000:15_000].mean() < 1.2 * shuffle


def test_the_buffer_mixes_neighbours():
    """Neighbours in a shard leave as far apart as two exponential delays: the buffer's size, less a tenth for the cut."""
    shuffle = 500
    order = np.array(list(LanePlan([Piece(0, 20_000)], shuffle, stream_key(6)).leaving()))
    place = np.argsort(order)
    apart = np.abs(np.diff(place))[2000:15_000].mean()
    assert 0.75 * shuffle < apart < 1.05 * shuffle


@pytest.mark.parametrize("lanes", [1, 2, 3, 5])
def test_every_epoch_has_every_sample_once(lanes):
    order = Order(COUNTS, Layout(lanes, 4, 0))
    for epoch in range(4):
        assert Counter(s for lane in range(lanes) for s in samples_of(order.plan(epoch, lane))) == EVERY_SAMPLE


def test_epochs_seeds_and_lanes_have_orders_of_their_own():
    def whole(seed, epoch):
        return samples_of(Order(COUNTS, Layout(1, 16, seed)).plan(epoch, 0))

    orders = [whole(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert whole(1, 2) == orders[-1]


def test_all_lanes_get_equally_many_shards_in_the_long_run():
    order = Order([10] * 7, Layout(3, 4, 0))
    shards = [sum(len(order.plan(epoch, lane).pieces) for epoch in range(30)) for lane in range(3)]
    assert max(shards) - min(shards) <= 1


def test_resampling_draws_with_replacement_for_ever():
    order = Order(COUNTS, Layout(2, 4, 0), "resampled")
    drawn = Counter(p.shard for epoch in range(300) for lane in (0, 1) for p in order.plan(epoch, lane).pieces)
    assert set(drawn) == {shard for shard, count in enumerate(COUNTS) if count}
    assert max(drawn.values()) < 1.3 * min(drawn.values())
    one_epoch = Counter(p.shard for lane in (0, 1) for p in order.plan(0, lane).pieces)
    assert sum(one_epoch.values()) == 8 and max(one_epoch.values()) > 1


def advance(order, layout, starts, random_state):
    """Lets every lane read some way on from its start; returns the new positions and what was read, by epoch."""
    positions, read = [], Counter()
    for lane, (epoch, n) in enumerate(starts):
        for _ in range(random_state.choice([0, 0, 1, 2])):
            read.update((epoch, s) for s in samples_of(order.plan(epoch, lane), n))
            epoch, n = epoch + 1, 0
        plan = order.plan(epoch, lane)
        end = random_state.randint(n, max(n, plan.size))
        read.update((epoch, s) for s in samples_of(plan, n)[: end - n])
        positions.append((epoch, end))
    return positions, read


@pytest.mark.parametrize("trial", range(25))
def test_changing_lanes_in_mid_epoch_repeats_and_skips_nothing(trial):
    """Over a chain of layouts, each sample of each epoch is read exactly once."""
    random_state = random.Random(trial)
    history, total, epoch = [], Counter(), 0
    for _ in range(3):
        layout = Layout(random_state.randint(1, 6), random_state.choice([1, 3, 20]), random_state.randint(0, 2))
        order = Order(COUNTS, layout, history=history)
        positions, read = advance(order, layout, [(epoch, 0)] * layout.lanes, random_state)
        total += read
        history.append(Past(layout, tuple(positions)))
        epoch = min(e for e, _ in positions)
    last = Order(COUNTS, Layout(2, 5, 9), history=history)
    end = max(past.last_epoch for past in history) + 2
    for lane in range(2):
        for e in range(epoch, end):
            total.update((e, s) for s in samples_of(last.plan(e, lane)))
    assert total == Counter({(e, s): 1 for e in range(end) for s in EVERY_SAMPLE})
