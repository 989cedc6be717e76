"""The ranks an evaluation is spread over: a few collectives on CPU values, or none for one process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed as dist

from vr_online.errors import UserError


class Group:
    """Ranks that evaluate together.

    Everything exchanged is small and on the CPU, through gloo, whatever backend the training uses. Ranks meet
    after every batch of samples, so no rank ever waits for another longer than a batch takes.

    Args:
        group: a gloo process group, or None for a single process.
    """

    def __init__(self, group: Optional[dist.ProcessGroup] = None):
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1

    @classmethod
    def current(cls, timeout_s: float = 1800) -> "Group":
        """All ranks of the initialised default process group, or this process alone. All ranks must call it."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        return cls(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replaces a CPU tensor by its sum over ranks."""
        if self._group is not None:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on all ranks."""
        if self._group is None:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather_to_main(self, value: Any) -> list[Any]:
        """Every rank's value on the main rank, an empty list on the others: for values too large to be everywhere."""
        if self._group is None:
            return [value]
        values = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, values, dst=dist.get_global_rank(self._group, 0), group=self._group)
        return values or []

    def from_main(self, value: Any) -> Any:
        """The main rank's value, on all ranks."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self._group, 0), group=self._group)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.sum_(torch.tensor([int(flag)]))) if self._group is not None else flag

    def raise_together(self, error: Optional[BaseException]) -> None:
        """Raises on every rank when a rank has an error: its own there, a `UserError` that quotes it elsewhere.

        All ranks call it at the same places, so none is left waiting for one that gave up.
        """
        if not self.any(error is not None):
            return
        told = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        raise UserError("; ".join(f"rank {rank} failed with {text}" for rank, text in enumerate(told) if text))
