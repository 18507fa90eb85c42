"""The image of a sandbox: what it is made of, what is said of one in which an agent is root, and a real one."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from configs.run import RunConfig
from flows.runtime.machine_facts import container_notes

FILE = Path(__file__).parents[2] / "deploy" / "sandbox" / "Dockerfile"


def with_runtime(**runtime: Any) -> RunConfig:
    environment = {"name": "any", "taskset": {"id": "any"}, "runtime": runtime}
    return RunConfig.model_validate({"environments": [environment]})


def program(directory: Path, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program called docker first that answers what images name as their user."""
    file = directory / "docker"
    file.write_text(f"#!/bin/sh\n[ $1-$2 = image-inspect ] || exit 3\n{answer}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("answer", "noted"),
    [("echo", True), ("echo root", True), ("echo 0:0", True), ("echo agent", False), ("exit 1", False)],
)
def test_an_image_whose_agent_is_root_is_noted(
    answer: str, noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, answer, monkeypatch)
    notes = list(container_notes(with_runtime(type="docker", image="mine")))
    assert bool(notes) == noted
    assert not noted or "environments.0.runtime: image mine names no user but root" in notes[0]
    assert list(container_notes(with_runtime(type="subprocess"))) == []


def test_reference_files_are_the_images_own_and_the_agent_is_nobody_of_rank() -> None:
    lines = [line for line in FILE.read_text().splitlines() if line and not line.startswith("#")]
    assert any(re.match(r"COPY --chown=root:root reference/", line) for line in lines)
    assert "RUN chmod -R a-w,a+rX /reference" in lines
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users == ["agent"], "and nobody becomes root again"
    assert lines.index("USER agent") > max(number for number, line in enumerate(lines) if line.startswith("RUN"))


def runs_containers() -> bool:
    docker = shutil.which("docker")
    return bool(docker) and subprocess.run([docker, "info"], capture_output=True).returncode == 0


@pytest.mark.engine
def test_an_agent_cannot_change_what_its_work_is_compared_with(tmp_path: Path) -> None:
    if not runs_containers():
        pytest.skip("no container runtime answers here")
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "answer.txt").write_text("42")
    name = "stagecoach-sandbox-test"
    subprocess.run(["docker", "build", "-q", "-f", str(FILE), "-t", name, str(tmp_path)], check=True)
    tried = (
        "id -u; cat /reference/answer.txt; echo 7 > /reference/answer.txt; rm -f /reference/answer.txt; mv /reference x"
    )
    try:
        done = subprocess.run(
            ["docker", "run", "--rm", "--network=none", name, "sh", "-c", f"{tried}; cat /reference/answer.txt"],
            capture_output=True,
            text=True,
        )
        assert done.stdout.splitlines() == ["1000", "4242"]
        assert list(container_notes(with_runtime(type="docker", image=name))) == []
    finally:
        subprocess.run(["docker", "image", "rm", name], capture_output=True)
