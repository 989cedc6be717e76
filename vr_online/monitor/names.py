"""Every metric's name, unit and meaning, in one place.

`metrics.jsonl`, TensorBoard and the figures use these names. A name is `group/metric`; a value per
time bin is `bins/<quantity>/<bin>`, with the bin as two digits (more where there are 100 bins or more).
"""

from __future__ import annotations

from typing import Mapping, NamedTuple

import numpy as np


class Metric(NamedTuple):
    """Unit (empty for a pure number) and meaning of one name."""

    unit: str
    meaning: str


SCALARS: dict[str, Metric] = {
    "train/loss": Metric("", "weighted loss of the steps since the last line, mean over all ranks: the objective"),
    "train/grad_norm": Metric("", "norm of the whole gradient before clipping"),
    "train/lr": Metric("", "learning rate of the step"),
    "train/skipped_steps": Metric("steps", "steps skipped so far because a gradient was not finite"),
    "train/epoch": Metric("epochs", "images seen over the size of the data set"),
    "speed/images_per_s": Metric("images/s", "images of all ranks per second, pauses left out"),
    "speed/step_s": Metric("s", "time of one optimizer step, pauses left out"),
    "speed/wait_share": Metric("", "share of the time in which the device stood still for want of data"),
    "speed/mfu": Metric("", "model FLOPs (6 x MACs) over what the devices could do"),
    "memory/device_peak_gib": Metric("GiB", "most device memory that tensors of this rank took at once"),
    "memory/device_reserved_gib": Metric("GiB", "most device memory that the allocator of this rank held"),
    "memory/host_peak_gib": Metric("GiB", "largest resident set of this rank's process"),
    "sampler/gain": Metric("", "predicted gradient variance, proposal over target; below 1 the adaptation pays"),
    "sampler/achieved": Metric("", "the same ratio measured from live weighted sketches"),
    "sampler/achieved_error": Metric("", "standard error of sampler/achieved"),
    "sampler/achieved_low": Metric("", "sampler/achieved less two standard errors"),
    "sampler/achieved_high": Metric("", "sampler/achieved plus two standard errors"),
    "sampler/ess": Metric("", "effective sample size of the weights, as a share of the samples"),
    "sampler/weight_max": Metric("", "largest importance weight of the proposal; never above 1 / floor"),
    "sampler/best_gain": Metric("", "least gain that any unbiased proposal could have"),
    "sampler/can_pay": Metric("", "1 where best_gain is worth adapting for, 0 where it is not"),
    "sampler/ready": Metric("", "1 once every bin has the effective samples that the warm-up asks for"),
    "sampler/n_eff_min": Metric("samples", "effective samples of the bin that has fewest"),
    "sampler/nonfinite": Metric("samples", "samples so far left out because their loss or gradient was not finite"),
    "sampler/bytes_per_step": Metric("bytes", "statistics that each rank sends a step"),
    "sampler/age_max": Metric("images", "images since the bin waiting longest was visited"),
}

BINS: dict[str, Metric] = {
    "p": Metric("", "proposal: probability of drawing t in the bin"),
    "q": Metric("", "target: weight of the bin in the objective; sums to 1"),
    "weight": Metric("", "importance weight"),
    "grad_var": Metric("", "within-bin variance of the per-sample parameter gradient"),
    "grad_sq": Metric("", "second moment of the per-sample parameter gradient"),
    "signal": Metric("", "squared norm of the bin's mean gradient"),
    "loss": Metric("", "mean unweighted loss"),
    "loss_sq": Metric("", "mean squared unweighted loss"),
    "visits": Metric("samples", "samples drawn so far"),
    "n_eff": Metric("samples", "effective samples behind the estimates"),
    "age": Metric("images", "images since the last visit"),
    "nonfinite": Metric("samples", "samples left out because they were not finite"),
}

# Quantities that also get one TensorBoard curve per bin; the others live in bins.jsonl and the figures.
CURVES = ("loss", "grad_var", "grad_sq", "p")


def bin_name(quantity: str, index: int, bins: int) -> str:
    """`bins/<quantity>/<index>`, padded so that names sort by time."""
    return f"bins/{quantity}/{index:0{max(2, len(str(bins - 1)))}d}"


def bin_scalars(snapshot: Mapping[str, np.ndarray], quantities: tuple[str, ...] = ("loss",)) -> dict[str, float]:
    """One named scalar per bin for each of the quantities that the snapshot holds, arrays of shape (K,)."""
    named: dict[str, float] = {}
    for quantity in quantities:
        values = np.asarray(snapshot.get(quantity, ()), dtype=np.float64).reshape(-1)
        named.update({bin_name(quantity, i, len(values)): float(v) for i, v in enumerate(values)})
    return named


def sampler_scalars(metrics: Mapping[str, float]) -> dict[str, float]:
    """The sampler's own numbers under their names here (`gain` becomes `sampler/gain`)."""
    return {f"sampler/{name}": value for name, value in metrics.items()}


def custom_scalar_layout() -> dict:
    """Charts for TensorBoard's Custom Scalars page: the adaptation on one page, the health of the run on another."""
    return {
        "adaptation": {
            "loss": ["Multiline", ["train/loss"]],
            "gain: predicted (below 1 adapting pays) and achieved": [
                "Multiline",
                ["sampler/gain", "sampler/best_gain", "sampler/achieved$"],
            ],
            "achieved variance ratio, two standard errors": [
                "Margin",
                ["sampler/achieved", "sampler/achieved_low", "sampler/achieved_high"],
            ],
            "weights: effective sample share": ["Multiline", ["sampler/ess"]],
            "weights: largest": ["Multiline", ["sampler/weight_max"]],
            "gradient variance per bin": ["Multiline", ["bins/grad_var/.*"]],
            "gradient second moment per bin": ["Multiline", ["bins/grad_sq/.*"]],
            "proposal per bin": ["Multiline", ["bins/p/.*"]],
            "loss per bin": ["Multiline", ["bins/loss/.*"]],
            "longest unvisited bin (images)": ["Multiline", ["sampler/age_max"]],
        },
        "health": {
            "gradient norm": ["Multiline", ["train/grad_norm"]],
            "skipped steps": ["Multiline", ["train/skipped_steps"]],
            "images/s": ["Multiline", ["speed/images_per_s"]],
            "share of time waiting for data": ["Multiline", ["speed/wait_share"]],
            "model FLOPs utilisation": ["Multiline", ["speed/mfu"]],
            "memory (GiB)": ["Multiline", ["memory/.*"]],
        },
    }


def markdown_table() -> str:
    """All names with units and meanings, as a Markdown table."""
    rows = ["| name | unit | meaning |", "| --- | --- | --- |"]
    rows += [f"| `{name}` | {m.unit} | {m.meaning} |" for name, m in SCALARS.items()]
    rows += [f"| `bins/{name}/<bin>` | {m.unit} | {m.meaning} |" for name, m in BINS.items()]
    return "\n".join(rows)
