"""Opening shards where they lie: local files, http(s), and whatever webdataset's `gopen` knows
(`pipe:` commands, s3, gs, hf, ...).

Remote reads are retried with exponential back-off and continue at the byte where they broke: http(s) asks
for the rest by range, a command is run again and its first bytes are dropped. A read that brings nothing
within the time-out counts as broken.
"""

from __future__ import annotations

import http.client
import os
import re
import select
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, BinaryIO, Callable, Optional, Protocol

from vr_online.data.shard import ShardError
from vr_online.errors import UserError

BACKOFF = 0.5
"""Seconds before the first retry; each further one waits twice as long, up to `MAX_BACKOFF`."""
MAX_BACKOFF = 30.0
_CHUNK = 1 << 20
_URL = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]*)://")


class Readable(Protocol):
    """What a shard is read through: `read(n)` gives at most n bytes, and b"" at the end only."""

    def read(self, size: int) -> bytes: ...

    def close(self) -> None: ...


class BrokenRead(Exception):
    """A failure that another attempt may mend."""


@dataclass(frozen=True)
class Access:
    """How remote shards may be read."""

    allow_pipe: bool = False
    timeout: float = 60.0
    retries: int = 5

    @classmethod
    def of(cls, config: Any) -> "Access":
        """From a `DataConfig`."""
        return cls(config.allow_pipe, config.timeout, config.retries)


def scheme(location: str) -> str:
    """`pipe`, the scheme of a URL in lower case, or "" for a local path (`file:` included)."""
    if location.startswith("pipe:"):
        return "pipe"
    match = _URL.match(location)
    found = match[1].lower() if match else ""
    return "" if found == "file" or location.startswith("file:") else found


def local_path(location: str) -> str:
    """The path of a local location, without `file:`."""
    return re.sub(r"^file:(//)?", "", location)


def open_source(location: str, access: Access = Access()) -> Readable:
    """Opens a shard for reading from its first byte.

    Args:
        location: local path, URL or `pipe:` command.
        access: time-outs, retries, and whether `pipe:` may run.

    Raises:
        ShardError: it does not exist, may not be opened, or (from `read`) kept failing; naming the location.
    """
    kind = scheme(location)
    if kind == "":
        return _open_local(location)
    check_allowed(location, access)
    connect = _connect_http if kind in ("http", "https") else _connect_gopen
    return _Retrying(location, lambda position: connect(location, position, access), access.retries)


def check_allowed(location: str, access: Access) -> None:
    """Refuses `pipe:` unless the configuration allows it."""
    if scheme(location) == "pipe" and not access.allow_pipe:
        raise ShardError(f"{location}: would run a shell command; set data.allow_pipe=true if you trust it")


def read_bytes(location: str, access: Access = Access()) -> bytes:
    """The whole content of a local path or URL; raises `ShardError`."""
    source = open_source(location, access)
    try:
        return b"".join(iter(lambda: source.read(_CHUNK), b""))
    finally:
        source.close()


def _open_local(location: str) -> BinaryIO:
    path = local_path(location)
    try:
        return _Local(path)
    except OSError as error:
        raise ShardError(f"{path}: cannot read the shard: {error.strerror}") from None


