"""One of several processes that measure together; writes its measurements as JSON. Run by test_measure.py."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Optional

import torch
import torch.distributed as dist

from tests.evaluation.fakes import Identity, Noise, reference
from vr_online.errors import UserError
from vr_online.evaluation.group import Group
from vr_online.evaluation.measure import measure


def told(n: int, fail_at: Optional[int]) -> dict:
    generate = Noise(fail_at=fail_at)
    try:
        found = measure(
            generate,
            Identity(),
            reference(),
            n=n,
            batch_size=16,
            metrics=("fd", "kid", "is", "pr"),
            group=Group.current(60),
            progress=False,
        )
        return {**dataclasses.asdict(found), "asked": generate.asked}
    except UserError as error:
        return {"error": str(error)}


def main(folder: str, rank: int, world_size: int, n: int, fail_at: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    both = {"whole": told(n, None), "failing": told(n, fail_at if rank == 1 else None)}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(both))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], *map(int, sys.argv[2:]))
