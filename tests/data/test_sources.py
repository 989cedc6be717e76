"""Opening shards: files, an HTTP server that misbehaves, commands."""

import http.server
import threading
import time
from pathlib import Path

import pytest

from vr_online.data import sources
from vr_online.data.shard import ShardError
from vr_online.data.sources import Access, find_shards, open_source, read_bytes
from vr_online.errors import UserError

from tests.data.shards_on_disk import data_config, write_shards

PAYLOAD = bytes(i * i % 251 for i in range(300_000))
QUICK = Access(timeout=0.3, retries=3)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(sources, "BACKOFF", 0.001)


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves PAYLOAD; `server.faults` holds what goes wrong with each request in turn."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        fault = self.server.faults.pop(0) if self.server.faults else None
        self.server.ranges.append(self.headers.get("Range"))
        if isinstance(fault, int):
            self.send_error(fault)
            return
        if fault == "slow":
            time.sleep(0.6)
        self._answer(fault)

    def _answer(self, fault):
        wanted = self.headers.get("Range") if self.server.honours_ranges else None
        body = PAYLOAD[int(wanted[len("bytes=") : -1]) :] if wanted else PAYLOAD
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body[: len(body) // 2] if fault in ("drop", "stall") else body)
            if fault == "stall":
                self.wfile.flush()
                time.sleep(0.6)
        except OSError:
            pass
        self.close_connection = True


@pytest.fixture
def server():
    class Server(http.server.ThreadingHTTPServer):
        faults: list = []
        ranges: list = []
        honours_ranges = True

    running = Server(("127.0.0.1", 0), Handler)
    running.faults, running.ranges = [], []
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    running.url = f"http://127.0.0.1:{running.server_port}/shard.tar"
    yield running
    running.shutdown()
    running.server_close()
    thread.join()


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("faults", [[], ["drop"], ["drop", "drop", 503, "drop"], ["slow"], ["stall", 500], [429, "drop"]])
def test_every_byte_arrives_whatever_goes_wrong_on_the_way(server, faults, ranges):
    server.faults, server.honours_ranges = list(faults), ranges
    assert read_bytes(server.url, Access(timeout=0.3, retries=6)) == PAYLOAD
    assert len(server.ranges) == len(faults) + 1


def test_a_retry_asks_for_the_rest_only(server):
    server.faults = ["drop"]
    read_bytes(server.url, QUICK)
    assert server.ranges == [None, f"bytes={len(PAYLOAD) // 2}-"]


def test_giving_up_names_the_address_and_the_reason(server):
    server.faults = [503] * 10
    with pytest.raises(ShardError, match=r"shard.tar: reading failed 4 times at byte 0: HTTP status 503"):
        read_bytes(server.url, QUICK)
    assert len(server.ranges) == QUICK.retries + 1


def test_what_no_retry_can_mend_fails_at_once(server):
    server.faults = [404]
    with pytest.raises(ShardError, match="shard.tar: .*HTTP status 404"):
        read_bytes(server.url, QUICK)
    assert len(server.ranges) == 1


def test_no_server_at_all(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(ShardError, match="reading failed 4 times"):
        read_bytes(server.url, QUICK)


def test_waits_double(monkeypatch):
    waits = []
    monkeypatch.setattr(sources, "BACKOFF", 0.5)
    monkeypatch.setattr(sources.time, "sleep", waits.append)
    with pytest.raises(ShardError):
        read_bytes("http://127.0.0.1:9/none.tar", Access(timeout=1, retries=4))
    assert waits == [0.5, 1, 2, 4]


def test_local_files(tmp_path):
    (tmp_path / "a.tar").write_bytes(PAYLOAD)
    for location in (f"{tmp_path}/a.tar", f"file:{tmp_path}/a.tar", f"file://{tmp_path}/a.tar"):
        assert read_bytes(location) == PAYLOAD
    with pytest.raises(ShardError, match="b.tar: cannot read the shard: No such file"):
        open_source(f"{tmp_path}/b.tar")


class TestPipe:
    allowed = Access(allow_pipe=True, timeout=0.3, retries=2)

    def test_is_refused_unless_allowed(self, tmp_path):
        with pytest.raises(ShardError, match="data.allow_pipe=true"):
            open_source(f"pipe:touch {tmp_path}/ran")
        assert not (tmp_path / "ran").exists()

    def test_gives_the_output(self, tmp_path):
        (tmp_path / "a.tar").write_bytes(PAYLOAD)
        assert read_bytes(f"pipe:cat {tmp_path}/a.tar", self.allowed) == PAYLOAD

    def test_a_command_that_breaks_is_run_again_from_where_it_was(self, tmp_path):
        (tmp_path / "a.tar").write_bytes(PAYLOAD)
        command = f"if [ -e {tmp_path}/once ]; then cat {tmp_path}/a.tar; else touch {tmp_path}/once; head -c 1234 {tmp_path}/a.tar; exit 3; fi"
        assert read_bytes(f"pipe:{command}", self.allowed) == PAYLOAD

    def test_failure_and_silence_are_reported(self):
        with pytest.raises(ShardError, match="3 times at byte 2: the command ended with exit status 7"):
            read_bytes("pipe:echo a; exit 7", self.allowed)
        with pytest.raises(ShardError, match="gave no bytes for 0.3 s"):
            read_bytes("pipe:exec sleep 5", self.allowed)

    def test_may_be_left_early(self):
        source = open_source("pipe:yes", self.allowed)
        assert source.read(10)
        source.close()


def test_object_stores_go_through_their_commands(tmp_path, monkeypatch):
    (tmp_path / "aws").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "gsutil").write_text('#!/bin/sh\necho "$@"\n')
    for tool in ("aws", "gsutil"):
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert read_bytes("s3://bucket/a.tar", QUICK) == b"s3 cp --only-show-errors s3://bucket/a.tar -\n"
    assert read_bytes("gs://bucket/a.tar", QUICK) == b"cat gs://bucket/a.tar\n"


def test_a_missing_tool_or_an_unknown_address_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ShardError, match="s3://bucket/a.tar: .*'aws'; is the tool installed"):
        read_bytes("s3://bucket/a.tar", QUICK)
    with pytest.raises(ShardError, match="gopher://x/a.tar: unknown kind of address"):
        read_bytes("gopher://x/a.tar", QUICK)


