import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vr_online.evaluation import claims
from vr_online.evaluation.claims import FILE, STALE_S, Claim, ClaimLost, claimed_steps, is_live

CONTENDER = """
import sys
from pathlib import Path
from vr_online.evaluation.claims import Claim
won = []
for step in range(60):
    claim = Claim.take(Path(sys.argv[1]) / str(step))
    if claim:
        won.append(step)  # kept: the claim file stays until this process ends, as of one at work
print(*won)
input()
"""


def test_every_step_goes_to_exactly_one_of_several_processes(tmp_path):
    for step in range(30):  # half of the steps lie there with a claim whose owner is dead
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / FILE).write_text(json.dumps({"host": socket.gethostname(), "pid": dead_pid(), "nonce": "x"}))
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for _ in range(3)
    ]
    won = [contender.stdout.readline().split() for contender in contenders]
    for contender in contenders:
        contender.communicate("\n")
    assert sorted(int(step) for steps in won for step in steps) == list(range(60))


def dead_pid() -> int:
    if not hasattr(dead_pid, "value"):
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        dead_pid.value = process.pid
    return dead_pid.value


def test_a_claim_is_exclusive_until_released(tmp_path):
    with Claim.take(tmp_path / "evals" / "5") as claim:
        assert Claim.take(tmp_path / "evals" / "5") is None
        assert claimed_steps(tmp_path) == {5}
        claim.check()
    assert claimed_steps(tmp_path) == set()
    Claim.take(tmp_path / "evals" / "5").release()


def test_an_untouched_claim_of_another_host_is_taken_over_and_its_owner_notices(tmp_path):
    first = Claim.take(tmp_path)
    record = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**record, "host": "elsewhere", "pid": dead_pid()}))
    assert Claim.take(tmp_path) is None, "fresh: its owner may be at work on the other host"
    long_ago = time.time() - STALE_S - 5
    os.utime(tmp_path / FILE, (long_ago, long_ago))
    second = Claim.take(tmp_path)
    assert second is not None
    with pytest.raises(ClaimLost, match="took this evaluation over"):
        first.check()
    first.release()
    assert is_live(tmp_path / FILE), "releasing a lost claim removed the new owner's"
    second.release()
    assert not (tmp_path / FILE).exists()


def test_the_owner_keeps_its_claim_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "TOUCH_S", 0.01)
    with Claim.take(tmp_path):
        os.utime(tmp_path / FILE, (1, 1))
        for _ in range(500):
            if (tmp_path / FILE).stat().st_mtime > 1:
                break
            time.sleep(0.01)
        assert is_live(tmp_path / FILE)


def test_a_half_written_claim_counts_while_it_is_young(tmp_path):
    (tmp_path / FILE).write_text('{"host": "a')
    assert Claim.take(tmp_path) is None
    os.utime(tmp_path / FILE, (1, 1))
    Claim.take(tmp_path).release()


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")])
def test_looking_at_claims_never_raises(tmp_path, monkeypatch, error):
    path = tmp_path / "evals" / "5" / FILE
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "nonce": "x"}))

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(Path, "touch", fail)
    assert claimed_steps(tmp_path) == {5}
    os.utime(path, (1, 1))
    assert claimed_steps(tmp_path) == set(), "nobody touched it for years"
    monkeypatch.setattr(Path, "stat", fail)
    assert is_live(path)
    monkeypatch.setattr(Path, "glob", fail)
    assert claimed_steps(tmp_path) == set()


def test_a_role_takes_over_what_its_earlier_process_left(tmp_path):
    first = Claim.take(tmp_path, owner="training")
    assert Claim.take(tmp_path) is None and Claim.take(tmp_path, owner="watcher") is None
    second = Claim.take(tmp_path, owner="training")
    assert second is not None
    with pytest.raises(ClaimLost):
        first.check()
    first.release()
    second.release()
    with Claim.take(tmp_path):
        assert Claim.take(tmp_path, owner="training") is None
