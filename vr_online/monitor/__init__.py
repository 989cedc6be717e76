"""Metrics, TensorBoard and figures of a run."""

from vr_online.monitor.grid import image_grid, save_png
from vr_online.monitor.monitor import Monitor
from vr_online.monitor.names import bin_scalars, sampler_scalars
from vr_online.monitor.speed import StepTimer, device_peak_tflops, memory_metrics, mfu, peak_tflops, training_flops

__all__ = [
    "Monitor",
    "StepTimer",
    "bin_scalars",
    "device_peak_tflops",
    "image_grid",
    "memory_metrics",
    "mfu",
    "peak_tflops",
    "sampler_scalars",
    "save_png",
    "training_flops",
]
