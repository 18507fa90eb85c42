"""The differences between two runs as artifacts of a flow run of a real Prefect."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.replays.loop import diff_markdown, diff_rows

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]


def test_a_flow_shows_the_differences_as_a_page_and_a_table(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.flows.programs.compared", str(tmp_path)],
        cwd=ROOT,
        env=kept | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    said = json.loads(line.removeprefix("SAID "))
    assert said["shown"].keys() == {"diff-base-spread", "diff-steps-base-spread"}
    assert said["shown"]["diff-base-spread"] == diff_markdown(said["found"])
    assert json.loads(said["shown"]["diff-steps-base-spread"]) == diff_rows(said["found"])
    assert "They part at step 0, stage advantage" in said["shown"]["diff-base-spread"]
