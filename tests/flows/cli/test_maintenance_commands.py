"""The commands that keep a store in order: what they say, ask and refuse, and what they leave alone."""

import json
from datetime import UTC, datetime

import pytest

from flows.runtime.maintenance import MEASUREMENTS
from storage.errors import SliceExpired
from storage.schemas.stage_tables import STAGE_TABLES
from storage.store import open_store
from tasks.stage_tasks import TASKS
from tests.fixtures.commands import cases, file_bytes
from tests.fixtures.faults import spoil
from tests.fixtures.histories import age, contents, finish, train, two_runs


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A store with two runs that share a step, and a log directory of each."""
    place = two_runs(tmp_path_factory.mktemp("keeping") / "store")
    for run in ("old", "new"):
        (place / "logs" / run).mkdir(parents=True)
        (place / "logs" / run / "engine.log").write_text("...")
    return place


@pytest.mark.parametrize(
    "command",
    [
        "maintain --dry-run",
        "maintain --dry-run --retain token_statistics=0h --retention-hours 0 --json",
        "gc --keep new --policies last --dry-run",
        "gc --dry-run --keep-last 1 --json",
        "gc --keep new",  # without --yes
        "repair --dry-run --deep",
        "repair --deep",  # nothing is wrong
    ],
)
def test_what_changes_nothing(root, command, call):
    before = file_bytes(root)
    call(*command.split())
    assert file_bytes(root) == before


def test_gc_says_what_goes_and_removes_it(root, call):
    kept = contents(open_store(root), ["new"])
    status, said = call("gc", "--keep", "new", "--policies", "last", "--yes")
    assert status == 0
    assert "removed: old\n" in said and "kept: new\n" in said and "done: rows: 4\n" in said
    assert "done: slices: 3\n" in said and "done: policies: 2\n" in said and "slice bytes: " in said
    store = open_store(root)
    assert contents(store, ["new"]) == kept and store.ledger.entries(run="old") == []
    assert [path.name for path in (root / "logs").iterdir()] == ["new"]
    plan = json.loads(call("gc", "--keep", "new", "--yes", "--json")[1])
    assert (plan["removed"], plan["done"]["rows"]) == ([], 0)


def test_gc_finishes_an_interrupted_removal_only_with_yes(root, call):
    store = open_store(root)
    _, rollout = store.ledger.entries(run="old", stage="rollout")
    record = {"slices": [rollout.outputs[0].to_row()], "policies": [], "runs": ["old"]}
    store.root.write("removals/x.json", json.dumps(record).encode())
    # The process died after it deleted the rows.
    rows = {(entry.key, entry.part) for entry in store.ledger.entries(run="old")}
    store.ledger.remove("old", rows, datetime.now(UTC))
    before = file_bytes(root)
    said = call("gc")[1]
    assert "unfinished removals: 1\n" in said and said.endswith("\nnothing was removed; --yes removes it for good\n")
    assert file_bytes(root) == before
    assert "done: slices: 1\n" in call("gc", "--yes")[1]
    assert call("gc")[1].endswith("\nnothing was removed\n")


@cases(__file__, "maintenance")
def test_what_is_refused(root, argv, words, call):
    train(open_store(root), "open", "z", finished=False)
    before = file_bytes(root)
    status, said = call(*argv.split())
    assert status == 2 and words in said and "Traceback" not in said
    assert file_bytes(root) == before


def test_forced_retention_of_a_table_that_stages_read(root, call):
    status, said = call("maintain", "--retain", "messages=0h", "--force")
    assert status == 0
    assert "expired:" in said and "messages" in said
    store = open_store(root)
    with pytest.raises(SliceExpired):
        contents(store, ["new"])
    assert len(store.read(store.ledger.entries(run="new", stage="training")[0].slices("policies"))) == 1


def unlink_output(root, stage, number):
    """Delete the file of messages that a result of run `new` wrote; return its key."""
    entry = open_store(root).ledger.entries(run="new", stage=stage)[number]
    (root / "tables/messages" / entry.outputs[0].files[0].path).unlink()
    return entry.key


def test_repair_tells_what_can_be_done_again(root, call):
    trained, _ = unlink_output(root, "training", 1), unlink_output(root, "rollout", 1)
    status, printed = call("repair")
    assert status == 1 and "stagecoach repair --forget" in printed and "of lost work other work was made" in printed
    damaged = json.loads(call("repair", "--json")[1])["damaged"]
    assert {(row["stage"], row["step"], row["lost"]) for row in damaged} == {
        ("training", 1, False),
        ("rollout", 1, True),
    }
    assert all(row["runs"] == ["new"] and row["what"].startswith("tables/messages/") for row in damaged)
    status, printed = call("repair", "--forget", "--json")
    assert status == 1 and [row["lost"] for row in json.loads(printed)["damaged"]] == [True, False]
    assert open_store(root).ledger.find(trained) is None
    train(open_store(root), "new", "xxx")
    (row,) = json.loads(call("repair", "--json")[1])["damaged"]
    assert (row["stage"], row["runs"], row["step"]) == ("rollout", ["new"], 1)


def test_repair_puts_back_what_a_table_that_lost_its_newest_commits_lacks(root, call):
    before = contents(open_store(root), ["old", "new"])
    newest = max((root / "tables/messages/_delta_log").glob("*.json"))
    spoil(newest, None)
    question = ["sql", "select count(*) from messages", "--store", str(root)]
    assert call(*question)[0] == 2
    age(root, 200)
    call("maintain")
    status, said = call("repair", "--dry-run")
    assert status == 1 and "it does not hold 1 slices that the ledger names" in said
    status, said = call("repair", "--json")
    (log,) = json.loads(said)["repaired_logs"]
    assert status == 0 and log["damage"]["table"] == "messages" and len(log["restored"]) == 1
    assert call(*question)[0] == 0
    assert contents(open_store(root), ["old", "new"]) == before


def test_repair_forgets_nothing_while_a_run_may_be_at_work(root, call):
    unlink_output(root, "training", 2)
    store = open_store(root)
    store.runs.record(run="new", event="resumed")
    status, message = call("repair", "--forget")
    assert status == 2 and "new may be at work" in message
    finish(store, "new")
    assert call("repair", "--forget")[0] == 0


def test_keep_last_keeps_the_newest(root, call):
    train(open_store(root), "newest", "z")
    plan = json.loads(call("gc", "--keep-last", "2", "--json")[1])
    assert (plan["removed"], plan["kept"]) == (["old"], ["new", "newest"])


def test_only_measurements_may_go_without_being_missed():
    assert {*MEASUREMENTS} < {table.name for table in STAGE_TABLES}
    # The metrics of a step are written with it.
    stages = [task.stage for name, tasks in TASKS.items() if name != "metrics" for task in tasks]
    assert not [stage for stage in stages if {*MEASUREMENTS} & ({*stage.reads, *stage.optional} - {*stage.writes})]
