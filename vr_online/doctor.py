"""Check that this machine can run the trainer, and say what is missing.

One line per check: `ok`, `warn` (something works less well, or only a part needs it) or `fail` (training would
not start), each with what to do. The exit status is 1 if a check fails. The last check launches two processes
that train a tiny model with DeepSpeed; `--quick` leaves it out.

examples:
  vr-online doctor
  vr-online doctor --quick --run-dir /scratch/runs
  vr-online doctor --json | python -m json.tool
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Callable, Iterator, Optional

_PYTHON = ((3, 10), (3, 13))
_REQUIRED = ("torch", "deepspeed", "webdataset", "numpy", "scipy", "tensorboard", "pydantic", "safetensors", "matplotlib",
             "cleanfid", "tqdm", "yaml", "PIL")
_OPTIONAL = {
    "sklearn": ("scikit-learn", "the demo's digits", "demo"),
    "diffusers": ("diffusers", "the `kl` codec", "kl"),
    "onnxruntime": ("onnxruntime", "the `effnet_lite0` features", "effnet"),
    "pyarrow": ("pyarrow", "Parquet sources", "parquet"),
}
_GIB = 2**30
_FEW_GIB = 5
_SMOKE_TIMEOUT_S = 300
_SMOKE_OK = "vr-online doctor: ranks agree"


@dataclass(frozen=True)
class Check:
    """Outcome of one check: `status` is ok, warn or fail; `advice` is empty for ok."""

    name: str
    status: str
    found: str
    advice: str = ""

    def line(self) -> str:
        return f"{self.status:<4}  {self.name}: {self.found}" + (f" -> {self.advice}" if self.advice else "")


def check_python() -> Check:
    found = platform.python_version()
    low, high = (".".join(map(str, v)) for v in _PYTHON)
    if not _PYTHON[0] <= sys.version_info[:2] <= _PYTHON[1]:
        return Check("python", "fail", found, f"use Python {low} to {high}")
    return Check("python", "ok", found)


def check_packages() -> Check:
    """Every package the trainer imports, but torchvision, which `check_torch_pair` looks at."""
    broken = {name: error for name in _REQUIRED if (error := _import_error(name))}
    if broken:
        shown = "; ".join(f"{name} ({error})" for name, error in broken.items())
        return Check("packages", "fail", shown, "install again: pip install -e . in the project's folder")
    return Check("packages", "ok", f"deepspeed {metadata.version('deepspeed')}, {len(_REQUIRED)} packages import")


def _import_error(name: str) -> Optional[str]:
    try:
        importlib.import_module(name)
    except Exception as error:  # a package may fail to import with anything
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def check_torch_pair() -> Check:
    """torchvision's compiled operators load only beside the torch they were built for."""
    pair = ", ".join(f"{n} {_version(n)}" for n in ("torch", "torchvision"))
    try:
        import torch
        from torchvision.ops import nms

        nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([1.0]), 0.5)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        advice = "install both in one command so that pip finds a pair: pip install --force-reinstall torch torchvision"
        return Check("torch pair", "fail", f"{pair} do not fit together ({reason})", advice)
    return Check("torch pair", "ok", f"{pair} fit together")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def check_devices() -> Check:
    import torch

    from vr_online.monitor.speed import device_peak_tflops

    count = torch.cuda.device_count()
    if not count:
        if torch.version.cuda and shutil.which("nvidia-smi"):
            return Check("devices", "warn", "nvidia-smi is there but torch sees no GPU", _driver_advice())
        return Check("devices", "ok", f"no GPU; CPU with {os.cpu_count()} cores")
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    try:
        for i in range(count):
            torch.ones(1, device=f"cuda:{i}").add_(1).item()
    except RuntimeError as error:
        return Check("devices", "fail", f"{count} x {names[0]} cannot compute ({str(error).splitlines()[0]})", _driver_advice())
    if device_peak_tflops(0, "bf16") is None:
        return Check("devices", "warn", f"{count} x {names[0]}, whose peak is unknown", "set monitor.peak_tflops to see MFU")
    return Check("devices", "ok", ", ".join(sorted({f"{names.count(n)} x {n}" for n in names})))


def _driver_advice() -> str:
    import torch

    return f"this torch is built for CUDA {torch.version.cuda}; update the driver or install the torch for yours (pytorch.org)"


