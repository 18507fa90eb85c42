"""Programs with an embedded Prefect: stages called again, a scheduled maintenance."""

import pytest

from storage.store import open_store
from tests.fixtures.histories import contents, train
from tests.fixtures.programs import said_by
from tests.fixtures.rehearsal import rehearse
from tests.fixtures.replays import ask, replay

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_a_stage_is_called_again_only_where_that_can_help_and_leaves_its_rows_once(tmp_path):
    said = said_by("-m", "tests.fixtures.programs.retried", str(tmp_path))
    assert said["calls"] == {"passes": 3, "stays": 1, "lasts": 3}
    assert said["raised"] == {"stays": "ValueError", "lasts": "StoreUnavailable"}
    assert said["entries"] == [["passes", 0]]
    assert said["written"] == 2 * said["rows"], "one call wrote its rows and could not name them in the ledger"
    assert said["seen"] == said["rows"] > 0


MAINTAIN = """
import json, sys
from pathlib import Path
from flows.orchestration import server
server.begin(Path(sys.argv[1])).wait()
from flows.maintain import maintain
from storage.maintenance import plan
plan.RECENT_HOURS = 0.0
advanced = {"store": sys.argv[2], "retention_hours": "24", "policies": "last"}
done = maintain(keep_last=1, dry_run="false", advanced=advanced)
print("SAID", json.dumps(done))
"""


@pytest.mark.nightly
def test_a_scheduled_round(tmp_path, root):
    store = open_store(root)
    train(store, "old", "xy")
    train(store, "new", "xxx")
    before = contents(store, ["new"])
    found = said_by("-c", MAINTAIN, str(tmp_path / "prefect"), str(root))
    assert found["gc"]["removed"] == ["old"]
    assert (found["gc"]["done"]["rows"], found["gc"]["done"]["policies"]) == (4, 2)
    assert {each["table"] for each in found["tables"]} == {"messages", "policies", "ledger", "runs"}
    again = open_store(root)
    assert contents(again, ["new"]) == before
    assert {entry.run for entry in again.ledger.entries()} == {"new"}


def rows_made(root, run):
    """Return the key and the digests of a run's finished stages."""
    entries = open_store(root).ledger.entries(run=run)
    return {entry.stage: [entry.key, *(piece.digest for piece in entry.outputs)] for entry in entries}


def test_worker_processes_of_dask_make_the_rows_that_the_flow_makes(tmp_path):
    here, there, noted = (tmp_path / name for name in ("here", "there", "noted"))
    noted.mkdir()
    changed = ["packing.tokens_per_row=64"]
    for root in (here, there):
        rehearse(root, "base", steps=1)
    replay(here, name="again", from_stage="filtering", overrides=changed)
    config = ask(there, name="again", from_stage="filtering", overrides=[*changed, "prefect.task_runner=dask"])
    said = said_by("-m", "tests.fixtures.programs.on_workers", str(noted), config.model_dump_json())
    assert said == ["advantage", "filtering", "metrics", "packing"], "what other processes did"
    assert rows_made(there, "again") == rows_made(here, "again")
    assert rows_made(here, "again").keys() >= {"filtering", "advantage", "packing"}