class _Local:
    """A local file whose read errors name it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open(path, "rb", buffering=0)

    def read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except OSError as error:
            raise ShardError(f"{self._path}: cannot read the shard: {error.strerror}") from None

    def close(self) -> None:
        self._file.close()


class _Retrying:
    """A remote stream that reconnects at the byte where it broke."""

    def __init__(self, location: str, connect: Callable[[int], Readable], retries: int) -> None:
        self._location, self._connect, self._retries = location, connect, retries
        self._raw: Optional[Readable] = None
        self._position = 0
        self._failures = 0

    def read(self, size: int) -> bytes:
        while True:
            try:
                if self._raw is None:
                    self._raw = self._connect(self._position)
                data = self._raw.read(size)
            except BrokenRead as error:
                self.close()
                self._back_off(error)
                continue
            if data:
                self._failures = 0
                self._position += len(data)
            return data

    def _back_off(self, error: BrokenRead) -> None:
        self._failures += 1
        if self._failures > self._retries:
            raise ShardError(
                f"{self._location}: reading failed {self._failures} times at byte {self._position}: {error}. "
                "Check the address and the network, or raise data.retries and data.timeout"
            ) from None
        time.sleep(min(MAX_BACKOFF, BACKOFF * 2 ** (self._failures - 1)))

    def close(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            raw.close()


_NETWORK_ERRORS = (OSError, http.client.HTTPException)


class _HttpBody:
    """A response body that ends where its length says, or is broken."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response
        length = response.headers.get("Content-Length")
        self._left = int(length) if length is not None else None

    def read(self, size: int) -> bytes:
        if self._left == 0:
            return b""
        try:
            data = self._response.read1(size)
        except _NETWORK_ERRORS as error:
            raise BrokenRead(f"{type(error).__name__}: {error}") from None
        if self._left is not None:
            if not data:
                raise BrokenRead(f"the connection ended {self._left} bytes early")
            self._left -= len(data)
        return data

    def close(self) -> None:
        self._response.close()


def _connect_http(url: str, position: int, access: Access) -> Readable:
    headers = {"Accept-Encoding": "identity"}
    if position:
        headers["Range"] = f"bytes={position}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=access.timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code >= 500 or error.code in (408, 425, 429):
            raise BrokenRead(f"HTTP status {error.code}") from None
        raise ShardError(f"{url}: cannot read the shard: HTTP status {error.code} {error.reason}") from None
    except ValueError as error:
        raise ShardError(f"{url}: not a usable address ({error})") from None
    except _NETWORK_ERRORS as error:
        raise BrokenRead(str(getattr(error, "reason", error)) or type(error).__name__) from None
    body = _HttpBody(response)
    if position and response.status != 206:
        _drop(body, position)
    return body


def _drop(source: Readable, size: int) -> None:
    """Reads and forgets the first `size` bytes, where a server or command can only start from the beginning."""
    while size:
        data = source.read(min(size, _CHUNK))
        if not data:
            source.close()
            raise BrokenRead("it is shorter than when it was read before")
        size -= len(data)


class _Command:
    """The output of a command started by webdataset's `gopen`, with a time-out and a checked exit status."""

    def __init__(self, pipe: Any, timeout: float) -> None:
        self._pipe, self._timeout = pipe, timeout

    def read(self, size: int) -> bytes:
        descriptor = self._pipe.stream.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        if not poll.poll(1000 * self._timeout):
            raise BrokenRead(f"the command gave no bytes for {self._timeout:g} s")
        data = os.read(descriptor, size)
        if not data:
            status = self._pipe.proc.wait()
            if status != 0:
                raise BrokenRead(f"the command ended with exit status {status}")
        return data

    def close(self) -> None:
        """Ends the command if it still runs; its status no longer matters."""
        if self._pipe.proc.poll() is None:
            self._pipe.proc.kill()
        self._pipe.ignore_errors = True
        self._pipe.close()


def _gopen_s3(url: str, mode: str = "rb", bufsize: int = 8192) -> Any:
    from webdataset.gopen import Pipe

    return Pipe(["aws", "s3", "cp", "--only-show-errors", url, "-"], mode=mode, bufsize=bufsize)


def _connect_gopen(location: str, position: int, access: Access) -> Readable:
    from webdataset.gopen import gopen, gopen_schemes

    gopen_schemes.setdefault("s3", _gopen_s3)
    if scheme(location) not in gopen_schemes:
        raise ShardError(f"{location}: unknown kind of address; use a path, http(s), s3, gs, hf or pipe: with data.allow_pipe=true")
    try:
        opened = gopen(location, "rb")
    except OSError as error:
        raise ShardError(f"{location}: cannot start the command that reads it: {error}; is the tool installed?") from None
    except (ValueError, ImportError) as error:
        raise ShardError(f"{location}: cannot be opened: {error}") from None
    source = _Command(opened, access.timeout) if hasattr(opened, "proc") else opened
    if position:
        _drop(source, position)
    return source


@dataclass(frozen=True)
class Shard:
    """One shard: its name in `dataset.json`, where it lies, and its number of samples."""

    name: str
    location: str
    count: int


