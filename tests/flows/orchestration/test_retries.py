"""What Prefect calls again: a stage whose store did not answer for a moment, and not one whose user has to mend it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]


def test_a_stage_is_called_again_only_where_that_can_help_and_leaves_its_rows_once(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.flows.programs.retried", str(tmp_path)],
        cwd=ROOT,
        env=kept | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    said = json.loads(line.removeprefix("SAID "))
    assert said["calls"] == {"passes": 3, "stays": 1, "lasts": 3}
    assert said["raised"] == {"stays": "ValueError", "lasts": "StoreUnavailable"}
    assert said["entries"] == [["passes", 0]]
    assert said["written"] == 2 * said["rows"], "one call wrote its rows and could not name them in the ledger"
    assert said["seen"] == said["rows"] > 0
