"""The stream of batches: workers, errors, flips, posterior draws, and what it asks of its caller."""

import os
import signal
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from vr_online.data import lane
from vr_online.data.reader import LatentStream, device_batches
from vr_online.data.shard import ShardError
from vr_online.data.sources import open_source
from vr_online.errors import UserError

from tests.data.shards_on_disk import CLASSES, data_config, index_of, write_shards

COUNTS = [7, 3, 5, 9, 4, 6]
SAMPLES = sum(COUNTS)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    return folder, write_shards(folder, COUNTS)


def stream_of(shards, batch_size=4, *, rank=0, world_size=1, seed=1, **changes):
    folder, info = shards
    return LatentStream(data_config(folder, **changes), info, rank=rank, world_size=world_size, batch_size=batch_size, seed=seed)


def indices(batch):
    return index_of(batch.latent.numpy())


def take(stream, n):
    with stream:
        return [next(stream) for _ in range(n)]


def test_a_batch_is_whole_and_typed(shards):
    for batch in take(stream_of(shards, 5), 20):
        assert batch.latent.shape == (5, 2, 2, 2) and batch.latent.dtype == torch.float16
        assert batch.y.dtype == torch.int64 and batch.y.tolist() == [i % CLASSES for i in indices(batch)]


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_every_epoch_has_the_same_samples_for_any_number_of_workers(shards, workers):
    epochs = defaultdict(Counter)
    for batch in take(stream_of(shards, 1, workers=workers), 4 * SAMPLES):
        epochs[batch.position["at"][0]].update(indices(batch))
    for epoch in range(2):
        assert epochs[epoch] == Counter(range(SAMPLES))


