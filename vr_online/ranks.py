"""The processes of one run: starting them, letting them agree, and ending all of them when one fails."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

GRACE_S = 2.0  # how long a failing rank stays so that the others can read why
POLL_S = 0.5


def device_of_rank() -> torch.device:
    """The accelerator of this rank, chosen by LOCAL_RANK, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cpu")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Ranks:
    """Process group of a run: NCCL or gloo for tensors, gloo for what the hosts must agree on.

    Without a launcher (no RANK in the environment) it is a group of one.

    Attributes:
        rank, world_size: of this process.
        device: where this rank computes.
    """

    def __init__(self, timeout_s: float = 1800.0):
        if "RANK" not in os.environ:
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
        self.device = device_of_rank()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        _init_process_group(self.device, timedelta(seconds=timeout_s))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._watch = FailureWatch(self)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank: the same answer on all. Waits for the other hosts, not for devices."""
        value = torch.tensor([flag], dtype=torch.uint8)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._control)
        return bool(value)

    def gather(self, value) -> list:
        """The object of every rank, in rank order, on all ranks."""
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def fail(self, message: str) -> None:
        """Tells the other ranks why this one is about to end; they then end too."""
        self._watch.report(message)

    def failure_elsewhere(self) -> str | None:
        """What another rank failed of, if one did within the last moments."""
        return self._watch.read()

    def close(self) -> None:
        """Ends the group once every rank is here."""
        self.gather(None)
        self._watch.stop()
        # Its threads end with the last reference. One that the interpreter's end finds at work aborts the process.
        self._control = None
        if dist.is_initialized():
            dist.destroy_process_group()


class FailureWatch:
    """A thread per rank that ends it with the reason when another rank has failed.

    A rank that dies leaves the others inside a collective that may never return, and a launcher on another node
    may not notice. Each rank therefore polls a small key-value store of its own connection, which a failing rank
    writes its reason to.
    """

    KEY = "failure"

    def __init__(self, ranks: Ranks):
        self.rank, self._store, self._stopped = ranks.rank, None, threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        if ranks.world_size == 1:
            return
        host = os.environ["MASTER_ADDR"]
        if ranks.rank == 0:
            self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        port = ranks.gather(self._store.port if self._store else None)[0]
        if ranks.rank != 0:
            self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
        self._thread.start()

    def report(self, message: str) -> None:
        if self._store is None or self._stopped.is_set():
            return
        self._stopped.set()
        try:
            self._store.set(self.KEY, f"rank {self.rank}: {message}")
        except RuntimeError:
            return  # the store's host is gone: its end ends the others
        time.sleep(GRACE_S)

    def read(self) -> str | None:
        if self._store is None:
            return None
        try:
            for _ in range(int(GRACE_S / POLL_S)):
                if self._store.check([self.KEY]):
                    return self._store.get(self.KEY).decode()
                time.sleep(POLL_S)
        except RuntimeError:
            return "rank 0 ended without a word (killed, or out of memory?)"
        return None

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=GRACE_S)

    def _poll(self) -> None:
        while not self._stopped.wait(POLL_S):
            try:
                failed = self._store.check([self.KEY])
                message = self._store.get(self.KEY).decode() if failed else None
            except RuntimeError:
                if self._stopped.wait(GRACE_S):
                    return
                failed, message = True, "rank 0 ended without a word (killed, or out of memory?)"
            if failed and not self._stopped.is_set():
                print(f"[rank {self.rank}] stopped because another rank failed: {message}", file=sys.stderr, flush=True)
                os._exit(1)


def _init_process_group(device: torch.device, timeout: timedelta) -> None:
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # the engine's, not ours
    import deepspeed

    # On CPU, DeepSpeed would compile a shared-memory all-reduce at start: minutes, a C++ compiler and ninja, for an
    # operation this trainer does not use. gloo serves.
    for name in list(deepspeed.ops.__compatible_ops__):
        if "shm" in name:
            deepspeed.ops.__compatible_ops__[name] = False
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)
