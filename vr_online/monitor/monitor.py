"""Where a run's numbers go: `metrics.jsonl`, `bins.jsonl` and TensorBoard, under the same names."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional

import numpy as np

from vr_online.monitor import figures, names
from vr_online.monitor.records import append_record, read_records, truncate_records

METRICS_FILE = "metrics.jsonl"
BINS_FILE = "bins.jsonl"
TENSORBOARD = "tensorboard"

_DIGITS = 6  # significant digits of the per-bin arrays
_HISTORY = 256  # snapshots the heat maps of TensorBoard are drawn from
_FIGURE_SHARE = 0.01  # most of the time of a run that drawing may take


class Monitor:
    """Writes metrics, per-bin arrays, images, figures and text of one run.

    Monitoring never ends a run: a write that fails (a full disk) warns once per file and is dropped.

    Args:
        run_dir: the run's directory; made if missing.
        config: the run's `Config`, shown in TensorBoard as text.
        enabled: False makes every call do nothing (ranks other than 0).
        resume_step: the step of the checkpoint that the run continues from; later lines are dropped. None
            starts afresh: what is there is kept as `*.previous.jsonl` and TensorBoard hides its points.
        job: name of another process (an evaluation) that adds to a run which may be training. It writes only
            TensorBoard, as a run of its own under `tensorboard/<job>`, and drops nothing.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: Any = None,
        enabled: bool = True,
        resume_step: Optional[int] = None,
        job: Optional[str] = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.enabled = enabled
        self._writer = None
        self._job = job
        self._images: Optional[int] = None
        self._failed: set[str] = set()
        self._history: list[dict[str, Any]] = []
        self._last: dict[str, Any] = {}
        self._stride, self._seen = 1, 0
        self._drawn_at, self._draw_cost, self._undrawn = 0.0, 0.0, False
        if enabled:
            self._open(config, resume_step)

    def _open(self, config: Any, resume_step: Optional[int]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second to import; ranks other than 0 never do

        folder = self.run_dir / TENSORBOARD
        purge = None
        if self._job:
            folder = folder / self._job
        else:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._prepare_files(resume_step)
            purge = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=20)
        _one_line_for_a_full_disk()
        if not self._job:
            self._writer.add_custom_scalars(names.custom_scalar_layout())
        if config is not None:
            from vr_online.config import dump

            self.text("config", f"```yaml\n{dump(config)}```")

    def _prepare_files(self, resume_step: Optional[int]) -> None:
        for name in (METRICS_FILE, BINS_FILE):
            path = self.run_dir / name
            if resume_step is not None:
                truncate_records(path, resume_step)
            elif path.exists():
                path.replace(path.with_name(path.stem + ".previous.jsonl"))
        bins = self.run_dir / BINS_FILE
        if bins.exists() and bins.stat().st_size:
            for record in read_records(bins):
                self._remember(record)

    @contextlib.contextmanager
    def _guard(self, what: str, errors: type[Exception] = OSError) -> Iterator[None]:
        try:
            yield
        except errors as error:
            if what not in self._failed:
                self._failed.add(what)
                warnings.warn(f"{what}: cannot write metrics ({error}); training goes on without them", stacklevel=3)

    def log(
        self,
        step: int,
        values: Mapping[str, float],
        snapshot: Optional[Mapping[str, np.ndarray]] = None,
        images: Optional[int] = None,
    ) -> None:
        """One log step: scalars and, from the sampler's snapshot, per-bin losses in the same line and `bins`."""
        per_bin = names.bin_scalars({"loss": _rounded(snapshot["loss"])}) if snapshot and "loss" in snapshot else {}
        self.scalars(step, {**values, **per_bin}, images)
        if snapshot:
            self.bins(step, snapshot)

    def scalars(self, step: int, values: Mapping[str, float], images: Optional[int] = None) -> None:
        """Appends one line `{"step", "images", "time", name: value, ...}` and a TensorBoard point per name.

        Args:
            step: optimizer steps done.
            values: by name; numbers or one-element tensors. `sampler/achieved` with `_error` gains `_low` and `_high`.
            images: images seen; kept for later `bins` of the same step.
        """
        if not self.enabled:
            return
        self._images = images if images is not None else values.get("images")
        numbers = {name: float(value) for name, value in values.items() if name != "images" and value is not None}
        numbers.update(_error_bar(numbers))
        if not self._job:
            self._append(METRICS_FILE, step, numbers)
        with self._guard(TENSORBOARD):
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)

    def _append(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        record = {"step": int(step), "images": self._images, "time": round(time.time(), 3), **values}
        with self._guard(str(self.run_dir / name)):
            append_record(self.run_dir / name, record)

    def last_line(self) -> dict[str, Any]:
        """The newest line of `metrics.jsonl`; {} where there is none."""
        path = self.run_dir / METRICS_FILE
        lines = read_records(path) if self.enabled and path.exists() and path.stat().st_size else []
        return lines[-1] if lines else {}

    def bins(self, step: int, snapshot: Mapping[str, np.ndarray]) -> None:
        """Appends the snapshot's (K,) arrays to `bins.jsonl`; curves, and from time to time figures, to TensorBoard."""
        if not self.enabled or not snapshot:
            return
        bins = min(len(value) for value in snapshot.values())  # bin edges, one longer, are no per-bin array
        arrays = {name: _rounded(value) for name, value in snapshot.items() if np.shape(value) == (bins,)}
        if not self._job:
            self._append(BINS_FILE, step, arrays)
        with self._guard(TENSORBOARD):
            for name, value in names.bin_scalars(arrays, names.CURVES).items():
                self._writer.add_scalar(name, value, step)
        self._remember({"step": int(step), "images": self._images, **arrays})
        self._undrawn = True
        if time.monotonic() - self._drawn_at >= self._draw_cost / _FIGURE_SHARE:
            self._draw(step)

    def _remember(self, record: dict[str, Any]) -> None:
        """Keeps at most `_HISTORY` snapshots, evenly spaced over the run."""
        if self._seen % self._stride == 0:
            self._history.append(record)
        self._last = record
        self._seen += 1
        if len(self._history) > _HISTORY:
            self._history = self._history[::2]
            self._stride *= 2

    def _draw(self, step: int) -> None:
        start = time.monotonic()
        history = self._history if self._history[-1] is self._last else self._history + [self._last]
        with self._guard("figures", Exception):  # whatever goes wrong in a picture, the run is worth more
            for tag, figure in figures.tensorboard_figures(history).items():
                self.figure(step, tag, figure)
        self._drawn_at, self._undrawn = time.monotonic(), False
        self._draw_cost = self._drawn_at - start

    def images(self, step: int, tag: str, image: np.ndarray) -> None:
        """Shows one (H, W, 3) uint8 image, such as a grid."""
        if self.enabled:
            with self._guard(TENSORBOARD):
                self._writer.add_image(tag, np.asarray(image), step, dataformats="HWC")

    def figure(self, step: int, tag: str, figure: Any) -> None:
        """Shows a matplotlib figure and closes it."""
        if self.enabled:
            with self._guard(TENSORBOARD):
                self._writer.add_image(tag, figures.rasterize(figure), step, dataformats="HWC")

    def text(self, tag: str, markdown: str, step: int = 0) -> None:
        """Shows Markdown."""
        if self.enabled:
            with self._guard(TENSORBOARD):
                self._writer.add_text(tag, markdown, step)

    def flush(self) -> None:
        """Hands everything to the file system, as before a checkpoint."""
        if self.enabled and self._writer is not None:
            with self._guard(TENSORBOARD):
                self._writer.flush()

    def close(self) -> None:
        """Draws the last figures and closes the files; further calls do nothing."""
        if not self.enabled:
            return
        if self._undrawn:
            self._draw(self._last["step"])
        with self._guard(TENSORBOARD):
            self._writer.close()
        self.enabled = False

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _one_line_for_a_full_disk() -> None:
    """A write that fails ends TensorBoard's writer thread, with a traceback among the progress; make it a warning."""
    previous = threading.excepthook

    def hook(args) -> None:
        if isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard"):
            warnings.warn(f"{TENSORBOARD}: cannot write ({args.exc_value}); training goes on without it")
        else:
            previous(args)

    threading.excepthook = hook


def _error_bar(values: Mapping[str, float]) -> dict[str, float]:
    """Bounds of two standard errors around `sampler/achieved`, which the margin chart needs as names of their own."""
    if "sampler/achieved" not in values or "sampler/achieved_error" not in values:
        return {}
    middle, error = values["sampler/achieved"], values["sampler/achieved_error"]
    return {"sampler/achieved_low": middle - 2 * error, "sampler/achieved_high": middle + 2 * error}


def _rounded(values: np.ndarray) -> list:
    """A list short on disk: integers as they are, floats to six significant digits."""
    values = np.asarray(values)
    if values.dtype.kind in "iub":
        return values.astype(np.int64).tolist()
    return [float(f"{v:.{_DIGITS}g}") for v in values.astype(np.float64)]
