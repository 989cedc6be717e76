"""The tar parser against Python's own, and against damage."""

import io
import random
import tarfile

import pytest

from vr_online.data.format import crc_tag
from vr_online.data.tar import TarError, members


def member(name, payload=b"", kind=tarfile.REGTYPE, crc=False, **fields):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(payload)
    if crc:
        info.gname = crc_tag(payload)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, payload


def make_tar(entries, fmt=tarfile.USTAR_FORMAT):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=fmt) as tar:
        for info, payload in entries:
            tar.addfile(info, io.BytesIO(payload))
    return buffer.getvalue()


def parse(data, **options):
    return list(members(io.BytesIO(data).read, **options))


class Dribble:
    """A stream that gives a few bytes at a time."""

    def __init__(self, data, step):
        self._file, self._step = io.BytesIO(data), step

    def read(self, size):
        return self._file.read(min(size, self._step))


PAYLOADS = [("a.cls", b"1"), ("dir/b.latent.npy", bytes(range(256)) * 40), ("empty", b""), ("block", b"x" * 512), ("ünï.cls", b"7")]


@pytest.mark.parametrize("fmt", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("step", [1, 511, 100_000])
def test_reads_what_tarfile_writes(fmt, step):
    names = PAYLOADS + [("long/" * 30 + "name.cls", b"2"), ("d" * 90 + "/" + "n" * 90, b"prefix")]
    data = make_tar([member(name, payload) for name, payload in names], fmt)
    assert list(members(Dribble(data, step).read)) == names


def test_names_beyond_ustar_and_large_numbers_are_read():
    name = "v" * 300
    for fmt in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        assert parse(make_tar([member(name, b"x", mtime=2**40, uid=2**30)], fmt)) == [(name, b"x")]


def test_folders_are_passed_over_and_leading_dots_dropped():
    data = make_tar([member("./", kind=tarfile.DIRTYPE), member("./a.cls", b"1")])
    assert parse(data) == [("a.cls", b"1")]


def test_unwanted_payloads_are_not_read():
    data = make_tar([member(name, payload) for name, payload in PAYLOADS])
    got = parse(data, wanted=lambda name: name == "block")
    assert got == [(name, payload if name == "block" else None) for name, payload in PAYLOADS]


@pytest.mark.parametrize("name", ["/etc/passwd", "../up.cls", "a/../../b.cls", "./../c.cls"])
@pytest.mark.parametrize("fmt", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_paths_out_of_the_archive_are_refused(name, fmt):
    with pytest.raises(TarError, match="absolute or parent path"):
        parse(make_tar([member(name, b"1")], fmt))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(kind):
    with pytest.raises(TarError, match="'a.cls' is a link, device"):
        parse(make_tar([member("a.cls", kind=kind, linkname="b")]))


def test_sizes_are_bounded_before_anything_is_read():
    header = tarfile.TarInfo("big.cls")
    header.size = 2**40
    with pytest.raises(TarError, match="'big.cls' has 1099511627776 bytes, more than"):
        parse(header.tobuf(tarfile.GNU_FORMAT))


@pytest.mark.parametrize("cut", [0, 1, 512, 700, 1024, 1536, 5000])
def test_a_cut_is_reported(cut):
    data = make_tar([member("a.cls", b"1"), member("b.latent.npy", b"y" * 4000)])
    with pytest.raises(TarError, match="truncated"):
        parse(data[:cut])


def test_any_changed_byte_is_noticed_or_harmless():
    """With checksums in the headers, damage is an error unless it hit padding or the end of the archive."""
    entries = [member(f"{i}.cls", random.Random(i).randbytes(300 * i), crc=True) for i in range(8)]
    data, generator, noticed = make_tar(entries), random.Random(0), 0
    whole = parse(data)
    for _ in range(400):
        damaged = bytearray(data)
        damaged[generator.randrange(len(data))] ^= generator.randrange(1, 256)
        try:
            got = parse(bytes(damaged))
        except TarError:
            noticed += 1
        else:
            assert got == whole
    assert noticed > 100


def test_a_wrong_crc_is_damage():
    info, _ = member("a.cls", b"12", crc=True)
    with pytest.raises(TarError, match="'a.cls' is damaged"):
        parse(make_tar([(info, b"13")]))
