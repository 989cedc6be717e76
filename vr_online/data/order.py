"""The order of samples, computed on indices alone: no shard is opened to know what comes when.

Shards are permuted by (seed, epoch) and dealt round-robin to lanes; a lane is one reading worker of one
rank. A lane reads its shards one after the other and shuffles through a buffer. In the usual shuffle buffer a
random sample leaves for each that comes, so each waits for a geometrically distributed time. Here that time is
drawn beforehand: sample i of a lane's epoch gets the key

    key_i = max(i, H) + delay_i,     H = shuffle - 1

where delay_i is exponential with mean H, cut at four times its scale, and samples leave in the order of their
keys. A sample can leave only once it was read, since key_i >= i, and about H samples wait at any time. Because
delay_i is a hash of (seed, epoch, lane, i), which samples have left after n is known from a few H keys, without
replaying the n before: that is what makes a resume exact and cheap.

When ranks, workers, buffer or seed change in mid-epoch, `Order` gets a history: the older layouts and how
far each of their lanes was. What was left of every unfinished epoch is dealt to the new lanes, so each
sample still comes once per epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterator, Optional, Sequence

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CUT = 4.0
_KNOTS = 1024
# Quantiles of the cut exponential, rounded so that every machine's logarithm gives the same ones, in units of their mean.
_QUANTILES = np.round(-np.log1p(-np.arange(_KNOTS + 1) / _KNOTS * -np.expm1(-_CUT)) * 2.0**20)
_QUANTILES /= _QUANTILES[:-1].mean() / 2 + _QUANTILES[1:].mean() / 2


def mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014) on uint64 values, elementwise."""
    z = values.astype(np.uint64, copy=True)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def stream_key(*words: int) -> np.uint64:
    """One uint64 from non-negative integers, for streams that must not resemble one another."""
    return np.random.SeedSequence(words).generate_state(1, np.uint64)[0]


@dataclass(frozen=True)
class Layout:
    """What, beside (seed, epoch), decides which lane reads a sample when."""

    lanes: int
    shuffle: int
    seed: int


@dataclass(frozen=True)
class Piece:
    """Samples of one shard that one lane reads in one epoch.

    Args:
        shard: index of the shard.
        count: samples in the shard.
        offsets: their ordinals within it, ascending; None for all.
    """

    shard: int
    count: int
    offsets: Optional[np.ndarray] = None

    @property
    def size(self) -> int:
        return self.count if self.offsets is None else len(self.offsets)

    def keep(self, wanted: np.ndarray) -> "Piece":
        """The part of it where the boolean array `wanted` (size,) is true."""
        offsets = np.arange(self.count) if self.offsets is None else self.offsets
        return Piece(self.shard, self.count, offsets[wanted])


