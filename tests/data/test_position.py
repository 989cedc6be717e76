"""Resuming the stream: exact at equal ranks x workers, nothing lost or repeated at any other number."""

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter

import pytest

from vr_online.data.reader import LatentStream, merge_states
from vr_online.errors import UserError

from tests.data.shards_on_disk import data_config, index_of, write_shards

COUNTS = [7, 3, 5, 9, 4, 6, 8, 2]
SAMPLES = sum(COUNTS)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    return folder, write_shards(folder, COUNTS)


def ranks_of(shards, world_size, workers, batch_size, seed=1, **changes):
    folder, info = shards
    config = data_config(folder, workers=workers, **changes)
    return [LatentStream(config, info, rank=r, world_size=world_size, batch_size=batch_size, seed=seed) for r in range(world_size)]


def steps(streams, n):
    """Indices that each rank receives in each of n steps; the workers are ended."""
    received = [[index_of(next(stream).latent.numpy()) for stream in streams] for _ in range(n)]
    for stream in streams:
        stream.close()
    return received


def merged(streams):
    """The position of all ranks, through JSON and in no particular order."""
    return json.loads(json.dumps(merge_states([stream.state() for stream in reversed(streams)])))


@pytest.mark.parametrize("mode", ["permutation", "resampled"])
@pytest.mark.parametrize("world_size, workers, batch_size", [(1, 0, 5), (1, 1, 4), (1, 3, 2), (2, 0, 3), (2, 2, 4), (3, 1, 7)])
def test_a_resume_is_exact(shards, world_size, workers, batch_size, mode):
    layout = dict(world_size=world_size, workers=workers, batch_size=batch_size, mode=mode)
    whole = steps(ranks_of(shards, **layout), 24)
    for stop in sorted(random.Random(batch_size).sample(range(24), 3)):
        first = ranks_of(shards, **layout)
        before = steps(first, stop)
        second = ranks_of(shards, **layout)
        for stream in second:
            stream.load_state(merged(first))
        assert before + steps(second, 24 - stop) == whole


def test_a_rank_may_load_its_own_position(shards):
    layout = dict(world_size=2, workers=1, batch_size=3)
    whole = steps(ranks_of(shards, **layout), 10)
    first = ranks_of(shards, **layout)
    before = steps(first, 4)
    second = ranks_of(shards, **layout)
    for old, new in zip(first, second):
        new.load_state(old.state())
    assert before + steps(second, 6) == whole


def test_a_closed_stream_goes_on_where_its_caller_was(shards):
    whole = steps(ranks_of(shards, 1, 2, 3), 12)
    streams = ranks_of(shards, 1, 2, 3)
    assert steps(streams, 5) + steps(streams, 7) == whole


def test_the_batch_size_may_change(shards):
    whole = sum((rank for [rank] in steps(ranks_of(shards, 1, 0, 1), 60)), [])
    first = ranks_of(shards, 1, 0, 4)
    before = sum((rank for [rank] in steps(first, 5)), [])
    second = ranks_of(shards, 1, 0, 10)
    second[0].load_state(merged(first))
    assert before + sum((rank for [rank] in steps(second, 4)), []) == whole


def by_epoch(streams, n):
    """(epoch, index) of what all ranks receive in n steps of one sample."""
    received = Counter()
    for _ in range(n):
        for stream in streams:
            batch = next(stream)
            received[batch.position["at"][0], index_of(batch.latent.numpy())[0]] += 1
    for stream in streams:
        stream.close()
    return received


@pytest.mark.parametrize("trial", range(4))
def test_another_number_of_ranks_or_workers_repeats_and_skips_nothing(shards, trial):
    """Through three layouts, buffers and seeds: every sample of every finished epoch came exactly once."""
    generator = random.Random(trial)
    received, position = Counter(), None
    for _ in range(3):
        layout = dict(world_size=generator.randint(1, 3), workers=generator.choice([0, 0, 2]), batch_size=1)
        streams = ranks_of(shards, **layout, shuffle=generator.choice([1, 8, 30]), seed=generator.randint(0, 3))
        for stream in streams:
            if position is not None:
                stream.load_state(position)
        received += by_epoch(streams, generator.randint(5, 40))
        position = merged(streams)
    last = ranks_of(shards, 1, 0, 1)
    last[0].load_state(position)
    received += by_epoch(last, 4 * SAMPLES)
    finished = last[0].state()["lanes"]["0"][0]
    assert finished >= 3
    assert {key: n for key, n in received.items() if key[0] < finished} == {(e, i): 1 for e in range(finished) for i in range(SAMPLES)}


