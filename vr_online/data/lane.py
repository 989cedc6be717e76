"""One lane: reads its shards in turn and hands out samples in the order planned for it, for ever."""

from __future__ import annotations

import contextlib
import sys
from typing import Iterator, Optional

import numpy as np

from vr_online.data.order import LanePlan, Order
from vr_online.data.position import Position
from vr_online.data.shard import Expected, Sample, ShardError, read_samples
from vr_online.data.sources import Access, Shard, open_source


SMALL = 32 << 20
"""Bytes of latents up to which a data set is kept in memory by every lane instead of being read each epoch."""


class Lane:
    """Endless reader of one lane's samples, in the order `Order` says.

    Args:
        shards: all shards of the data set, as `order` counts them.
        order, lane: which samples, and when.
        expected: what each sample must look like.
        access: how remote shards may be read.
        skip: skip and count what a broken shard withholds, instead of raising.
    """

    def __init__(self, shards: list[Shard], order: Order, lane: int, expected: Expected, access: Access, skip: bool) -> None:
        self._shards, self._order, self._lane = shards, order, lane
        self._expected, self._access, self._skip = expected, access, skip
        self._total = sum(shard.count for shard in shards)
        self._keep = self._total * expected.nbytes <= SMALL
        self._kept: dict[int, list[Sample]] = {}

    def samples(self, position: Position) -> Iterator[tuple[Sample, Position]]:
        """Yields (sample, position after it) for ever, from `position` on; raises `ShardError`."""
        epoch, n, skipped = position
        in_vain = 0
        while True:
            for sample in self._epoch(self._order.plan(epoch, self._lane), n):
                n += 1
                if sample is not None:
                    in_vain = 0
                    yield sample, (epoch, n, skipped)
                    continue
                skipped, in_vain = skipped + 1, in_vain + 1
                if in_vain > self._total:
                    raise ShardError(
                        f"data.on_error=skip left nothing: lane {self._lane} could not read the last {in_vain} samples, more than "
                        "there are; check the shards with `vr-online shards verify`"
                    )
            epoch, n = epoch + 1, 0

    def _epoch(self, plan: LanePlan, n: int) -> Iterator[Optional[Sample]]:
        """The samples of one epoch after the first n; None for one that could not be read."""
        reading = self._reading(plan, n)
        buffer: dict[int, Sample] = {}
        reached = -1
        for index in plan.leaving(n):
            while reached < index:
                reached, sample = next(reading, (plan.size, None))
                if sample is not None:
                    buffer[reached] = sample
            yield buffer.pop(index, None)
        next(reading, None)  # the last shard's end: its count and end-of-archive mark are checked there

    def _reading(self, plan: LanePlan, n: int) -> Iterator[tuple[int, Sample]]:
        """(index in the lane's epoch, sample) in reading order, without the first n to leave."""
        for piece, start, wanted in zip(plan.pieces, plan.starts.tolist(), plan.wanted(n)):
            if wanted is not None and not wanted.any():
                continue
            offsets = np.arange(piece.count) if piece.offsets is None else piece.offsets
            offsets = offsets if wanted is None else offsets[wanted]
            index = start + (np.arange(piece.size) if wanted is None else np.flatnonzero(wanted))
            index_of = dict(zip(offsets.tolist(), index.tolist()))
            kept = self._kept.get(piece.shard)
            if kept is not None:
                yield from ((i, kept[offset]) for offset, i in index_of.items())
            else:
                yield from self._read_shard(piece.shard, index_of)

    def _read_shard(self, number: int, index_of: dict[int, int]) -> Iterator[tuple[int, Sample]]:
        """(index, sample) of the wanted ordinals of a shard; keeps the samples of a whole shard of a small data set."""
        shard = self._shards[number]
        wanted = None
        if len(index_of) < shard.count:
            wanted = np.zeros(shard.count, dtype=bool)
            wanted[list(index_of)] = True
        read, kept = 0, []
        try:
            with contextlib.closing(open_source(shard.location, self._access)) as source:
                for ordinal, sample in read_samples(source.read, self._expected, shard.location, shard.count, wanted):
                    read += 1
                    if self._keep:
                        kept.append(sample)
                    yield index_of[ordinal], sample
        except ShardError as error:
            if not self._skip:
                raise
            print(f"warning: skipped {len(index_of) - read} samples of a broken shard: {error}", file=sys.stderr, flush=True)
        else:
            if self._keep and wanted is None:
                self._kept[number] = kept
