"""Where `evaluation.reference` is null: the run's own shards stand in where they can, and else it is said what to give."""

import shutil

import pytest

from vr_online.config import load_config
from vr_online.data.format import DatasetInfo
from vr_online.errors import UserError
from vr_online.evaluation.evaluate import Task
from vr_online.evaluation.sources import open_source


@pytest.fixture
def shards(digits, tmp_path):
    """A copy of the held-out digits to spoil."""
    return shutil.copytree(digits / "heldout", tmp_path / "shards")


def check(shards, *settings):
    info = DatasetInfo.load(shards)
    Task.check(load_config(None, [f"data.shards={shards}", *settings]), info)


def test_a_folder_of_shards_stands_in(shards):
    check(shards)
    check(shards, f"data.dataset={shards}/dataset.json")
    check(shards, f"data.dataset={shards}/dataset.json", f"data.shards=[{shards}/a.tar]")


@pytest.mark.parametrize(
    "data",
    [
        ["data.shards=https://host/digits"],
        ["data.shards='pipe:cat {shards}/a.tar'", "data.dataset={elsewhere}/dataset.json"],
        ["data.shards=[{shards}/a.tar, {shards}/b.tar]", "data.dataset={elsewhere}/dataset.json"],
        ["data.shards='{shards}/shard-*.tar'", "data.dataset=https://host/digits/dataset.json"],
        ["data.shards=[{shards}/a.tar]"],
    ],
)
def test_what_cannot_stand_in_names_the_key_and_what_to_give(shards, tmp_path, data):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(shards / "dataset.json", elsewhere)
    settings = [setting.format(shards=shards, elsewhere=elsewhere) for setting in data]
    with pytest.raises(UserError, match="evaluation.reference: .*vr-online fid stats.*folder"):
        check(shards, *settings)


@pytest.mark.parametrize("origin", ["https://host/digits", "s3://bucket/digits/dataset.json", "pipe:cat a.tar"])
def test_a_remote_reference_is_refused_as_such(origin):
    with pytest.raises(UserError, match="local.*fid stats"):
        open_source(origin)
