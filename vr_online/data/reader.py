"""The stream of latents: worker processes that read a rank's lanes, and a position that travels with each batch."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import threading
import time
import warnings
from dataclasses import dataclass
from typing import Any, Iterator, Optional, Sequence, Union

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from vr_online.data.lane import Lane
from vr_online.data.order import Layout, Order, mix, stream_key
from vr_online.data.position import START, Position, fingerprint, merge_states, restore, snapshot
from vr_online.data.shard import DTYPE, Expected, Sample
from vr_online.data.sources import Access, find_shards
from vr_online.errors import UserError

__all__ = ["Batch", "LatentStream", "device_batches", "merge_states"]


@dataclass
class Batch:
    """Samples of one lane.

    Attributes:
        latent: (B, C, H, W), as stored (not normalised): float16, or float32 drawn from posterior moments.
        y: (B,) int64 labels.
        position: the lane, and where it stands after this batch: (epoch, samples that left in it, skipped).
    """

    latent: torch.Tensor
    y: torch.Tensor
    position: dict


class BatchMaker:
    """Turns samples into batches; flips and posterior draws depend on (seed, epoch, key) alone."""

    def __init__(self, expected: Expected, moments: bool, flip: bool, seed: int) -> None:
        self._shape, self._moments, self._flip, self._seed = expected.shape, moments, flip, seed

    def __call__(self, samples: Sequence[Sample], epochs: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents (B, C, H, W) and labels (B,)."""
        latent = np.empty((len(samples), *self._shape), DTYPE)
        both = any(sample.latent.ndim == 4 for sample in samples)
        bits = self._bits(samples, epochs) if both or self._flip or self._moments else None
        for row, sample in enumerate(samples):
            latent[row] = sample.latent[int(bits[row] >> np.uint64(63))] if sample.latent.ndim == 4 else sample.latent
        if self._flip:
            mirrored = (bits >> np.uint64(62)) & np.uint64(1) == 1
            latent[mirrored] = latent[mirrored][..., ::-1]
        if self._moments:
            latent = self._draw(latent, bits)
        return torch.from_numpy(latent), torch.tensor([sample.label for sample in samples], dtype=torch.int64)

    def _bits(self, samples: Sequence[Sample], epochs: Sequence[int]) -> np.ndarray:
        """64 random bits per sample, a function of (seed, epoch, key)."""
        keys = [int.from_bytes(hashlib.blake2b(sample.key.encode(), digest_size=8).digest(), "little") for sample in samples]
        epoch_key = {epoch: stream_key(self._seed, epoch, 4) for epoch in set(epochs)}
        return mix(np.array(keys, np.uint64) ^ np.array([epoch_key[epoch] for epoch in epochs], np.uint64))

    @staticmethod
    def _draw(moments: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """mean + std * noise, float32, from (B, 2C, H, W)."""
        mean, std = np.split(moments.astype(np.float32), 2, axis=1)
        noise = np.empty_like(mean)
        for row, seed in enumerate(bits.tolist()):
            noise[row] = np.random.Generator(np.random.Philox(key=seed)).standard_normal(mean.shape[1:], dtype=np.float32)
        return mean + std * noise


@dataclass
class _Failure:
    """An error's message on its way out of a worker process, which would otherwise arrive wrapped in a traceback."""

    message: str


class _Lanes(IterableDataset):
    """A rank's lanes, one for each worker, as batches."""

    def __init__(self, lanes: Sequence[tuple[int, Lane, Position]], make: BatchMaker, batch_size: int) -> None:
        self._lanes, self._make, self._batch_size = lanes, make, batch_size

    def __iter__(self) -> Iterator[Union[Batch, _Failure]]:
        worker = get_worker_info()
        number, lane, position = self._lanes[0 if worker is None else worker.id]
        try:
            yield from self._batches(number, lane, position)
        except UserError as error:
            yield _Failure(str(error))

    def _batches(self, number: int, lane: Lane, position: Position) -> Iterator[Batch]:
        samples, epochs = [], []
        for sample, position in lane.samples(position):
            samples.append(sample)
            epochs.append(position[0])
            if len(samples) == self._batch_size:
                yield Batch(*self._make(samples, epochs), {"lane": number, "at": list(position)})
                samples, epochs = [], []


class LatentStream:
    """Endless stream of batches of one rank; iterate it, or use `device_batches`.

    Ranks x workers lanes share the shards (`workers: 0` counts as one lane read in this process). Batch k comes
    from worker k modulo workers. Batches are full and cross epochs; each sample comes once per epoch.

    Args:
        config: `DataConfig`.
        info: `DatasetInfo` of the shards.
        rank, world_size: this process among those that share the data.
        batch_size: samples per batch.
        seed: of the order, the flips and the posterior draws.

    Attributes:
        wait_s: seconds the caller has waited for batches so far.
        skipped: samples of broken shards skipped in this rank's lanes so far (`on_error: skip`).

    Raises:
        UserError: at start, fewer shards than lanes, or shards missing; from iteration, a broken shard.
    """

    def __init__(self, config: Any, info: Any, *, rank: int = 0, world_size: int = 1, batch_size: int, seed: int = 0) -> None:
        self._config, self._batch_size, self._rank = config, batch_size, rank
        self._workers = max(1, config.workers)
        self._layout = Layout(world_size * self._workers, config.shuffle, seed)
        self._shards = find_shards(config, info)
        self._check_lanes(world_size)
        self._fingerprint = fingerprint(self._shards)
        self._expected = Expected.of(info)
        self._make = BatchMaker(self._expected, info.moments, config.flip, seed)
        self._history: tuple = ()
        self._positions = {lane: START for lane in self._own_lanes()}
        self._turn = 0
        self._batches: Optional[Iterator] = None
        self.wait_s = 0.0

    def _own_lanes(self) -> range:
        return range(self._rank * self._workers, (self._rank + 1) * self._workers)

    def _check_lanes(self, world_size: int) -> None:
        filled = sum(shard.count > 0 for shard in self._shards)
        if filled >= self._layout.lanes:
            return
        remedy = f"set data.workers to at most {filled // world_size}" if filled >= world_size else "use fewer ranks"
        raise UserError(
            f"data.shards: {filled} shards cannot feed {world_size} ranks x {self._workers} workers = {self._layout.lanes} readers; "
            f"{remedy}, or write more and smaller shards"
        )

    @property
    def skipped(self) -> int:
        return sum(position[2] for position in self._positions.values())

    def state(self) -> dict:
        """The position after the last batch the caller received, JSON-able; see `merge_states` for all ranks."""
        return snapshot(
            self._layout, self._config.mode, self._fingerprint, self._history, self._positions, {self._rank: self._turn}
        )

    def load_state(self, state: dict) -> None:
        """Goes on from a position: this rank's own at equal ranks and workers, or the merged one at any number.

        Raises:
            UserError: the position belongs to other shards or another mode, or is incomplete.
        """
        history, positions, turns = restore(state, self._layout, self._config.mode, self._fingerprint)
        missing = set(self._own_lanes()) - set(positions)
        if missing:
            raise UserError(f"the data position has no lanes {sorted(missing)} of rank {self._rank}: merge the positions of all ranks first")
        self.close()
        self._history = history
        self._positions = {lane: positions[lane] for lane in self._own_lanes()}
        self._turn = turns.get(self._rank, 0)

    def __iter__(self) -> "LatentStream":
        return self

    def __next__(self) -> Batch:
        batch = self.pull()
        self.acknowledge(batch)
        return batch

    def pull(self) -> Batch:
        """The next batch, not yet counted in `state`; for prefetching callers, which `acknowledge` it later."""
        start = time.perf_counter()
        if self._batches is None:
            self._batches = self._start()
        try:
            item = next(self._batches)
        except (RuntimeError, EOFError, OSError) as error:
            if not self._config.workers or (isinstance(error, RuntimeError) and "DataLoader worker" not in str(error)):
                raise
            raise UserError(
                f"a data worker of rank {self._rank} died ({error or type(error).__name__}); if the machine ran out of memory, "
                "lower data.workers, data.prefetch or data.shuffle"
            ) from None
        finally:
            self.wait_s += time.perf_counter() - start
        if isinstance(item, _Failure):
            self.close()
            raise UserError(item.message)
        return item

    def acknowledge(self, batch: Batch) -> None:
        """Counts a pulled batch as received; in the order they were pulled."""
        lane = batch.position["lane"]
        self._positions[lane] = tuple(batch.position["at"])
        self._turn = (lane - self._rank * self._workers + 1) % self._workers

    def _start(self) -> Iterator:
        """Starts the workers, the one whose turn it is first."""
        order = Order([shard.count for shard in self._shards], self._layout, self._config.mode, self._history)
        access, skip = Access.of(self._config), self._config.on_error == "skip"
        first = self._rank * self._workers
        numbers = [first + (self._turn + i) % self._workers for i in range(self._workers)]
        lanes = [
            (number, Lane(self._shards, order, number, self._expected, access, skip), self._positions[number]) for number in numbers
        ]
        workers = self._config.workers
        with _quiet_start():
            loader = DataLoader(
                _Lanes(lanes, self._make, self._batch_size),
                batch_size=None,
                num_workers=workers,
                collate_fn=_unchanged,
                worker_init_fn=_shield,
                prefetch_factor=self._config.prefetch if workers else None,
                generator=torch.Generator(),  # else starting workers would advance the process's own generator
            )
            return iter(loader)

    def close(self) -> None:
        """Ends the workers; iterating again starts them at `state`."""
        self._batches = None

    def __enter__(self) -> "LatentStream":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """Keeps torch from warning about more workers than cores (readers mostly wait), and from raising out of a
    signal handler, anywhere in the program, when a worker dies: `pull` notices within seconds."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGCHLD)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*worker processes in total.*")
        yield
    if main and handler is not None:
        signal.signal(signal.SIGCHLD, handler)


def _shield(_worker: int) -> None:
    """A signal that asks the run to stop often reaches its workers too; they must serve it until it has saved its
    checkpoint. So the first one passes, and the second, which ends a worker that hangs, works."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _unchanged(item: Any) -> Any:
    return item


def device_batches(stream: LatentStream, device: Union[str, torch.device]) -> Iterator[Batch]:
    """The stream's batches on a device, one copied ahead from pinned memory beside the computation on CUDA.

    `stream.state()` counts a batch once it is handed out here.
    """
    device = torch.device(device)
    if device.type != "cuda":
        for batch in stream:
            yield Batch(batch.latent.to(device), batch.y.to(device), batch.position)
        return
    copies = torch.cuda.Stream(device)
    ahead = _copy(stream.pull(), device, copies)
    while True:
        batch, ahead = ahead, _copy(stream.pull(), device, copies)
        current = torch.cuda.current_stream(device)
        current.wait_event(batch.ready)
        for tensor in (batch.latent, batch.y):
            tensor.record_stream(current)  # its memory must not be reused before the computation is through
        stream.acknowledge(batch)
        yield batch


@dataclass
class _Copied(Batch):
    ready: Any = None


def _copy(batch: Batch, device: torch.device, copies: Any) -> _Copied:
    with torch.cuda.stream(copies):
        latent = batch.latent.pin_memory().to(device, non_blocking=True)
        y = batch.y.pin_memory().to(device, non_blocking=True)
        return _Copied(latent, y, batch.position, copies.record_event())
