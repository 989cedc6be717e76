"""Claims: how several evaluators of one run agree, through files alone, on who takes which step.

`evals/<step>/[<variant>/]claim.json` is created with O_EXCL, so one process wins; it holds host, process id
and a nonce, and its owner touches it every few seconds. A claim is stale when its process is gone from this
host or it has not been touched for five minutes; taking it over happens under a file lock, because two
observers may see it stale at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Iterator, Optional

from vr_online.errors import UserError

FILE = "claim.json"
TOUCH_S = 10.0
STALE_S = 300.0


class ClaimLost(UserError):
    """Another process took this evaluation over, having taken this one for dead."""


def _read(path: Path) -> Optional[dict[str, Any]]:
    try:
        claim = json.loads(path.read_text())
        return claim if isinstance(claim, dict) else {}
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}


def _now(folder: Path) -> float:
    """The file server's clock, which claims are stamped with and which may differ from this host's.

    This host's, where the folder cannot be written (a full disk, missing permission).
    """
    probe = folder / f".clock.{os.getpid()}.{threading.get_ident()}"
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink(missing_ok=True)
        return now
    except OSError:
        return time.time()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def is_live(path: Path) -> bool:
    """Whether a claim file exists and its owner seems to be at work; so one that cannot be looked at. Never raises."""
    claim = _read(path)
    if claim is None:
        return False
    if claim.get("host") == socket.gethostname() and isinstance(claim.get("pid"), int) and not _alive(claim["pid"]):
        return False
    try:
        return _now(path.parent) - path.stat().st_mtime < STALE_S
    except FileNotFoundError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / ".claim.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by the system should this process die
        yield


class Claim:
    """A claim that this process holds; a thread keeps it fresh until `release`."""

    def __init__(self, path: Path, nonce: str):
        self.path, self._nonce = path, nonce
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._touch, daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, folder: Path, owner: str = "") -> Optional["Claim"]:
        """Claims `folder`, or returns None when another process is at work there.

        Args:
            owner: a role that only one process of a run has at a time; a claim left under the same name is of an
                earlier, ended process and is taken over at once.

        Raises:
            UserError: the folder cannot be written.
        """
        path, nonce = folder / FILE, uuid.uuid4().hex
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if _create(path, nonce, owner):
                return cls(path, nonce)
            if _is_taken(path, owner):
                return None
            with _locked(folder):
                if _is_taken(path, owner):
                    return None
                path.unlink(missing_ok=True)
                return cls(path, nonce) if _create(path, nonce, owner) else None
        except OSError as error:
            raise UserError(f"{path}: cannot claim the evaluation: {error.strerror or error}") from None

    def check(self) -> None:
        """Raises `ClaimLost` when another process holds the claim by now."""
        claim = _read(self.path)
        if claim is not None and claim.get("nonce") not in (self._nonce, None):
            raise ClaimLost(f"{self.path}: process {claim.get('pid')} on {claim.get('host')} took this evaluation over")

    def release(self) -> None:
        """Gives the claim up; does nothing to another's."""
        self._stop.set()
        self._thread.join(timeout=5)
        claim = _read(self.path)
        if claim is not None and claim.get("nonce") == self._nonce:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()

    def _touch(self) -> None:
        while not self._stop.wait(TOUCH_S):
            try:
                claim = _read(self.path)
                if claim is not None and claim.get("nonce") == self._nonce:
                    os.utime(self.path)
            except OSError:
                continue


def _is_taken(path: Path, owner: str) -> bool:
    return is_live(path) and not (owner and (_read(path) or {}).get("owner") == owner)


def _create(path: Path, nonce: str, owner: str) -> bool:
    """Creates the claim unless there is one. Until its contents are there, readers take it for live by its age."""
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    claim = {"host": socket.gethostname(), "pid": os.getpid(), "nonce": nonce, "owner": owner, "since": since}
    try:
        with open(path, "x") as file:
            json.dump(claim, file)
        return True
    except FileExistsError:
        return False


def claimed_steps(run_dir: Path) -> set[int]:
    """Steps of a run whose checkpoints some evaluation is reading now. Never raises: no claim is seen in a folder that fails."""
    try:
        paths = [*run_dir.glob(f"evals/*/{FILE}"), *run_dir.glob(f"evals/*/*/{FILE}")]
    except OSError:
        return set()
    steps = {path: path.relative_to(run_dir / "evals").parts[0] for path in paths}
    return {int(step) for path, step in steps.items() if step.isdigit() and is_live(path)}
