"""Members of a tar, read front to back from any binary stream, fast and without trust.

Reads ustar, pax and GNU tars. Every header's checksum is verified, as is the payload's CRC-32 where the
group-name field carries one (`vr_online.data.format.crc_tag`). A tar without its end-of-archive mark is
truncated. Python's `tarfile` spends longer on one member than it takes to read an 8 kB latent, hence this.
"""

from __future__ import annotations

import re
import zlib
from typing import Callable, Iterator, Optional

BLOCK = 512
CHUNK = 1 << 20
MAX_MEMBER = 1 << 26
_MAX_EXTENSION = 1 << 20
_ZEROS = bytes(BLOCK)
_CRC = re.compile(rb"crc32:([0-9a-f]{8})")


class TarError(Exception):
    """The stream is not the tar it should be; the message says where and how."""


class _Window:
    """The part of the stream that was read but not yet consumed."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self.data = b""
        self.start = 0
        self.offset = 0  # of data[0] in the stream

    @property
    def position(self) -> int:
        return self.offset + self.start

    def need(self, size: int) -> bool:
        """Makes `size` bytes available after `start`; False where the stream ends before."""
        if len(self.data) - self.start >= size:
            return True
        parts = [self.data[self.start :]]
        have = len(parts[0])
        while have < size:
            part = self._read(max(CHUNK, size - have))
            if not part:
                break
            parts.append(part)
            have += len(part)
        self.offset += self.start
        self.start = 0
        self.data = b"".join(parts)
        return have >= size

    def skip(self, size: int) -> bool:
        """Consumes `size` bytes without keeping them; False where the stream ends before."""
        while True:
            have = len(self.data) - self.start
            if have >= size:
                self.start += size
                return True
            size -= have
            self.offset += len(self.data)
            self.start = 0
            self.data = self._read(CHUNK)
            if not self.data:
                return False


def _number(field: bytes, what: str, position: int) -> int:
    """An octal number, or GNU's base-256 form."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    text = field.strip(b" \0")
    if not text.isdigit() or b"8" in text or b"9" in text:
        raise TarError(f"the {what} {field!r} in the header at byte {position} is no octal number")
    return int(text, 8)


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
    if name.startswith("/") or ".." in name.split("/"):
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


def _payload(window: _Window, size: int, name: str) -> bytes:
    if not window.need(size):
        raise TarError(f"truncated inside {name!r}, which starts at byte {window.position} and has {size} bytes")
    payload = window.data[window.start : window.start + size]
    window.start += size
    return payload


def _pad(window: _Window, size: int, name: str) -> None:
    padding = -size % BLOCK
    if not window.skip(padding):
        raise TarError(f"truncated after {name!r}")


def _ustar_name(header: bytes, position: int) -> str:
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
        if not window.need(BLOCK):
            raise TarError(f"truncated: it ends at byte {position + len(window.data) - window.start} without the end-of-archive mark")
        header = window.data[window.start : window.start + BLOCK]
        if header == _ZEROS:
            return
        window.start += BLOCK
        _verify(header, position)
        kind = header[156:157]
        size = _number(header[124:136], "size", position)
        if kind in b"xgLK":
            extended.update(_extension(window, kind, size, position))
            continue
        name = _safe(extended.get("path") or _ustar_name(header, position))
        if "size" in extended:
            size = _number(b"%o" % int(extended["size"]) if extended["size"].isdigit() else b"?", "size", position)
        extended = {}
        if kind == b"5":
            continue
        if kind not in (b"0", b"\0", b"7"):
            raise TarError(f"the member {name!r} is a link, device or sparse file, which is refused")
        if size > max_size:
            raise TarError(f"the member {name!r} has {size} bytes, more than the {max_size} allowed")
        yield name, _read_member(window, header, name, size, wanted is None or wanted(name))


def _read_member(window: _Window, header: bytes, name: str, size: int, keep: bool) -> Optional[bytes]:
    if not keep:
        if not window.skip(size + -size % BLOCK):
            raise TarError(f"truncated inside {name!r}")
        return None
    payload = _payload(window, size, name)
    if header[297:303] == b"crc32:":
        match = _CRC.fullmatch(header[297:311])
        if match is None or int(match[1], 16) != zlib.crc32(payload):
            raise TarError(f"the member {name!r} is damaged (its CRC-32 does not match)")
    _pad(window, size, name)
    return payload


def _extension(window: _Window, kind: bytes, size: int, position: int) -> dict[str, str]:
    """What a pax (`x`, `g`) or GNU long-name (`L`, `K`) header says about the member after it."""
    if size > _MAX_EXTENSION:
        raise TarError(f"the extended header at byte {position} has {size} bytes, more than the {_MAX_EXTENSION} allowed")
    payload = _payload(window, size, "an extended header")
    _pad(window, size, "an extended header")
    if kind == b"L":
        return {"path": _text(payload, position)}
    return _pax(payload, position) if kind == b"x" else {}