def test_history_is_dropped_once_it_no_longer_matters(shards):
    first = ranks_of(shards, 2, 0, 3)
    steps(first, 4)
    second = ranks_of(shards, 1, 0, 3)
    second[0].load_state(merged(first))
    assert len(second[0].state()["history"]) == 1
    steps(second, 3 * SAMPLES // 3)
    third = ranks_of(shards, 1, 0, 3)
    third[0].load_state(merged(second))
    assert third[0].state()["history"] == []
    assert steps(second, 5) == steps(third, 5)


def test_resampling_at_another_number_of_lanes_goes_on(shards):
    first = ranks_of(shards, 2, 0, 3, mode="resampled")
    steps(first, 4)
    second = ranks_of(shards, 3, 0, 3, mode="resampled")
    for stream in second:
        stream.load_state(merged(first))
    assert steps(second, 5) != steps(ranks_of(shards, 3, 0, 3, mode="resampled"), 5)


class TestRefusals:
    def test_other_shards(self, shards, tmp_path):
        [stream] = ranks_of((tmp_path, write_shards(tmp_path, [5, 5])), 1, 0, 1)
        with pytest.raises(UserError, match="belongs to other shards"):
            stream.load_state(ranks_of(shards, 1, 0, 1)[0].state())

    def test_other_mode(self, shards):
        with pytest.raises(UserError, match="saved with data.mode=resampled, the run has permutation"):
            ranks_of(shards, 1, 0, 1)[0].load_state(ranks_of(shards, 1, 0, 1, mode="resampled")[0].state())

    def test_other_version(self, shards):
        [stream] = ranks_of(shards, 1, 0, 1)
        for state in ({**stream.state(), "version": 99}, {}, None):
            with pytest.raises(UserError, match="this release reads 1"):
                stream.load_state(state)

    def test_some_ranks_missing(self, shards):
        states = [stream.state() for stream in ranks_of(shards, 3, 0, 1)]
        with pytest.raises(UserError, match=r"lacks lanes \[2\] of 3"):
            ranks_of(shards, 2, 0, 1)[0].load_state(merge_states(states[:2]))
        with pytest.raises(UserError, match=r"no lanes \[2\] of rank 2"):
            ranks_of(shards, 3, 0, 1)[2].load_state(states[0])

    def test_merging_what_does_not_belong_together(self, shards):
        one, other = ranks_of(shards, 2, 0, 1)[0].state(), ranks_of(shards, 3, 0, 1)[1].state()
        with pytest.raises(UserError, match="different runs cannot be merged: layout"):
            merge_states([one, other])
        with pytest.raises(UserError, match="two ranks"):
            merge_states([one, one])
        with pytest.raises(UserError, match="no data positions"):
            merge_states([])


def _read_and_log(shards, position, log):
    """What a training process does: receive a batch, note it down with the position after it."""
    [stream] = ranks_of(shards, 1, 2, 3)
    if position is not None:
        stream.load_state(position)
    with open(log, "a") as file:
        for batch in stream:
            file.write(json.dumps({"got": index_of(batch.latent.numpy()), "position": stream.state()}) + "\n")
            file.flush()


def whole_lines(log):
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")] if log.exists() else []


def test_killed_at_random_points_the_stream_is_the_uninterrupted_one(shards, tmp_path):
    """The reading process is killed, workers in mid-batch, and started again from the last position it noted."""
    generator, received, position = random.Random(0), [], None
    context = multiprocessing.get_context("fork")
    for attempt in range(5):
        log = tmp_path / f"{attempt}.jsonl"
        process = context.Process(target=_read_and_log, args=(shards, position, log))
        process.start()
        wanted = generator.randint(1, 40)
        while len(whole_lines(log)) < wanted and process.is_alive():
            time.sleep(0.002)
        assert process.is_alive()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        lines = whole_lines(log)
        received += [line["got"] for line in lines]
        position = lines[-1]["position"]
    assert received == [rank for [rank] in steps(ranks_of(shards, 1, 2, 3), len(received))]
