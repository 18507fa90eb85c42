"""Maintain as a Prefect flow, in a process with a Prefect API of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage.store import open_store
from tests.fixtures.histories import contents, train

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
from pathlib import Path
from flows.orchestration import server
server.begin(Path(sys.argv[1])).wait()
from flows.maintain import maintain
from storage.maintenance import plan
plan.RECENT_HOURS = 0.0
done = maintain(store=sys.argv[2], retention_hours="24", keep_last=1, policies="last")
print("DONE", json.dumps(done))
"""


def test_a_scheduled_round(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    train(store, "old", "xy")
    train(store, "new", "xxx")
    before = contents(store, ["new"])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "prefect"), str(tmp_path / "store")]
    done = subprocess.run(
        command, env={**kept, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.rpartition("DONE")[2])
    assert found["gc"]["removed"] == ["old"]
    assert (found["gc"]["done"]["rows"], found["gc"]["done"]["policies"]) == (4, 2)
    assert {each["table"] for each in found["tables"]} == {"messages", "policies", "ledger", "runs"}
    again = open_store(tmp_path / "store")
    assert contents(again, ["new"]) == before
    assert {entry.run for entry in again.ledger.entries()} == {"new"}
