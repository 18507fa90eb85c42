"""The image of a sandbox: what it is made of, and a real one."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.fixtures.containers import container_engine

FILE = Path(__file__).parents[2] / "deploy" / "sandbox" / "Dockerfile"


def test_reference_files_are_the_images_own_and_the_agent_is_nobody_of_rank():
    lines = [line for line in FILE.read_text().splitlines() if line and not line.startswith("#")]
    assert any(re.match(r"COPY --chown=root:root reference/", line) for line in lines)
    assert "RUN chmod -R a-w,a+rX /reference" in lines
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users == ["agent"], "and nobody becomes root again"
    assert lines.index("USER agent") > max(number for number, line in enumerate(lines) if line.startswith("RUN"))


@pytest.mark.engine
def test_an_agent_cannot_change_what_its_work_is_compared_with(tmp_path):
    if container_engine() != "docker":
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
    finally:
        subprocess.run(["docker", "image", "rm", name], capture_output=True)
