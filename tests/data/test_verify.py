"""`verify` reports every kind of damage and never crashes on any."""

import io
import json
import os
import pickle
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from vr_online.data.format import DatasetInfo
from vr_online.data.parallel import run_tasks
from vr_online.data.shard import Expected, ShardError, read_samples
from vr_online.data.verify import MAX_FAULTS, verify
from vr_online.data.writer import ShardWriter, describe, npy_bytes, shard_name
from vr_online.errors import UserError

SHAPE = (2, 4, 4)
COUNT = 6


def write(folder: Path, shards: int = 2) -> DatasetInfo:
    stats, values = {}, np.random.default_rng(0).normal(size=(shards * COUNT, *SHAPE))
    for index in range(shards):
        with ShardWriter(folder / shard_name(index), SHAPE) as shard:
            for i in range(index * COUNT, (index + 1) * COUNT):
                shard.write(f"{i:04d}", values[i], i % 3)
        stats[shard_name(index)] = shard.stats
    info = describe(stats, latent_shape=SHAPE, moments=False, class_names=["a", "b", "c"], codec="pixel", codec_hash="")
    info.save(folder)
    return info


@pytest.fixture
def folder(tmp_path) -> Path:
    write(tmp_path)
    return tmp_path


def faults(folder) -> list[str]:
    return verify(folder, progress=False)


def one_fault(folder) -> str:
    found = faults(folder)
    assert len(found) == 1, found
    return found[0]


def latent(value=0.0, shape=SHAPE, dtype=np.float16) -> bytes:
    return npy_bytes(np.full(shape, value, dtype))