class TestFindShards:
    @pytest.fixture
    def folder(self, tmp_path):
        self.info = write_shards(tmp_path, [3, 4, 5])
        return tmp_path

    def find(self, folder, shards, **changes):
        return find_shards(data_config(folder, shards=shards, **changes), self.info)

    def test_a_folder_has_all_shards(self, folder):
        found = self.find(folder, str(folder))
        assert [(s.name, s.count) for s in found] == list(self.info.shards.items())
        assert all(Path(s.location).is_file() for s in found)
        assert self.find(folder, "http://host/data/")[0].location == "http://host/data/shard-00000.tar"

    def test_lists_and_braces_may_name_some_in_any_order(self, folder):
        names = [s.name for s in self.find(folder, [f"{folder}/shard-0000{{2,0}}.tar"])]
        assert names == ["shard-00000.tar", "shard-00002.tar"]
        assert [s.name for s in self.find(folder, f"{folder}/shard-{{00000..00002}}.tar")] == list(self.info.shards)

    def test_commands_name_their_shard(self, folder):
        [shard] = self.find(folder, [f"pipe:cat '{folder}/shard-00001.tar' | cat"], allow_pipe=True)
        assert (shard.name, shard.count) == ("shard-00001.tar", 4)
        with pytest.raises(UserError, match="allow_pipe"):
            self.find(folder, [f"pipe:cat {folder}/shard-00001.tar"])

    def test_unknown_and_repeated_shards_are_refused(self, folder):
        with pytest.raises(UserError, match="other.tar' names none of the 3 shards"):
            self.find(folder, [f"{folder}/other.tar"])
        with pytest.raises(UserError, match="'shard-00001.tar' is listed twice"):
            self.find(folder, [f"{folder}/shard-00001.tar"] * 2)

    def test_missing_and_short_files_are_found_at_start(self, folder):
        (folder / "shard-00000.tar").unlink()
        data = (folder / "shard-00002.tar").read_bytes()
        (folder / "shard-00002.tar").write_bytes(data[:2048])
        with pytest.raises(ShardError, match="shard-00000.tar: missing; .*shard-00002.tar: truncated: 2048 bytes are too few for 5"):
            self.find(folder, str(folder))
        assert len(self.find(folder, str(folder), on_error="skip")) == 3

    def test_relative_paths(self, folder, monkeypatch):
        monkeypatch.chdir(folder)
        for shards in (".", "./", ["shard-00000.tar"], ["./shard-00000.tar"]):
            assert self.find(folder, shards)[0].name == "shard-00000.tar"
