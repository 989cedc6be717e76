"""Members of a tar, read front to back from any binary stream, fast and without trust.

Reads ustar, pax and GNU tars. Every header's checksum is verified, as is the payload's CRC-32 where the
group-name field carries one (`vr_online.data.format.crc_tag`). A tar without its end-of-archive mark is
truncated. Python's `tarfile` spends longer on one member than it takes to read an 8 kB latent, hence this.
"""

from __future__ import annotations

import zlib
from typing import Callable, Iterator, Optional

BLOCK = 512
CHUNK = 1 << 18
MAX_MEMBER = 1 << 26
_MAX_EXTENSION = 1 << 20
_ZEROS = bytes(BLOCK)
_REGULAR = b"0\0" b"7"


class TarError(Exception):
    """The stream is not the tar it should be; the message says where and how."""


class _Window:
    """The part of the stream that was read but not yet consumed."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._data = b""
        self._start = 0
        self._offset = 0  # of _data[0] in the stream

    @property
    def position(self) -> int:
        return self._offset + self._start

    def take(self, size: int, padding: int = 0) -> bytes:
        """Consumes and returns `size` bytes, and consumes `padding` more; fewer only where the stream ends."""
        start = self._start
        end = start + size
        if end + padding > len(self._data):
            self._fill(size + padding)
            start, end = 0, size
        self._start = min(end + padding, len(self._data))
        return self._data[start:end]

    def _fill(self, size: int) -> None:
        """Makes `size` bytes available from the start of `_data`, if the stream has them."""
        parts = [self._data[self._start :]]
        have = len(parts[0])
        while have < size:
            part = self._read(max(CHUNK, size - have))
            if not part:
                break
            parts.append(part)
            have += len(part)
        self._offset += self._start
        self._start = 0
        self._data = b"".join(parts)

    def skip(self, size: int) -> bool:
        """Consumes `size` bytes without keeping them; False where the stream ends before."""
        while size > len(self._data) - self._start:
            size -= len(self._data) - self._start
            self._offset += len(self._data)
            self._start = 0
            self._data = self._read(CHUNK)
            if not self._data:
                return False
        self._start += size
        return True


def _number(field: bytes, what: str, position: int) -> int:
    """An octal number, or GNU's base-256 form."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    try:
        number = int(field.strip(b" \0"), 8)
    except ValueError:
        number = -1
    if number < 0:
        raise TarError(f"the {what} {field!r} in the header at byte {position} is no octal number")
    return number


def _verify(header: bytes, position: int) -> None:
    """Checks a header's own checksum: the sum of its bytes, its checksum field taken as blanks.

    The low half of Adler-32 is one plus the sum of the bytes modulo 65521, computed at memory speed.
    """
    total = zlib.adler32(header[156:], zlib.adler32(b"        ", zlib.adler32(header[:148]))) & 0xFFFF
    if total != (1 + _number(header[148:156], "checksum", position)) % 65521:
        raise TarError(f"the header at byte {position} is damaged (its checksum does not match)")


def _text(raw: bytes, position: int) -> str:
    try:
        return raw.partition(b"\0")[0].decode()
    except UnicodeDecodeError:
        raise TarError(f"the member name {raw!r} at byte {position} is not UTF-8") from None


def _safe(name: str) -> str:
    """The name without a leading `./`; refuses one that points outside the archive."""
    while name.startswith("./"):
        name = name[2:]
    if name.startswith("/") or (".." in name and ".." in name.split("/")):
        raise TarError(f"the member {name!r} has an absolute or parent path, which is refused")
    return name


def _pax(payload: bytes, position: int) -> dict[str, str]:
    """Records `length key=value\\n` of a pax extended header."""
    records: dict[str, str] = {}
    while payload:
        length, space, _ = payload.partition(b" ")
        end = int(length) if length.isdigit() and len(length) < 8 else 0
        record = payload[len(length) + 1 : end]
        key, equals, value = record[:-1].partition(b"=")
        if not space or not equals or record[-1:] != b"\n" or end > len(payload):
            raise TarError(f"the pax header at byte {position} is damaged")
        records[_text(key, position)] = value.decode(errors="replace")
        payload = payload[end:]
    return records


def _name(header: bytes, position: int) -> str:
    name = _text(header[:100], position)
    if header[345] and header[257:263] == b"ustar\0":
        name = f"{_text(header[345:500], position)}/{name}"
    return name


def members(
    read: Callable[[int], bytes], wanted: Optional[Callable[[str], bool]] = None, max_size: int = MAX_MEMBER
) -> Iterator[tuple[str, Optional[bytes]]]:
    """Yields (name, payload) of each regular file in the order of the tar.

    Args:
        read: `read(n)` returns up to n bytes, and b"" at the end of the stream only.
        wanted: called with each name; where it returns False the payload is skipped and None is yielded.
        max_size: a larger member is refused before it is read.

    Raises:
        TarError: damaged, truncated, an unsafe name, a link or device, or a member above `max_size`.
    """
    window = _Window(read)
    extended: dict[str, str] = {}
    while True:
        position = window.position
        header = window.take(BLOCK)
        if len(header) < BLOCK:
            raise TarError(f"truncated: it ends at byte {position + len(header)} without the end-of-archive mark")
        if header == _ZEROS:
            return
        _verify(header, position)
        kind = header[156:157]
        size = _number(header[124:136], "size", position)
        if kind in b"xgLK":
            extended.update(_extension(window, kind, size, position))
            continue
        name = _safe(extended.get("path") or _name(header, position))
        if "size" in extended:
            size = _decimal(extended["size"], position)
        if extended:
            extended = {}
        if kind == b"5":
            continue
        if kind not in _REGULAR:
            raise TarError(f"the member {name!r} is a link, device or sparse file, which is refused")
        if size > max_size:
            raise TarError(f"the member {name!r} has {size} bytes, more than the {max_size} allowed")
        yield name, _payload(window, header, name, size, wanted is None or wanted(name))


def _payload(window: _Window, header: bytes, name: str, size: int, keep: bool) -> Optional[bytes]:
    padding = -size % BLOCK
    if not keep:
        if not window.skip(size + padding):
            raise TarError(f"truncated inside {name!r}")
        return None
    payload = window.take(size, padding)
    if len(payload) < size:
        raise TarError(f"truncated inside {name!r}, after {len(payload)} of its {size} bytes")
    if header[297:303] == b"crc32:" and header[303:312] != b"%08x\0" % zlib.crc32(payload):
        raise TarError(f"the member {name!r} is damaged (its CRC-32 does not match)")
    return payload


def _decimal(text: str, position: int) -> int:
    """A pax size."""
    if not text.isdigit() or len(text) > 18:
        raise TarError(f"the size {text!r} before byte {position} is no number")
    return int(text)


def _extension(window: _Window, kind: bytes, size: int, position: int) -> dict[str, str]:
    """What a pax (`x`, `g`) or GNU long-name (`L`, `K`) header says about the member after it."""
    if size > _MAX_EXTENSION:
        raise TarError(f"the extended header at byte {position} has {size} bytes, more than the {_MAX_EXTENSION} allowed")
    payload = window.take(size, -size % BLOCK)
    if len(payload) < size:
        raise TarError(f"truncated inside the extended header at byte {position}")
    if kind == b"L":
        return {"path": _text(payload, position)}
    return _pax(payload, position) if kind == b"x" else {}