def test_batch_size_and_process_do_not_change_the_order(shards):
    orders = [sum(map(indices, take(stream_of(shards, size, workers=workers), 60 // size)), []) for size, workers in [(1, 0), (4, 1), (5, 0)]]
    assert orders[0] == orders[1] == orders[2]
    assert orders[0][:SAMPLES] != orders[0][SAMPLES:] and sorted(orders[0][:SAMPLES]) == list(range(SAMPLES))


def test_ranks_and_workers_are_lanes_alike(shards):
    """Two ranks of one worker read together what one rank of two workers reads."""
    together = [indices(b) for b in take(stream_of(shards, workers=2), 12)]
    ranks = [[indices(b) for b in take(stream_of(shards, rank=r, world_size=2, workers=1), 6)] for r in range(2)]
    assert together == [batch for pair in zip(*ranks) for batch in pair]


def test_small_data_sets_are_read_once_and_come_out_the_same(shards, monkeypatch):
    kept = [indices(b) for b in take(stream_of(shards), 40)]
    monkeypatch.setattr(lane, "SMALL", 0)
    assert [indices(b) for b in take(stream_of(shards), 40)] == kept
    opened = []
    monkeypatch.setattr(lane, "open_source", lambda location, access: opened.append(location) or open_source(location, access))
    take(stream_of(shards), 40)
    assert len(opened) > 3 * len(COUNTS)
    opened.clear()
    monkeypatch.setattr(lane, "SMALL", 1 << 20)
    take(stream_of(shards), 40)
    assert len(opened) == len(COUNTS)


def test_another_seed_is_another_order(shards):
    assert indices(next(stream_of(shards, 20, seed=1))) != indices(next(stream_of(shards, 20, seed=2)))


def test_reading_leaves_the_global_generators_alone(shards):
    torch.manual_seed(0)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    for workers in (0, 2):
        take(stream_of(shards, workers=workers), 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


def test_resampled_mode_never_ends(shards):
    seen = Counter(sum(map(indices, take(stream_of(shards, 10, mode="resampled"), 300)), []))
    assert set(seen) == set(range(SAMPLES))


def test_waiting_is_measured(shards):
    stream = stream_of(shards, workers=1)
    take(stream, 2)
    assert stream.wait_s > 0


class TestRefusals:
    def test_fewer_shards_than_readers(self, shards):
        with pytest.raises(UserError, match="6 shards cannot feed 2 ranks x 4 workers = 8 readers; set data.workers to at most 3"):
            stream_of(shards, world_size=2, workers=4)
        with pytest.raises(UserError, match="6 shards cannot feed 7 ranks x 1 workers = 7 readers; use fewer ranks"):
            stream_of(shards, world_size=7)

    @pytest.mark.parametrize("workers", [0, 1, 2])
    def test_a_broken_shard_arrives_as_its_message(self, tmp_path, workers):
        """From a worker process too: the same error, without a traceback in its text."""
        info = write_shards(tmp_path, [20, 20])
        tar = tmp_path / "shard-00001.tar"
        data = bytearray(tar.read_bytes())
        data[512 + 130] ^= 0x40
        tar.write_bytes(data)
        stream = stream_of((tmp_path, info), workers=workers)
        with pytest.raises(UserError) as caught:
            take(stream, 100)
        assert str(caught.value).startswith(f"{tar}: the member '00000020.latent.npy' is damaged")
        assert "Traceback" not in str(caught.value)

    def test_a_shard_gone_after_the_start(self, tmp_path):
        stream = stream_of((tmp_path, write_shards(tmp_path, [5, 5])))
        (tmp_path / "shard-00001.tar").unlink()
        with pytest.raises(UserError, match="shard-00001.tar: cannot read the shard: No such file"):
            take(stream, 10)

    def test_a_killed_worker_is_an_error_and_no_hang(self, shards):
        stream = stream_of(shards, workers=2)
        next(stream)
        os.kill(stream._batches._workers[0].pid, signal.SIGKILL)
        with pytest.raises(UserError, match="a data worker of rank 0 died"):
            take(stream, 200)


def test_a_stop_signal_for_the_run_does_not_end_its_workers(shards):
    """They serve the run until it closes the stream; then they are gone."""
    expected = [indices(batch) for batch in take(stream_of(shards), 60)]
    stream = stream_of(shards, workers=1)
    got = [indices(next(stream)) for _ in range(5)]
    [worker] = stream._batches._workers
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid, number)
    got += [indices(next(stream)) for _ in range(55)]
    assert got == expected
    stream.close()
    worker.join(timeout=30)
    assert worker.exitcode is not None


class TestSkipping:
    @pytest.fixture
    def broken(self, tmp_path):
        """Shard 1 is cut inside its third sample, so that nothing tells whether its second is whole."""
        info = write_shards(tmp_path, [6, 8, 6])
        tar = tmp_path / "shard-00001.tar"
        tar.write_bytes(tar.read_bytes()[: 2 * 2048 + 600])
        return tmp_path, info

    @pytest.mark.parametrize("workers", [0, 2])
    def test_whole_samples_are_kept_and_the_rest_counted(self, broken, workers):
        stream = stream_of(broken, 1, workers=workers, on_error="skip")
        epochs = defaultdict(Counter)
        for batch in take(stream, 80):
            epochs[batch.position["at"][0]].update(indices(batch))
        assert epochs[0] == epochs[1] == Counter([*range(7), *range(14, 20)])
        assert stream.skipped >= 2 * 7

    def test_the_shard_is_named(self, broken, capfd):
        take(stream_of(broken, 1, on_error="skip"), 14)
        assert "skipped 7 samples of a broken shard" in capfd.readouterr().err

    def test_a_resume_skips_the_same(self, broken):
        whole = [indices(b) for b in take(stream_of(broken, 3, on_error="skip"), 12)]
        first = stream_of(broken, 3, on_error="skip")
        start = [indices(b) for b in take(first, 5)]
        second = stream_of(broken, 3, on_error="skip")
        second.load_state(first.state())
        assert start + [indices(b) for b in take(second, 7)] == whole
        assert second.skipped > 0

    def test_nothing_left_is_an_error(self, tmp_path):
        info = write_shards(tmp_path, [3, 3])
        for tar in tmp_path.glob("*.tar"):
            tar.write_bytes(b"\1" * 4096)
        with pytest.raises(UserError, match="skip left nothing"):
            take(stream_of((tmp_path, info), on_error="skip"), 1)


class TestFlip:
    @staticmethod
    def mirrored(shards, workers=0, epochs=2, **options):
        """(epoch, index) -> whether it came mirrored."""
        found = {}
        for batch in take(stream_of(shards, 1, flip=True, workers=workers, **options), epochs * SAMPLES):
            index, mirror = sorted(batch.latent[0, 0, 0].tolist()), batch.latent[0, 1, 1].tolist()
            assert mirror in ([1, 2], [2, 1])
            found[batch.position["at"][0], index[-1]] = mirror == [2, 1]
        return found

    def test_half_are_mirrored_and_it_depends_on_seed_epoch_and_key_alone(self, shards):
        one, two = self.mirrored(shards), self.mirrored(shards, workers=2)
        shared = set(one) & set(two)
        assert len(shared) > SAMPLES and all(one[k] == two[k] for k in shared)
        assert 0.3 < np.mean(list(one.values())) < 0.7
        assert any(one[0, i] != one[1, i] for i in range(SAMPLES))
        assert any(one[k] != other for k, other in self.mirrored(shards, seed=5).items())

    def test_off_means_off(self, shards):
        assert all(batch.latent[:, 1, 1].tolist() == [[1, 2]] * 4 for batch in take(stream_of(shards), 20))


class TestMoments:
    @pytest.fixture(scope="class")
    def stored(self, tmp_path_factory):
        """Mean: the sample's index in channel 0, 0 elsewhere; standard deviation: 0 in channel 2, 3 at one corner of channel 3."""
        folder = tmp_path_factory.mktemp("moments")
        return folder, write_shards(folder, [200, 200], moments=True)

    def draws(self, stored, workers=0, n=400):
        drawn = {}
        for batch in take(stream_of(stored, 1, workers=workers), n):
            key = batch.position["at"][0], int(1000 * batch.latent[0, 0, 0, 0] + batch.latent[0, 0, 0, 1])
            drawn[key] = batch.latent
        return drawn

    def test_draws_are_mean_plus_std_times_noise(self, stored, monkeypatch):
        batch = next(stream_of(stored, 400))
        assert batch.latent.shape == (400, 2, 2, 2) and batch.latent.dtype == torch.float32
        assert sorted(index_of(batch.latent.numpy())) == list(range(400))  # where std is 0, the mean itself

    def test_draws_depend_on_seed_epoch_and_key_alone(self, stored):
        one, two = self.draws(stored, n=500), self.draws(stored, workers=2, n=400)
        shared = set(one) & set(two)
        assert len(shared) > 300 and all(torch.equal(one[k], two[k]) for k in shared)


def test_posterior_draws_have_the_stored_mean_and_std():
    from vr_online.data.reader import BatchMaker
    from vr_online.data.shard import Expected, Sample

    moments = np.concatenate([np.full((1, 4, 4), 2.0), np.full((1, 4, 4), 0.5)]).astype(np.float16)
    samples = [Sample(str(i), moments, 0) for i in range(500)]
    make = BatchMaker(Expected((2, 4, 4), 1), True, False, 0)
    latent, _ = make(samples, [0] * 500)
    assert abs(latent.mean() - 2) < 0.03 and abs(latent.std() - 0.5) < 0.03
    assert not torch.equal(latent, make(samples, [1] * 500)[0])
    assert len(torch.unique(latent[:, 0, 0, 0])) == 500


def test_device_batches_count_what_was_handed_out(shards):
    direct, copied = stream_of(shards, workers=1), stream_of(shards, workers=1)
    batches = device_batches(copied, "cpu")
    for _ in range(5):
        expected, got = next(direct), next(batches)
        assert torch.equal(expected.latent, got.latent) and torch.equal(expected.y, got.y)
        assert copied.state() == direct.state()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_batches_on_cuda(shards):
    direct, copied = stream_of(shards, workers=1), stream_of(shards, workers=1)
    batches = device_batches(copied, "cuda")
    for _ in range(20):
        expected, got = next(direct), next(batches)
        assert got.latent.is_cuda and torch.equal(expected.latent, got.latent.cpu()) and torch.equal(expected.y, got.y.cpu())
        assert copied.state() == direct.state()


def test_shard_error_is_what_callers_catch():
    assert issubclass(ShardError, UserError)


def test_streaming_over_http(shards, tmp_path):
    """The same batches as from the folder, `dataset.json` included, from a server that drops every other connection."""
    import functools
    import http.server
    import threading

    from vr_online.data import sources
    from vr_online.data.format import DatasetInfo

    class Handler(http.server.SimpleHTTPRequestHandler):
        requests = 0

        def log_message(self, *_):
            pass

        def copyfile(self, source, outputfile):
            Handler.requests += 1
            data = source.read()
            outputfile.write(data[: len(data) // 2] if Handler.requests % 2 else data)

    folder, _ = shards
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        info = DatasetInfo.load(url)
        remote = LatentStream(data_config(folder, shards=url, workers=1, retries=3), info, batch_size=4, seed=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources, "BACKOFF", 0.001)
            got = [indices(batch) for batch in take(remote, 20)]
    finally:
        server.shutdown()
        server.server_close()
    assert got == [indices(batch) for batch in take(stream_of(shards), 20)]
    assert Handler.requests > len(COUNTS)


def test_damage_never_reaches_a_batch_unnoticed(tmp_path):
    """Shards damaged at random: the stream stops with the shard's name, or every sample it gives is a true one."""
    import random

    clean = tmp_path / "clean"
    info = write_shards(clean, [6, 6])
    true = {index_of(b.latent.numpy())[0]: (b.latent[0].numpy().tobytes(), int(b.y)) for b in take(stream_of((clean, info), 1), 12)}
    data, generator, stopped = (clean / "shard-00001.tar").read_bytes(), random.Random(3), 0
    for _ in range(200):
        damaged = bytearray(data)
        place = generator.randrange(len(data))
        damaged[place : place + 4] = generator.randbytes(4)
        (clean / "shard-00001.tar").write_bytes(damaged[: generator.choice([len(data), len(data), place])])
        try:
            for batch in take(stream_of((clean, info), 1), 12):
                assert true[indices(batch)[0]] == (batch.latent[0].numpy().tobytes(), int(batch.y))
        except UserError as error:
            assert "shard-00001.tar" in str(error)
            stopped += 1
    assert stopped > 80