def _expand(patterns: list[str]) -> list[str]:
    """Brace expansion as webdataset does it."""
    from webdataset.shardlists import expand_urls

    return [location for pattern in patterns for location in expand_urls(pattern)]


def _name_of(location: str, known: dict[str, int]) -> str:
    """Which shard of `dataset.json` a path, URL or command means: the one whose file name it contains."""
    for token in reversed(re.findall(r"[^\s'\"=|<>;?&]+", location)):
        for name in (token, token.rsplit("/", 1)[-1]):
            if name in known:
                return name
    raise UserError(
        f"data.shards: {location!r} names none of the {len(known)} shards in dataset.json "
        f"(such as {next(iter(known), 'none')!r}); give data.dataset the dataset.json that was written with it"
    )


def find_shards(config: Any, info: Any) -> list[Shard]:
    """The shards to read, sorted by name, so that the order of samples does not depend on how they are listed.

    Args:
        config: `DataConfig`; `shards` is a folder (or the URL of one), or a list of tars.
        info: `DatasetInfo`, with the count of each shard.

    Raises:
        UserError: a listed tar is not in `dataset.json`, stands twice, needs `allow_pipe`, or is a local file
            that is missing or too short for its samples (unless `on_error` is `skip`).
    """
    listed = config.shards
    if isinstance(listed, str) and not (listed.startswith("pipe:") or listed.endswith(".tar") or "{" in listed):
        folder = listed.rstrip("/") if scheme(listed) else local_path(listed).rstrip("/") or "/"
        found = [Shard(name, f"{folder}/{name}", count) for name, count in info.shards.items()]
    else:
        names = [(location, _name_of(location, info.shards)) for location in _expand([listed] if isinstance(listed, str) else listed)]
        found = [Shard(name, location, info.shards[name]) for location, name in names]
    found.sort(key=lambda shard: shard.name)
    _check_listed(found, Access.of(config))
    if config.on_error == "stop":
        _check_local(found, info)
    return found


def _check_listed(shards: list[Shard], access: Access) -> None:
    for before, shard in zip(shards, shards[1:]):
        if before.name == shard.name:
            raise UserError(f"data.shards: the shard {shard.name!r} is listed twice: {before.location!r} and {shard.location!r}")
    for shard in shards:
        check_allowed(shard.location, access)
    if not sum(shard.count for shard in shards):
        raise UserError("data.shards: there are no samples in the shards listed; write some with `vr-online shards encode`")


def _sizes(folders: set[str]) -> dict[str, int]:
    """Path and size of every file in some folders: one directory scan is far quicker than a look-up per shard."""
    sizes = {}
    for folder in folders:
        try:
            with os.scandir(folder) as entries:
                sizes.update({os.path.join(folder, e.name): e.stat().st_size for e in entries if e.name.endswith(".tar")})
        except OSError:
            continue
    return sizes


def _check_local(shards: list[Shard], info: Any) -> None:
    """Finds missing and cut-off local tars from their sizes alone."""
    local = [(shard, os.path.normpath(local_path(shard.location))) for shard in shards if not scheme(shard.location)]
    sizes = _sizes({os.path.dirname(path) or "." for _, path in local})
    bad = []
    for shard, path in local:
        size = sizes.get(path if os.path.dirname(path) else os.path.join(".", path))
        if size is None:
            size = os.path.getsize(path) if os.path.isfile(path) else None
        if size is None:
            bad.append(f"{path}: missing")
        elif size < shard.count * _least_bytes(info):
            bad.append(f"{path}: truncated: {size} bytes are too few for {shard.count} samples")
    if bad:
        more = f" (and {len(bad) - 3} more)" if len(bad) > 3 else ""
        raise ShardError("; ".join(bad[:3]) + f"{more}. Copy or write the shards again, or set data.on_error=skip")


def _least_bytes(info: Any) -> int:
    """A sample's least room in a tar: two headers, a label, and the array's blocks."""
    channels, height, width = info.stored_shape
    return 3 * 512 + -(-2 * channels * height * width // 512) * 512