class LanePlan:
    """One lane's epoch: the pieces it reads in turn, and the order in which their samples leave.

    Args:
        pieces: what is read; sample i of the lane's epoch is the i-th in reading order.
        shuffle: samples that wait in the buffer.
        key: stream of the hash u_i.
    """

    def __init__(self, pieces: Sequence[Piece], shuffle: int, key: np.uint64) -> None:
        self.pieces = list(pieces)
        self.starts = np.concatenate([[0], np.cumsum([p.size for p in self.pieces], dtype=np.int64)]).astype(np.int64)
        self.size = int(self.starts[-1])
        self._lead = shuffle - 1
        self._window = self._lead * float(_QUANTILES[-1])
        self._key = key
        self._chunk = max(shuffle, 256)

    def _keys(self, first: int, end: int) -> np.ndarray:
        index = np.arange(first, end, dtype=np.uint64)
        bits = mix(self._key + index * _GOLDEN)
        knot = (bits >> np.uint64(54)).astype(np.int64)
        between = ((bits >> np.uint64(11)) & np.uint64(2**43 - 1)) * 2.0**-43
        delay = _QUANTILES[knot] + between * (_QUANTILES[knot + 1] - _QUANTILES[knot])
        return np.maximum(index.astype(np.float64), self._lead) + self._lead * delay

    def _threshold(self, chunk: int) -> int:
        return self._lead + chunk * self._chunk

    def _lowest(self, threshold: int) -> int:
        """No sample below this one has a key at or above the threshold."""
        return 0 if threshold < self._lead + self._window else min(int(threshold - self._window), self.size)

    def _leaving(self, chunk: int) -> np.ndarray:
        """Samples whose keys lie between two thresholds, in the order of their keys."""
        low, high = self._threshold(chunk), self._threshold(chunk + 1)
        first = self._lowest(low)
        keys = self._keys(first, min(self.size, high))
        inside = np.flatnonzero((keys >= low) & (keys < high))
        return first + inside[np.argsort(keys[inside], kind="stable")]

    def _seek(self, n: int) -> tuple[int, int, np.ndarray]:
        """The chunk that holds the n-th sample to leave, how many left before the chunk, and the chunk itself."""
        chunk = max(0, (n - self._lead) // self._chunk)
        low = self._threshold(chunk)
        first = self._lowest(low)
        before = first + int(np.count_nonzero(self._keys(first, min(self.size, low)) < low))
        leaving = self._leaving(chunk)
        while before + len(leaving) <= n < self.size:
            before += len(leaving)
            chunk += 1
            leaving = self._leaving(chunk)
        return chunk, before, leaving

    def leaving(self, n: int = 0) -> Iterator[int]:
        """Samples in the order they leave, from the n-th (counted from 0) on."""
        if n >= self.size:
            return
        chunk, before, leaving = self._seek(n)
        yield from leaving[n - before :].tolist()
        before += len(leaving)
        while before < self.size:
            chunk += 1
            leaving = self._leaving(chunk)
            yield from leaving.tolist()
            before += len(leaving)

    def left(self, n: int) -> tuple[int, np.ndarray]:
        """Which samples have left after n: all below `first`, and `first + j` where `mask[j]`; none beyond the mask."""
        if n >= self.size:
            return self.size, np.zeros(0, dtype=bool)
        chunk, before, leaving = self._seek(n)
        low = self._threshold(chunk)
        first = self._lowest(low)
        mask = self._keys(first, min(self.size, self._threshold(chunk + 1))) < low
        mask[leaving[: n - before] - first] = True
        return first, mask

    def remaining(self, n: int) -> list[Piece]:
        """The pieces without the n samples that left; a piece of which all left is dropped."""
        first, mask = self.left(n)
        rest = []
        for piece, start in zip(self.pieces, self.starts.tolist()):
            gone = self._gone(start, piece.size, first, mask)
            if gone is None:
                rest.append(piece)
            elif not gone.all():
                rest.append(piece.keep(~gone))
        return rest

    @staticmethod
    def _gone(start: int, size: int, first: int, mask: np.ndarray) -> Optional[np.ndarray]:
        if start >= first + len(mask):
            return None
        gone = np.zeros(size, dtype=bool)
        gone[: max(0, first - start)] = True
        low, high = max(start, first), min(start + size, first + len(mask))
        if high > low:
            gone[low - start : high - start] = mask[low - first : high - first]
        return gone if gone.any() else None

    def wanted(self, n: int) -> list[Optional[np.ndarray]]:
        """For each piece, which of its samples have not left after n, as a boolean array; None for all."""
        first, mask = self.left(n)
        gone = [self._gone(start, piece.size, first, mask) for piece, start in zip(self.pieces, self.starts.tolist())]
        return [None if g is None else ~g for g in gone]


@dataclass(frozen=True)
class Past:
    """A layout that was in use, and where its lanes stood when it was left."""

    layout: Layout
    positions: tuple[tuple[int, int], ...] = field(default=())
    """(epoch, samples that left in it) of each lane."""

    @property
    def last_epoch(self) -> int:
        return max(epoch for epoch, _ in self.positions)


class Order:
    """Which samples each lane reads in each epoch.

    Args:
        counts: samples of each shard, in an order that does not change between runs.
        layout: the lanes in use.
        mode: `permutation` (every sample once per epoch) or `resampled` (a lane's epoch is as many shards,
            drawn with replacement).
        history: earlier layouts, oldest first.
    """

    def __init__(self, counts: Sequence[int], layout: Layout, mode: str = "permutation", history: Sequence[Past] = ()) -> None:
        self.layout, self.mode, self.history = layout, mode, tuple(history)
        self._pieces = [Piece(shard, count) for shard, count in enumerate(counts) if count > 0]

    def plan(self, epoch: int, lane: int) -> LanePlan:
        """The lane's epoch; it may be empty when little was left of an epoch begun under another layout."""
        if self.mode == "resampled":
            pieces = self._draw(epoch, lane)
        else:
            pieces = self._deal(self._left_of(epoch, len(self.history)), self.layout, epoch, lane)
        return self._lane_plan(pieces, self.layout, epoch, lane)

    @staticmethod
    def _lane_plan(pieces: Sequence[Piece], layout: Layout, epoch: int, lane: int) -> LanePlan:
        return LanePlan(pieces, layout.shuffle, stream_key(layout.seed, epoch, lane, 1))

    def _draw(self, epoch: int, lane: int) -> list[Piece]:
        generator = np.random.default_rng([self.layout.seed, epoch, lane, 2])
        share = -(-len(self._pieces) // self.layout.lanes)
        return [self._pieces[i] for i in generator.integers(len(self._pieces), size=share)]

    def _deal(self, pieces: Sequence[Piece], layout: Layout, epoch: int, lane: int) -> list[Piece]:
        """Every lanes-th piece of the permutation. The deal goes on where the epoch before ended, so that in
        the long run all lanes get equally many shards even if their number is no multiple of the lanes."""
        permutation = np.random.default_rng([layout.seed, epoch, 3]).permutation(len(pieces))
        first = (lane - epoch * len(self._pieces)) % layout.lanes
        return [pieces[i] for i in permutation[first :: layout.lanes]]

    def _left_of(self, epoch: int, depth: int) -> Sequence[Piece]:
        """What the `depth` oldest layouts left of an epoch."""
        if depth == 0 or epoch > max(past.last_epoch for past in self.history[:depth]):
            return self._pieces
        past = self.history[depth - 1]
        before = self._left_of(epoch, depth - 1)
        rest: list[Piece] = []
        for lane, (lane_epoch, n) in enumerate(past.positions):
            if lane_epoch <= epoch:
                pieces = self._deal(before, past.layout, epoch, lane)
                rest += pieces if lane_epoch < epoch else self._lane_plan(pieces, past.layout, epoch, lane).remaining(n)
        return sorted(rest, key=lambda piece: piece.shard)