def check_compiler() -> Check:
    """Needed by torch.compile and by DeepSpeed's optional operators, not by a plain run."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    ninja = shutil.which("ninja")
    missing = [name for name, found in (("C++ compiler", compiler), ("ninja", ninja)) if not found]
    if missing:
        advice = "only model.compile and DeepSpeed's offload need them; on Debian: apt-get install g++ ninja-build"
        return Check("compiler", "warn", f"no {' and no '.join(missing)}", advice)
    return Check("compiler", "ok", f"{compiler}, {ninja}")


def check_extras() -> Check:
    missing = [(package, use, extra) for module, (package, use, extra) in _OPTIONAL.items() if _import_error(module)]
    if missing:
        shown = ", ".join(f"{package} ({use})" for package, use, _ in missing)
        extras = ",".join(extra for *_, extra in missing)
        return Check("extras", "warn", f"without {shown}", f"if you need them: pip install 'vr_online[{extras}]'")
    return Check("extras", "ok", "all optional packages import")


def check_disk(folder: Path) -> Check:
    """Write access and room, tried by writing."""
    place = folder
    while not place.exists():
        place = place.parent
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".vr_online_doctor_") as file:
            file.write(b"x" * 2**20)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        advice = "choose another place: run_dir in the configuration"
        return Check("disk", "fail", f"cannot write to {place} ({error.strerror})", advice)
    free = shutil.disk_usage(place).free / _GIB
    if free < _FEW_GIB:
        advice = "a checkpoint takes 16 bytes a parameter (10 GiB for SiT-XL/2), checkpoint.keep of them stay"
        return Check("disk", "warn", f"{free:.1f} GiB free at {place}", advice)
    return Check("disk", "ok", f"{free:.0f} GiB free at {place}, writable")


def check_shared_memory() -> Check:
    """Reader processes hand batches over through /dev/shm; containers often give it 64 MiB."""
    if not os.path.isdir("/dev/shm"):
        return Check("shared memory", "ok", "no /dev/shm on this system")
    total = shutil.disk_usage("/dev/shm").total / _GIB
    if total < 0.5:
        advice = "docker run --shm-size=8g, or data.workers=0"
        return Check("shared memory", "warn", f"/dev/shm holds {total * 1024:.0f} MiB", advice)
    return Check("shared memory", "ok", f"/dev/shm holds {total:.1f} GiB")


def check_launch(command: Optional[list[str]] = None) -> Check:
    """Two processes train a tiny model for two steps through the launcher, on the CPU over gloo."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--num_gpus", "2"]
    command = command or [*launcher, "--master_port", str(_free_port()), "--module", "vr_online.doctor"]
    with tempfile.TemporaryFile("w+") as output:
        # A session of its own, so that a hang ends with all its processes.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(_SMOKE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            advice = "processes of this machine cannot reach each other: check the firewall, or set GLOO_SOCKET_IFNAME=lo"
            return Check("launch", "fail", f"two processes did not finish within {_SMOKE_TIMEOUT_S} s", advice)
        output.seek(0)
        text = output.read()
    if status or text.count(_SMOKE_OK) != 2:
        advice = "see all of its output with: " + " ".join(command)
        return Check("launch", "fail", f"two processes on gloo: {_last_error(text)}", advice)
    return Check("launch", "ok", "two processes train together over gloo")


def _kill_group(process: subprocess.Popen) -> None:
    import signal

    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "exits with" not in line]
    return (errors or lines or ["no output"])[-1][:300]


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _smoke_rank() -> None:
    """What each of the two processes of `check_launch` does."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the launcher sets it, and two ranks cannot share one GPU
    import deepspeed
    import torch

    from vr_online.ranks import Ranks

    ranks = Ranks(timeout_s=60.0)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    settings = {
        "train_batch_size": ranks.world_size,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=settings)
    for step in range(2):
        engine.backward(engine(torch.full((1, 4), float(ranks.rank + step))).square().mean())
        engine.step()
    total = float(sum(p.detach().double().sum() for p in model.parameters()))
    if len(set(ranks.gather(total))) != 1:
        raise RuntimeError("the ranks hold different weights after two steps")
    print(_SMOKE_OK, flush=True)
    ranks.close()


def diagnose(run_dir: Path, quick: bool = False) -> Iterator[Check]:
    """All checks in order, each as it is done; one that itself breaks counts as failed."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("python", check_python),
        ("packages", check_packages),
        ("torch pair", check_torch_pair),
        ("devices", check_devices),
        ("compiler", check_compiler),
        ("extras", check_extras),
        ("disk", lambda: check_disk(run_dir)),
        ("shared memory", check_shared_memory),
    ]
    if not quick:
        checks.append(("launch", check_launch))
    for name, check in checks:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # packages greet on stdout when they are imported
                result = check()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            result = Check(name, "fail", f"the check broke off ({reason})", "mend the checks above first")
        yield result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="leave out the launch of two processes (some 15 s)")
    parser.add_argument("--run-dir", type=Path, default=Path("runs"), help="where runs will be written (default: runs)")
    parser.add_argument("--json", action="store_true", help="print a JSON list of the checks instead of lines")


def run(args: argparse.Namespace) -> int:
    results = []
    for result in diagnose(args.run_dir.resolve(), args.quick):
        results.append(result)
        if not args.json:
            print(result.line(), flush=True)
    if args.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    return int(any(result.status == "fail" for result in results))


if __name__ == "__main__":
    _smoke_rank()
