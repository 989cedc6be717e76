"""Runs a function on several real processes joined by gloo, and returns what each of them returned."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _entry(rank: int, function: Callable, world_size: int, port: int, folder: str, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        result = function(rank, world_size, *args)
        Path(folder, str(rank)).write_bytes(pickle.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # The engines' own groups live on, and a thread of theirs at work while the interpreter ends aborts the process.
    sys.stdout.flush()
    os._exit(0)


def on_ranks(function: Callable, world_size: int, folder, *args) -> list[Any]:
    """`function(rank, world_size, *args)` in `world_size` processes; their results in rank order."""
    mp.spawn(_entry, (function, world_size, _free_port(), str(folder), args), nprocs=world_size)
    return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]
