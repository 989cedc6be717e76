"""`result.json`: one evaluation with everything that decides whether its number may be compared with another."""

from __future__ import annotations

import json
import math
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Iterator

import numpy as np
from PIL import Image

from vr_online.config import EvaluationConfig
from vr_online.errors import UserError
from vr_online.evaluation.precision import uses_tf32
from vr_online.evaluation.statistics import digest
from vr_online.files import write_atomic

TIME_CONVENTION = "t=0 noise, t=1 data"
PACKAGES = ("vr_online", "torch", "numpy", "scipy", "clean-fid", "onnxruntime")

SETTINGS = (
    "n",
    "weights",
    "solver",
    "steps",
    "rtol",
    "atol",
    "diffusion",
    "last_step",
    "last_step_size",
    "cfg",
    "cfg_interval",
    "labels",
    "dtype",
    "features",
    "resize",
    "reference",
    "metrics",
    "seed",
    "batch_size",
)
"""Keys of `evaluation` that a result depends on; the others say when and where it is computed."""

COMPARED = (
    "metric",
    "n",
    "weights",
    "solver",
    "solver_steps",
    "nfe",
    "rtol",
    "atol",
    "diffusion",
    "last_step",
    "last_step_size",
    "cfg",
    "cfg_interval",
    "labels",
    "weights_dtype",
    "features.name",
    "features.hash",
    "features.preprocessing",
    "reference.hash",
    "time",
)
"""Fields of a result that must agree before two of them are ranked; `nfe` only where the solver's steps are fixed."""


def variant(settings: EvaluationConfig, own: EvaluationConfig) -> str:
    """Where a result goes below `evals/<step>`: nowhere further for the run's own settings, else a folder named after them."""
    chosen = {key: getattr(settings, key) for key in SETTINGS if key != "batch_size"}
    if chosen == {key: getattr(own, key) for key in SETTINGS if key != "batch_size"}:
        return ""
    return f"{label(settings)}-{digest(chosen)[:8]}"


def label(settings: EvaluationConfig) -> str:
    """Solver, steps, guidance, n and weights in a few characters, for TensorBoard tags and folder names."""
    steps = "" if settings.solver == "dopri5" else f"-{settings.steps}"
    return f"{settings.solver}{steps}-cfg{settings.cfg:g}-n{settings.n}-{settings.weights}"


def versions() -> dict[str, str]:
    """Versions of the packages a number may depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def sampling_fields(settings: EvaluationConfig) -> dict[str, Any]:
    """The settings of the sampler, those without effect for its solver as null."""
    sde, adaptive = settings.solver == "euler_maruyama", settings.solver == "dopri5"
    return {
        "solver": settings.solver,
        "solver_steps": None if adaptive else settings.steps,
        "rtol": settings.rtol if adaptive else None,
        "atol": settings.atol if adaptive else None,
        "diffusion": settings.diffusion if sde else None,
        "last_step": settings.last_step if sde else None,
        "last_step_size": settings.last_step_size if sde else None,
        "cfg": settings.cfg,
        "cfg_interval": list(settings.cfg_interval) if settings.cfg != 1 else None,
        "labels": settings.labels,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "weights": settings.weights,
    }


def build(measurement: Any, task: Any, origin: Any, flow: Any, *, world_size: int, dtype: Any) -> dict[str, Any]:
    """The contents of `result.json`.

    Args:
        measurement: a `Measurement`.
        task: the `Task` it was measured by.
        origin: the `Origin` of the weights.
        flow: path and prediction of the model.
        dtype: of the weights while sampling.
    """
    settings, extractor, reference = task.settings, task.extractor, task.reference
    return {
        "step": origin.step,
        "images": origin.images,
        "checkpoint": origin.identity,
        "metric": measurement.metric,
        "value": measurement.value,
        "metrics": measurement.metrics,
        "n": measurement.n,
        **sampling_fields(settings),
        "nfe": measurement.nfe,
        "ema": origin.ema if settings.weights == "ema" else None,
        "features": extractor.describe(),
        "resize": extractor.preprocessing.get("resize"),
        "reference": {
            "path": reference.path,
            "hash": reference.hash,
            "n": reference.moments.n,
            "protocol": reference.protocol,
            "preprocessing_hash": reference.meta.get("preprocessing_hash"),
        },
        "path": flow.path.name,
        "prediction": flow.prediction,
        "time": TIME_CONVENTION,
        "codec_hash": task.info.codec_hash,
        "weights_dtype": str(dtype).removeprefix("torch."),
        "tf32": uses_tf32(),
        "versions": versions(),
        "world_size": world_size,
        "wall_s": round(measurement.wall_s, 3),
        "continued": measurement.continued,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes `result.json` aside and renames it; raises `UserError` when it cannot be written."""
    write_atomic(path, json.dumps(result, indent=1), hint="free space and evaluate again, finished samples are kept")


def read(path: Path) -> dict[str, Any]:
    """Reads a result; raises `UserError` when it is damaged."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(result["step"], int) or not isinstance(result["metric"], str) or not math.isfinite(result["value"]):
            raise ValueError("step, metric or value is missing")
        return result
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot read this result ({error}); delete it and evaluate the step again") from None


def has_result(folder: Path, identity: str) -> bool:
    """Whether a folder holds the result of the checkpoint with this identity, and not of another one of the same step.

    A result that cannot be read counts (`read` says what to do about it), and so does one that names no checkpoint.
    """
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    made_from = result.get("checkpoint") if isinstance(result, dict) else None
    return not made_from or made_from == identity


def find_results(run_dir: Path) -> Iterator[dict[str, Any]]:
    """All results of a run, other settings' included, in order of step; each has `file` added."""
    paths = [*run_dir.glob("evals/*/result.json"), *run_dir.glob("evals/*/*/result.json")]
    results = [{**read(path), "file": str(path)} for path in paths]
    return iter(sorted(results, key=lambda result: (result["step"], result["file"])))


def field(result: dict[str, Any], name: str) -> Any:
    """A field by dotted name; None where the result lacks it."""
    value: Any = result
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def publish(run_dir: Path, result: dict[str, Any], settings: EvaluationConfig, grid: Path) -> None:
    """Adds a result to the run's TensorBoard at its step, as the run `eval` beside the training's, and draws figures/fid.png.

    The result is safe on disk by then, so what fails here is only said.
    """
    from tqdm import tqdm

    from vr_online.monitor.monitor import Monitor

    try:
        with Monitor(run_dir, job="eval") as monitor:
            tag = label(settings)
            values = {f"eval/{name}/{tag}": value for name, value in result["metrics"].items()}
            monitor.scalars(result["step"], values, result["images"])
            if grid.exists():
                monitor.images(result["step"], f"eval/samples/{tag}", np.asarray(Image.open(grid).convert("RGB")))
        draw(run_dir)
    except Exception as error:
        tqdm.write(f"{run_dir}: the evaluation of step {result['step']} could not be drawn: {error}")


def draw(run_dir: Path) -> None:
    """Draws figures/fid.png from the run's results."""
    from vr_online.monitor.figures import rasterize
    from vr_online.monitor.grid import save_png
    from vr_online.monitor.run_figures import fid_figure
    from vr_online.monitor.runs import Run as Drawn
    from vr_online.monitor.runs import read_evaluations

    evaluations = read_evaluations(run_dir)
    figure = fid_figure([Drawn(run_dir.name, run_dir, None, None, evaluations)], "images") if evaluations else None
    if figure is not None:
        save_png(run_dir / "figures" / "fid.png", rasterize(figure))
