"""How fast a run goes: step time, share of time waiting for data, MFU, memory.

Nothing here synchronises with the device outside `StepTimer.summary`, which log steps call.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any, Callable, Iterator, Optional

import torch

_GIB = 2**30


class _Stretches:
    """Adds up stretches of a loop, without waiting for the device.

    On CUDA a stretch is the device's, not the host's: it lies between two events on the current stream. Work that
    was queued before it does not count, so that a host that runs ahead of the device adds nothing.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device, self._clock = device, clock
        self._seconds = 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []

    @contextlib.contextmanager
    def stretch(self) -> Iterator[None]:
        start = self._mark()
        try:
            yield
        finally:
            end = self._mark()
            if self._device.type == "cuda":
                self._pairs.append((start, end))
            else:
                self._seconds += end - start

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return self._clock()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def take(self) -> float:
        """Seconds since the last call. On CUDA all work must have ended."""
        seconds, self._seconds = self._seconds, 0.0
        for start, end in self._pairs:
            seconds += start.elapsed_time(end) / 1e3
            self._free += [start, end]
        self._pairs.clear()
        return seconds


class StepTimer:
    """Times steps between two log steps.

        timer = StepTimer(device, batch_size=256)
        for step in ...:
            with timer.wait():
                batch = next(batches)
            ...                                  # forward, backward, optimizer
            timer.step()
            if step % log_every == 0:
                metrics.update(timer.summary())  # the only call that synchronises
            with timer.pause():                  # checkpoints, evaluations: left out of the step time
                ...

    Args:
        device: where the steps run.
        batch_size: images of one optimizer step over all ranks.
        clock: seconds, monotonic; replaced in tests.
    """

    def __init__(
        self, device: torch.device | str, batch_size: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device, self._batch_size, self._clock = torch.device(device), batch_size, clock
        self._waits = _Stretches(self._device, clock)
        self._pauses = _Stretches(self._device, clock)
        self._start, self._steps = clock(), 0

    def wait(self) -> contextlib.AbstractContextManager[None]:
        """Surrounds the call that may wait for data."""
        return self._waits.stretch()

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """Surrounds work that is no part of a step; costs nothing where there is none."""
        return self._pauses.stretch()

    def step(self) -> None:
        """One optimizer step has been issued."""
        self._steps += 1

    def summary(self) -> dict[str, float]:
        """`speed/step_s`, `speed/images_per_s`, `speed/wait_share` since the last call; {} without a step. Resets."""
        if not self._steps:
            return {}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = self._clock()
        elapsed = max(now - self._start - self._pauses.take(), 1e-9)
        result = {
            "speed/step_s": elapsed / self._steps,
            "speed/images_per_s": self._steps * self._batch_size / elapsed,
            "speed/wait_share": min(self._waits.take() / elapsed, 1.0),
        }
        self._start, self._steps = now, 0
        return result


def training_flops(macs_forward_per_image: float) -> float:
    """FLOPs to train on one image: 2 per multiply-accumulate, forward once and backward twice (6 x MACs)."""
    return 6.0 * macs_forward_per_image


def mfu(macs_forward_per_image: float, images_per_s: float, devices: int, peak_tflops: float) -> float:
    """Model FLOPs utilisation: FLOPs the model needs (recomputation not counted) over what the devices could do.

    Args:
        macs_forward_per_image: multiply-accumulates of one forward pass of one image.
        images_per_s: images per second over all devices.
        devices: number of devices.
        peak_tflops: dense peak of one device at the compute precision, in TFLOP/s.
    """
    if devices < 1 or peak_tflops <= 0:
        raise ValueError(f"devices {devices} and peak_tflops {peak_tflops} must be positive")
    return training_flops(macs_forward_per_image) * images_per_s / (devices * peak_tflops * 1e12)


# Part of the name that torch gives a device -> dense (bf16, tf32, fp32) TFLOP/s from the vendors' data sheets.
# The first match counts, so longer names stand before those they contain. One MI250 shows as two devices.
_PEAKS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    ("GB200", (2500, 1250, 80)),
    ("B200", (2250, 1125, 75)),
    ("H100 NVL", (835, 417, 60)),
    ("H100 PCIe", (756, 378, 51)),
    ("H100", (989, 494, 67)),
    ("H800", (989, 494, 67)),
    ("H200", (989, 494, 67)),
    ("GH200", (989, 494, 67)),
    ("H20", (148, 74, 44)),
    ("A100", (312, 156, 19.5)),
    ("A800", (312, 156, 19.5)),
    ("A30", (165, 82, 10.3)),
    ("A40", (150, 75, 37.4)),
    ("A10G", (70, 35, 31.5)),
    ("A10", (125, 62.5, 31.2)),
    ("RTX A6000", (155, 77, 38.7)),
    ("RTX 6000 Ada", (364, 182, 91.1)),
    ("L40S", (362, 183, 91.6)),
    ("L40", (181, 90, 90.5)),
    ("L4", (121, 60, 30.3)),
    ("V100-PCIE", (112, 14, 14)),
    ("V100", (125, 15.7, 15.7)),
    ("T4", (65, 8.1, 8.1)),
    ("RTX 5090", (209, 105, 104.8)),
    ("RTX 4090", (165, 82.6, 82.6)),
    ("RTX 3090", (71, 35.6, 35.6)),
    ("MI325", (1307, 654, 163)),
    ("MI300A", (981, 490, 123)),
    ("MI300", (1307, 654, 163)),
    ("MI250X", (191, 47.9, 47.9)),
    ("MI250", (181, 45.3, 45.3)),
)


def peak_tflops(device_name: str, precision: str, tf32: bool = False) -> Optional[float]:
    """Dense peak of a device by the name torch gives it, in TFLOP/s; None for one not in the table.

    Args:
        device_name: as from `torch.cuda.get_device_name`.
        precision: `bf16` or `fp32`.
        tf32: whether fp32 products run as TF32.
    """
    column = 0 if precision == "bf16" else (1 if tf32 else 2)
    words = device_name.lower()
    return next((float(peaks[column]) for name, peaks in _PEAKS if _contains(words, name.lower())), None)


def _contains(words: str, name: str) -> bool:
    """Whether the name stands in the words with no digit or letter joined to its front, nor a digit to its end."""
    start = words.find(name)
    while start >= 0:
        end = start + len(name)
        before, after = words[start - 1 : start], words[end : end + 1]
        if not before.isalnum() and not after.isdigit():
            return True
        start = words.find(name, start + 1)
    return False


def device_peak_tflops(device: torch.device | str, precision: str) -> Optional[float]:
    """`peak_tflops` of a device of this machine; None on CPU and for unknown devices."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    return peak_tflops(torch.cuda.get_device_name(device), precision, torch.backends.cuda.matmul.allow_tf32)


def memory_metrics(device: torch.device | str) -> dict[str, float]:
    """Peaks so far of this process in GiB: `memory/device_*` on CUDA, `memory/host_peak_gib` everywhere."""
    device = torch.device(device)
    metrics = {}
    if device.type == "cuda":
        metrics["memory/device_peak_gib"] = torch.cuda.max_memory_allocated(device) / _GIB
        metrics["memory/device_reserved_gib"] = torch.cuda.max_memory_reserved(device) / _GIB
    with contextlib.suppress(ImportError):  # Windows has no resource module
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        metrics["memory/host_peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB
    return metrics
