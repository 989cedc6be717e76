import json
import os
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from vr_online import doctor
from vr_online.cli import main


def by_name(text):
    return {check["name"]: check for check in json.loads(text)}


def test_quick_checks_pass_here_and_print_json_alone(tmp_path, capsys):
    assert main(["doctor", "--quick", "--json", "--run-dir", str(tmp_path / "not" / "yet")]) == 0
    checks = by_name(capsys.readouterr().out)
    assert {"python", "packages", "torch pair", "devices", "compiler", "extras", "disk"} <= set(checks)
    assert "launch" not in checks
    assert all(c["status"] in ("ok", "warn") for c in checks.values())
    assert all(c["advice"] for c in checks.values() if c["status"] != "ok")
    assert not (tmp_path / "not").exists()


def test_one_failed_check_fails_the_command_and_says_what_to_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "check_disk", lambda folder: doctor.Check("disk", "fail", "full", "free space"))
    assert main(["doctor", "--quick", "--run-dir", str(tmp_path)]) == 1
    assert "fail  disk: full -> free space" in capsys.readouterr().out.splitlines()


def test_a_check_that_breaks_is_a_failure_and_the_others_go_on(tmp_path, monkeypatch):
    def broken():
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "check_devices", broken)
    checks = {c.name: c for c in doctor.diagnose(tmp_path, quick=True)}
    assert checks["devices"].status == "fail" and "no such thing" in checks["devices"].found
    assert checks["disk"].status in ("ok", "warn")


@pytest.mark.parametrize("version, status", [((3, 9, 1), "fail"), ((3, 10, 0), "ok"), ((3, 13, 2), "ok"), ((3, 14, 0), "fail")])
def test_python_versions(monkeypatch, version, status):
    monkeypatch.setattr(sys, "version_info", version)
    assert doctor.check_python().status == status


def test_a_package_that_does_not_import_is_named_with_its_reason(monkeypatch):
    real = doctor.importlib.import_module

    def without_tensorboard(name):
        if name == "tensorboard":
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real(name)

    monkeypatch.setattr(doctor.importlib, "import_module", without_tensorboard)
    check = doctor.check_packages()
    assert check.status == "fail" and "tensorboard (ModuleNotFoundError" in check.found and "pip install" in check.advice


def test_a_torch_that_does_not_fit_its_torchvision(monkeypatch):
    import torchvision.ops

    def mismatched(*_):
        raise RuntimeError("operator torchvision::nms does not exist\nlong trace")

    monkeypatch.setattr(torchvision.ops, "nms", mismatched)
    check = doctor.check_torch_pair()
    assert check.status == "fail" and "nms does not exist" in check.found and "long trace" not in check.found


@pytest.mark.parametrize("lacking", ["ninja", "compiler"])
def test_missing_build_tools_only_warn(tmp_path, monkeypatch, lacking):
    tool = tmp_path / {"ninja": "c++", "compiler": "ninja"}[lacking]
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    check = doctor.check_compiler()
    assert check.status == "warn" and lacking in check.found and tool.name not in check.found


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert doctor.check_disk(tmp_path).status in ("ok", "warn")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    check = doctor.check_disk(tmp_path / "file")
    assert check.status == "fail" and str(tmp_path / "file") in check.found


def test_little_room_warns(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40, 2**30))
    check = doctor.check_disk(tmp_path)
    assert check.status == "warn" and "1.0 GiB" in check.found


def test_small_shared_memory_warns(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(os.path, "isdir", lambda _: True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64 * 2**20, 0, 64 * 2**20))
    check = doctor.check_shared_memory()
    assert check.status == "warn" and "64 MiB" in check.found and "--shm-size" in check.advice


def test_processes_that_never_finish_are_ended(tmp_path, monkeypatch):
    pid_file = tmp_path / "pid"
    script = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    monkeypatch.setattr(doctor, "_SMOKE_TIMEOUT_S", 3)
    check = doctor.check_launch([sys.executable, "-c", script])
    assert check.status == "fail" and "did not finish" in check.found
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_processes_that_fail_show_their_error():
    check = doctor.check_launch([sys.executable, "-c", "raise RuntimeError('no route to host')"])
    assert check.status == "fail" and "RuntimeError: no route to host" in check.found


def test_processes_that_end_well_but_never_agree_are_a_failure():
    assert doctor.check_launch([sys.executable, "-c", "pass"]).status == "fail"


def test_launch_works_with_neither_compiler_nor_ninja(tmp_path, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sh", "env", "uname", "hostname", "lscpu", "ls", "nproc"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    assert doctor.check_compiler().status == "warn"
    check = doctor.check_launch()
    assert (check.status, check.advice) == ("ok", ""), check.found
    assert not list(Path(tmp_path).glob("extensions/**/*.so"))
