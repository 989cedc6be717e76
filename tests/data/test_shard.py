"""Samples of a shard: what is accepted, and that nothing else is."""

import io
import pickle
import random
import tarfile

import numpy as np
import pytest

from vr_online.data.shard import Expected, ShardError, read_samples
from vr_online.data.writer import ShardWriter

EXPECTED = Expected((2, 3, 3), 10)


def npy(array, **options):
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def latent(value=1.0, shape=(2, 3, 3), dtype=np.float16):
    return npy(np.full(shape, value, dtype))


def tar_of(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, payload in files:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))
    return buffer.getvalue()


def read(data, count=None, wanted=None):
    return list(read_samples(io.BytesIO(data).read, EXPECTED, "s.tar", count, wanted))


def sample(key="k", value=1.0, label=b"3"):
    return [(f"{key}.latent.npy", latent(value)), (f"{key}.cls", label)]


def test_members_may_come_in_any_order_and_with_others_beside_them():
    files = [("a.cls", b" 4\n"), ("a.json", b"{}"), ("a.latent.npy", latent(2)), ("d/b.latent.npy", latent(5)), ("d/b.cls", b"0")]
    (n0, a), (n1, b) = read(tar_of(files), count=2)
    assert (n0, a.key, a.label, a.latent[0, 0, 0]) == (0, "a", 4, 2)
    assert (n1, b.key, b.label, b.latent.shape) == (1, "d/b", 0, (2, 3, 3))


def test_both_flips_may_lie_on_a_leading_axis():
    [(_, both)] = read(tar_of([("a.latent.npy", latent(shape=(2, 2, 3, 3))), ("a.cls", b"1")]))
    assert both.latent.shape == (2, 2, 3, 3)


def test_only_wanted_samples_are_decoded():
    data = tar_of(sample("a", np.nan) + sample("b", 7.0) + sample("c", np.nan))
    [(ordinal, b)] = read(data, 3, np.array([False, True, False]))
    assert ordinal == 1 and b.key == "b"


def object_array():
    return npy(np.array([{"a": 1}], dtype=object), allow_pickle=True)


BAD = {
    "shape": ([("a.latent.npy", latent(shape=(2, 3, 4))), ("a.cls", b"1")], r"sample a: .*shape \(2, 3, 4\), expected \(2, 3, 3\)"),
    "dtype": ([("a.latent.npy", latent(dtype=np.float32)), ("a.cls", b"1")], "sample a: .*float32, expected float16"),
    "order": ([("a.latent.npy", npy(np.asfortranarray(np.ones((2, 3, 3), np.float16)))), ("a.cls", b"1")], "Fortran"),
    "nan": (sample("a", np.nan), "sample a: .*not finite"),
    "infinite": (sample("a", -np.inf), "sample a: .*not finite"),
    "short": ([("a.latent.npy", latent()[:-2]), ("a.cls", b"1")], "sample a: .*34 bytes of data"),
    "long": ([("a.latent.npy", latent() + b"xx"), ("a.cls", b"1")], "sample a: .*38 bytes of data"),
    "no array": ([("a.latent.npy", b"hello"), ("a.cls", b"1")], "sample a: .*not an array file"),
    "objects": ([("a.latent.npy", object_array()), ("a.cls", b"1")], "sample a: .*pickled objects, which are refused"),
    "pickle": (sample() + [("k.pkl", pickle.dumps(1))], r"'k.pkl' is a pickle"),
    "pyd": (sample() + [("k.meta.pyd", b"")], r"'k.meta.pyd' is a pickle"),
    "torch": (sample() + [("k.pth", b"")], r"'k.pth' is a pickle"),
    "label range": (sample(label=b"10"), "label 10 is out of range: .* 10 classes"),
    "label sign": (sample(label=b"-1"), "label .*-1.* is not an ASCII integer"),
    "label text": (sample(label=b"cat"), "not an ASCII integer"),
    "label empty": (sample(label=b""), "not an ASCII integer"),
    "no label": (sample()[:1], "k.cls is missing"),
    "no latent": (sample()[1:], "k.latent.npy is missing"),
    "twice": (sample() + sample()[:1], "'k.latent.npy' stands twice"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_samples_are_errors_that_name_shard_and_sample(case):
    files, message = BAD[case]
    with pytest.raises(ShardError, match=message) as caught:
        read(tar_of(files))
    assert str(caught.value).startswith("s.tar: ")


def test_counts_must_agree():
    data = tar_of(sample("a") + sample("b"))
    with pytest.raises(ShardError, match="s.tar: it holds 2 samples, dataset.json says 3"):
        read(data, 3)
    with pytest.raises(ShardError, match="more than the 1 samples"):
        read(data, 1)


class Trap:
    """Leaves a mark when it is unpickled."""

    sprung = False

    def __reduce__(self):
        return (setattr, (Trap, "sprung", True))


def test_nothing_is_unpickled():
    trapped = npy(np.array([Trap()], dtype=object), allow_pickle=True)
    for files in ([("a.latent.npy", trapped), ("a.cls", b"1")], sample() + [("k.pyd", pickle.dumps(Trap()))]):
        with pytest.raises(ShardError):
            read(tar_of(files))
    assert not Trap.sprung


def damaged(data, generator):
    """Flipped bytes, a cut, an inserted or a zeroed run."""
    place, kind = generator.randrange(len(data)), generator.randrange(4)
    if kind == 0:
        return data[:place]
    run = generator.choice([1, 1, 8, 512])
    patch = bytes(run) if kind == 1 else generator.randbytes(run)
    return data[:place] + patch + data[place if kind == 2 else place + run :]


def test_damage_is_reported_or_harmless_and_never_a_wrong_sample(tmp_path):
    with ShardWriter(tmp_path / "w.tar", EXPECTED.shape) as shard:
        for i in range(12):
            shard.write(f"{i:04d}", np.random.default_rng(i).normal(size=EXPECTED.shape), i % 10)
    data = (tmp_path / "w.tar").read_bytes()
    true = {s.key: (s.label, s.latent.tobytes()) for _, s in read(data, 12)}
    generator, reported = random.Random(1), 0
    for _ in range(300):
        got = []
        try:
            for _, s in read_samples(io.BytesIO(damaged(data, generator)).read, EXPECTED, "w.tar", 12):
                got.append(s)
        except ShardError as error:
            assert "w.tar" in str(error)
            reported += 1
        else:
            assert len(got) == 12
        assert all(true[s.key] == (s.label, s.latent.tobytes()) for s in got)
    assert reported > 150
