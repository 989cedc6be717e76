"""The data position as a JSON-able value: taken per rank, merged over ranks, restored at any number of lanes.

A position holds the layout it belongs to (lanes, buffer, seed) and, for each lane, (epoch, samples that left
in it, samples skipped). Restored under the same layout, each lane goes on exactly there. Under another one the
old layout becomes history (`vr_online.data.order`): every unfinished epoch's rest is dealt to the new lanes, so
no sample is repeated and none is missed.
"""

from __future__ import annotations

import hashlib
from typing import Any, Sequence

from vr_online.data.order import Layout, Past
from vr_online.data.sources import Shard
from vr_online.errors import UserError

VERSION = 1
Position = tuple[int, int, int]
"""(epoch, samples that left in it, samples skipped so far) of a lane."""
START: Position = (0, 0, 0)


def fingerprint(shards: Sequence[Shard]) -> str:
    """Identifies the set of shards by their names and counts; where they lie may change."""
    text = "\n".join(f"{shard.name} {shard.count}" for shard in shards)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def snapshot(layout: Layout, mode: str, shards: str, history: Sequence[Past], lanes: dict[int, Position], turns: dict[int, int]) -> dict:
    """A position as a value.

    Args:
        layout, mode, history: how the order is made.
        shards: their fingerprint.
        lanes: position of each lane known here.
        turns: for each rank known here, the worker whose batch comes next.
    """
    return {
        "version": VERSION,
        "mode": mode,
        "shards": shards,
        "layout": _layout_value(layout),
        "history": [{"layout": _layout_value(p.layout), "positions": [list(x) for x in p.positions]} for p in history],
        "lanes": {str(lane): list(position) for lane, position in sorted(lanes.items())},
        "turns": {str(rank): turn for rank, turn in sorted(turns.items())},
    }


def _layout_value(layout: Layout) -> dict:
    return {"lanes": layout.lanes, "shuffle": layout.shuffle, "seed": layout.seed}


def merge_states(states: Sequence[dict]) -> dict:
    """The positions of all ranks as one, in any order of ranks.

    Raises:
        UserError: they are not of one run, or two ranks claim a lane.
    """
    if not states:
        raise UserError("no data positions to merge")
    merged = {**states[0], "lanes": {}, "turns": {}}
    for state in states:
        for key in ("version", "mode", "shards", "layout", "history"):
            if state[key] != merged[key]:
                raise UserError(f"data positions of different runs cannot be merged: {key} is {state[key]!r} and {merged[key]!r}")
        for key in ("lanes", "turns"):
            twice = set(state[key]) & set(merged[key])
            if twice:
                raise UserError(f"two ranks have the data position of {key} {', '.join(sorted(twice))}")
            merged[key].update(state[key])
    return merged


def restore(state: dict, layout: Layout, mode: str, shards: str) -> tuple[tuple[Past, ...], dict[int, Position], dict[int, int]]:
    """History, lane positions and turns for `layout`, from the (merged) position of any layout.

    Raises:
        UserError: written by another version, for other shards or another mode, or by only some of the ranks.
    """
    _check(state, mode, shards)
    old = Layout(**state["layout"])
    history = tuple(Past(Layout(**p["layout"]), tuple(tuple(x) for x in p["positions"])) for p in state["history"])
    lanes: dict[int, Position] = {int(lane): tuple(position) for lane, position in state["lanes"].items()}
    if old == layout:
        turns = {int(rank): turn for rank, turn in state["turns"].items()}
        return _relevant(history, lanes, layout), lanes, turns
    missing = set(range(old.lanes)) - set(lanes)
    if missing:
        raise UserError(f"the data position lacks lanes {sorted(missing)} of {old.lanes}: merge the positions of all ranks first")
    skipped = sum(position[2] for position in lanes.values())
    past = Past(old, tuple(lanes[lane][:2] for lane in range(old.lanes)))
    if mode == "resampled":
        history, epoch = (), past.last_epoch + 1
    else:
        history, epoch = (*history, past), min(epoch for epoch, _ in past.positions)
    positions = {lane: (epoch, 0, skipped if lane == 0 else 0) for lane in range(layout.lanes)}
    return _relevant(history, positions, layout), positions, {}


def _relevant(history: tuple[Past, ...], lanes: dict[int, Position], layout: Layout) -> tuple[Past, ...]:
    """Drops the layouts that no lane's epoch goes back to; a lane not known here may still be anywhere."""
    if len(lanes) < layout.lanes:
        return history
    first = min(epoch for epoch, _, _ in lanes.values())
    return tuple(past for past in history if past.last_epoch >= first)


def _check(state: Any, mode: str, shards: str) -> None:
    if not isinstance(state, dict) or state.get("version") != VERSION:
        found = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise UserError(f"the data position has version {found!r}, this release reads {VERSION}")
    if state["mode"] != mode:
        raise UserError(f"the data position was saved with data.mode={state['mode']}, the run has {mode}; keep the mode when resuming")
    if state["shards"] != shards:
        raise UserError(
            f"the data position belongs to other shards (fingerprint {state['shards']}, here {shards}): their names or counts "
            "changed. Restore the shards or dataset.json, or start a new run from the weights with model.init"
        )
