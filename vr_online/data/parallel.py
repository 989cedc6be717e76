"""Tasks over processes with one progress bar: a crash or an error in any of them ends the whole with a message."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Callable, Optional, Sequence

from tqdm import tqdm

from vr_online.errors import UserError

_POLL_SECONDS = 0.25

# What `_setup` leaves in a worker process: the task's state and the shared progress counter.
_state: Any = None
_counter: Any = None


def run_tasks(
    function: Callable[[Any, Any, Callable[[int], None]], Any],
    tasks: Sequence[Any],
    *,
    setup: Callable[..., Any],
    setup_args: tuple = (),
    devices: Sequence[str] = ("cpu",),
    workers: Optional[int] = None,
    total: int,
    unit: str,
    label: str,
    progress: bool = True,
) -> list[Any]:
    """`function(state, task, advance)` for each task; returns the results in the order of the tasks.

    Args:
        function, setup: picklable; `setup(*setup_args, device)` makes the state once per process.
        workers: processes; None takes one per device, on CPU one per core. One runs in this process.
        total: sum of what the tasks report by `advance(n)`.

    Raises:
        UserError: a task's own, or that a process died.
    """
    if not tasks:
        return []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(workers or (len(devices) if devices[0] != "cpu" else cores), len(tasks))
    with tqdm(total=total, unit=unit, unit_scale=unit == "B", desc=label, disable=not progress, smoothing=0.1) as bar:
        if workers == 1:
            state = setup(*setup_args, devices[0])
            return [function(state, task, bar.update) for task in tasks]
        return _run_pool(function, tasks, setup, setup_args, devices, workers, bar, label)


def _run_pool(
    function: Callable, tasks: Sequence[Any], setup: Callable, setup_args: tuple, devices: Sequence[str], workers: int, bar: tqdm,
    label: str,
) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    counter, seat = context.Value("q", 0), context.Value("q", 0)
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, _setup, (setup, setup_args, list(devices), counter, seat))
    try:
        pending = futures = [pool.submit(_call, function, task) for task in tasks]
        while pending:
            done, pending = wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
            bar.update(counter.value - bar.n)
            for future in done:
                future.result()
        return [future.result() for future in futures]
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise UserError(f"{label}: a worker process died, perhaps for lack of memory; try again with fewer --workers") from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _setup(setup: Callable, setup_args: tuple, devices: Sequence[str], counter: Any, seat: Any) -> None:
    global _state, _counter
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with seat.get_lock():
        device = devices[seat.value % len(devices)]
        seat.value += 1
    _counter = counter
    _state = setup(*setup_args, device)


def _die_with_parent() -> None:
    """A killed parent must not leave workers waiting for ever for its next task."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _call(function: Callable, task: Any) -> Any:
    def advance(count: int) -> None:
        with _counter.get_lock():
            _counter.value += count

    return function(_state, task, advance)