def rewrite(path: Path, members: list[tuple[str, bytes]]) -> None:
    """A shard of the given members, its own checksum forgotten so that only the content speaks."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))
    description = json.loads((path.parent / "dataset.json").read_text())
    del description["shard_sha256"][path.name]
    (path.parent / "dataset.json").write_text(json.dumps(description))


def samples(count=COUNT, **replaced: bytes) -> list[tuple[str, bytes]]:
    """Members of shard 0, some replaced by name, with `_` for the dots."""
    pairs = [m for i in range(count) for m in ((f"{i:04d}.latent.npy", latent()), (f"{i:04d}.cls", b"%d" % (i % 3)))]
    renamed = {"k" + name.replace(".", "_"): name for name, _ in pairs}
    content = {**dict(pairs), **{renamed[key]: value for key, value in replaced.items()}}
    return [(name, content[name]) for name, _ in pairs]


def test_a_sound_data_set_has_no_faults(folder):
    assert faults(folder) == []
    rewrite(folder / shard_name(0), samples())
    assert faults(folder) == []


def object_array() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{}], dtype=object), allow_pickle=True)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "replaced, message",
    [
        ({"k0002_latent_npy": latent(shape=(2, 4, 5))}, r"sample 0002: its latent has shape \(2, 4, 5\), expected \(2, 4, 4\)"),
        ({"k0002_latent_npy": latent(np.nan)}, "sample 0002: its latent has values that are not finite"),
        ({"k0002_latent_npy": latent(np.inf)}, "not finite"),
        ({"k0002_latent_npy": latent(dtype=np.float32)}, "sample 0002: its latent has dtype float32"),
        ({"k0002_latent_npy": object_array()}, "sample 0002: its latent holds pickled objects"),
        ({"k0002_latent_npy": pickle.dumps([1])}, "sample 0002: its latent is not an array"),
        ({"k0002_latent_npy": latent()[:-3]}, "sample 0002: its latent is not an array"),
        ({"k0002_latent_npy": b""}, "sample 0002: its latent is not an array"),
        ({"k0002_cls": b"3"}, "sample 0002: its label 3 is out of range, there are 3 classes"),
        ({"k0002_cls": b"-1"}, "sample 0002: its label b'-1' is not an integer"),
        ({"k0002_cls": b"cat"}, "sample 0002: its label b'cat' is not an integer"),
    ],
)
def test_a_bad_sample_is_named(folder, replaced, message):
    rewrite(folder / shard_name(0), samples(**replaced))
    fault = one_fault(folder)
    assert re.search(message, fault) and str(folder / shard_name(0)) in fault


def test_missing_and_repeated_members_are_named(folder):
    rewrite(folder / shard_name(0), [m for m in samples() if m[0] != "0003.cls"])
    assert "sample 0003: has no .cls member" in one_fault(folder)
    rewrite_again(folder, samples() + samples()[:2])
    assert any("the key '0000' stands twice" in f for f in faults(folder))
    rewrite_again(folder, samples()[:1] + samples())
    assert any("'0000.latent.npy' stands twice" in f for f in faults(folder))


def rewrite_again(folder: Path, members) -> None:
    write(folder)
    rewrite(folder / shard_name(0), members)


def test_keys_shared_by_two_shards_are_found(folder):
    rewrite(folder / shard_name(1), samples())
    assert f"{COUNT} keys stand in {shard_name(0)} too" in one_fault(folder)


@pytest.mark.parametrize("name", ["0000.pkl", "x.pth", "0000.latent.pickle", "x.PKL", "0000.latent.Pt"])
def test_a_pickle_member_is_refused_and_never_decoded(folder, tmp_path_factory, monkeypatch, name):
    class Exploit:
        def __reduce__(self):
            return (os.mkdir, ("exploited",))

    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))
    rewrite(folder / shard_name(0), [*samples(), (name, pickle.dumps(Exploit()))])
    assert any("is a pickle" in f and name in f for f in faults(folder))
    rewrite_again(folder, samples(k0001_latent_npy=pickle.dumps(Exploit())))
    assert faults(folder) and not Path("exploited").exists()


@pytest.mark.parametrize("name", ["/etc/0000.cls", "../0000.cls", "a/../../0000.cls"])
def test_unsafe_paths_are_refused(folder, name):
    rewrite(folder / shard_name(0), [(name, b"0"), *samples()])
    assert name in one_fault(folder) and "refused" in one_fault(folder)


def test_links_are_refused(folder):
    with tarfile.open(folder / shard_name(0), "w") as tar:
        link = tarfile.TarInfo("0000.cls")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert "'0000.cls' is a link" in one_fault(folder)


def test_oversize_members_are_refused(folder):
    rewrite(folder / shard_name(0), [("0000.latent.npy", bytes(5 << 20)), *samples()[1:]])
    assert "0000.latent.npy" in one_fault(folder) and "more than" in one_fault(folder)


def test_missing_and_unlisted_shards_are_named(folder):
    (folder / shard_name(1)).rename(folder / "extra.tar")
    found = faults(folder)
    assert len(found) == 2 and "shard-00001.tar: missing" in found[0] and "extra.tar: not listed" in found[1]


def test_a_count_that_disagrees_is_named(folder):
    rewrite(folder / shard_name(0), samples(COUNT - 1))
    assert f"holds {COUNT - 1} samples, dataset.json says {COUNT}" in one_fault(folder)


def test_class_counts_that_disagree_are_named(folder):
    text = (folder / "dataset.json").read_text()
    description = json.loads(text)
    description["class_counts"] = [3, 5, 4]
    (folder / "dataset.json").write_text(json.dumps(description))
    assert len(faults(folder)) == 2 and "class 0 (a) has 4 samples, class_counts says 3" in faults(folder)[0]


def test_many_faults_of_one_shard_are_summed_up(tmp_path):
    stats = {}
    with ShardWriter(tmp_path / "shard-00000.tar", SHAPE) as shard:
        for i in range(50):
            shard.write(f"{i:04d}", np.zeros(SHAPE), i)
    stats["shard-00000.tar"] = shard.stats
    describe(stats, latent_shape=SHAPE, moments=False, class_names=[str(i) for i in range(50)], codec="pixel", codec_hash="").save(tmp_path)
    description = json.loads((tmp_path / "dataset.json").read_text())
    (tmp_path / "dataset.json").write_text(json.dumps({**description, "class_names": ["x"], "class_counts": []}))
    found = faults(tmp_path)
    assert len(found) == MAX_FAULTS + 1 and "29 more faults" in found[-1]


def damage(payload: bytes, random: np.random.Generator) -> bytes:
    """One of: cut off, one bit flipped, a run overwritten, removed, repeated or inserted."""
    start = int(random.integers(len(payload)))
    end = min(len(payload), start + int(random.integers(1, 2000)))
    noise = random.bytes(end - start)
    bit = bytes([payload[start] ^ (1 << int(random.integers(8)))])
    return [
        lambda: payload[:start],
        lambda: payload[:start] + bit + payload[start + 1 :],
        lambda: payload[:start] + noise + payload[end:],
        lambda: payload[:start] + payload[end:],
        lambda: payload[:end] + payload[start:],
        lambda: payload[:start] + noise + payload[start:],
    ][int(random.integers(6))]()


def read_until_broken(payload: bytes, info: DatasetInfo) -> tuple[list[tuple], bool]:
    """What the streaming reader delivers of a shard, and whether it then refused the rest."""
    delivered = []
    try:
        for _, sample in read_samples(io.BytesIO(payload).read, Expected.of(info), "shard", COUNT):
            delivered.append((sample.key, sample.latent.tobytes(), sample.label))
    except ShardError:
        return delivered, True
    return delivered, False


def test_each_of_200_damaged_shards_is_reported(folder):
    """Every change of a shard's bytes is found, whatever it hits, and named; what the reader delivers of such a
    shard before it stops is undamaged."""
    info = DatasetInfo.load(folder)
    whole = (folder / shard_name(0)).read_bytes()
    original, broke = read_until_broken(whole, info)
    assert len(original) == COUNT and not broke
    random = np.random.default_rng(0)
    quiet, damaged, refusals = [], 0, 0
    while damaged < 200:
        broken = damage(whole, random)
        if broken == whole:
            continue
        damaged += 1
        (folder / shard_name(0)).write_bytes(broken)
        found = faults(folder)
        if not found or not all(shard_name(0) in f and "\n" not in f for f in found):
            quiet.append((damaged, found))
        delivered, refused = read_until_broken(broken, info)
        assert delivered == original[: len(delivered)] and (refused or delivered == original)
        refusals += refused
    assert quiet == [] and refusals > 100  # the others changed padding only, or what follows the end


def test_processes_find_what_one_finds(folder):
    for index in range(2, 5):
        shutil.copy(folder / shard_name(0), folder / shard_name(index))
    (folder / shard_name(1)).write_bytes((folder / shard_name(1)).read_bytes()[:4000])
    alone = verify(folder, workers=1, progress=False)
    assert len(alone) == 4 and verify(folder, workers=2, progress=False) == alone


def _state(device):
    return device


def _die(state, task, advance):
    os._exit(9)


def test_a_worker_that_dies_ends_the_work_with_a_message():
    with pytest.raises(UserError, match="a worker process died"):
        run_tasks(_die, [1, 2], setup=_state, workers=2, total=2, unit="x", label="dying", progress=False)
