"""A ledger that was lost: nothing is deleted, repair names it and rebuilds what the files of the tables prove."""

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

import pyarrow.compute as pc
import pytest

from configs.run import RunConfig
from flows.runtime import loop
from flows.runtime.resolve_run import source_of
from flows.runtime.session import Session, record_run
from flows.services.base import Supervisor
from storage.maintenance.brake import MIN_FILES
from storage.maintenance.plan import plan_removal
from storage.maintenance.sweep import carry_out
from storage.store import open_store
from tasks.runtime.run_context import RunContext
from tasks.training import policy as policy_import
from tasks.training import stage as training
from tests.fixtures import builders, rehearsal, replays
from tests.fixtures.builders import table
from tests.fixtures.commands import run_command
from tests.fixtures.histories import age, policy_row
from tests.fixtures.rows import messages


def imported(tables, config, *, key, source, directory):
    shutil.copytree(source, directory, dirs_exist_ok=True)
    return {"policies": policy_row(key, 0, None, False)}


def trained(tables, config, *, step, key, policy, directory):
    builders.model(directory, key.encode())
    made = rehearsal.trained(tables, config, step=step, key=key, policy=policy)
    statistics = [
        {"sample_id": sample, "logprobs": [-1.0] * (end - begin), "entropies": [0.5] * (end - begin)}
        for row in tables["batches"].table(["sample_ids", "cu_seqlens"]).to_pylist()
        for sample, (begin, end) in zip(row["sample_ids"], pairwise(row["cu_seqlens"]), strict=False)
    ]
    policies = policy_row(key, step + 1, policy.key, True)
    return made | {"policies": policies, "token_statistics": table("token_statistics", statistics)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A store with a run of two steps with weights, and a replay of it."""
    place = tmp_path_factory.mktemp("whole")
    model = builders.model(place / "model")
    with pytest.MonkeyPatch.context() as patch:
        for stage, function in ((policy_import.STAGE, imported), (training.STAGE, trained)):
            patch.setitem(rehearsal.STAND_INS, stage.name, builders.stand_in(stage, function))
        store = open_store(place / "store")
        settings = rehearsal.SMALL | {"name": "base", "store": str(place / "store")}
        settings["model"] = settings["model"] | {"path": str(model)}
        config = RunConfig.model_validate(settings)
        session = Session(RunContext(store, "base", config, {}), source_of(config), Supervisor("base", place / "logs"))
        with record_run(session):
            for _ in loop.train_steps(rehearsal.Rehearsal(session), session.source):
                pass
        replays.walk(replays.ask(place / "store", overrides=[replays.RLOO], name="again"))
    return place / "store"


@pytest.fixture(autouse=True)
def long_ago(monkeypatch):
    monkeypatch.setattr("storage.maintenance.plan.RECENT_HOURS", 0.0)


@pytest.fixture
def root(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "store")
    age(tmp_path / "store", 1000)
    return tmp_path / "store"


@pytest.fixture
def call(root, capsys):
    """A function that runs a command on the store."""
    return lambda *argv: run_command(capsys, *argv, "--store", str(root))


def lose(root, table, with_head):
    shutil.rmtree(root / "tables" / table)
    if with_head:
        (root / "heads" / f"{table}.json").unlink()


def facts(entry):
    """All that a row says but for its times, versions and attempts of slices without rows."""
    outputs = [(piece.table, piece.run, piece.rows, piece.digest, piece.files) for piece in entry.outputs]
    return replace(entry, started_at=None, finished_at=None, versions={}, outputs=(), attempt=""), sorted(outputs)


@pytest.mark.parametrize("with_head", [True, False])
def test_a_lost_ledger_is_named_and_rebuilt(root, with_head, call):
    before = [facts(entry) for entry in open_store(root).ledger.entries()]
    files = {path for path in root.rglob("*") if path.is_file() and "tables/ledger" not in str(path)}
    lose(root, "ledger", with_head)
    status, said = call("repair")
    assert status == 1 and "lost rows: run 'base' finished, the ledger has no row of it" in said
    for command in (("maintain",), ("gc", "--remove", "again", "--yes"), ("gc", "--keep-last", "1", "--yes")):
        status, said = call(*command)
        assert status == 2 and "run 'base' finished, the ledger has no row of it" in said and "--trust-ledger" in said
    assert not {path for path in files if not path.exists() and "heads" not in str(path)}
    status, said = call("repair", "--deep")
    assert status == 0 and "rows of the ledger of run 'base'" in said
    assert sorted(map(str, map(facts, open_store(root).ledger.entries()))) == sorted(map(str, before))
    assert call("repair", "--deep") == (0, "nothing is wrong\n")
    assert call("maintain")[0] == 0
    assert {entry.run for entry in open_store(root).ledger.entries()} == {"base", "again"}


def test_what_no_file_proves_is_named(root, call):
    lose(root, "ledger", with_head=True)
    lose(root, "verdicts", with_head=False)
    status, said = call("repair", "--deep")
    assert status == 1
    assert "not rebuilt: run 'base': 2 results have no rows in the tables, or no weights: filtering of step 0" in said
    stages = {entry.stage for entry in open_store(root).ledger.entries(run="base")}
    assert "rollout" in stages and "filtering" not in stages


@pytest.mark.parametrize("with_head", [True, False])
def test_lost_events_of_runs_are_named(root, with_head, call):
    lose(root, "runs", with_head)
    status, said = call("repair", "--deep")
    assert status == 1 and "rows of run 'base', the table runs has no event of it" in said
    status, said = call("gc", "--remove", "base", "--yes")
    assert status == 2 and "--trust-ledger" in said
    assert call("gc", "--remove", "base", "--yes", "--trust-ledger")[0] == 0


def test_the_nightly_maintenance_has_the_same_brake(root):
    from flows.maintain import MaintenanceParameters, maintain

    lose(root, "ledger", with_head=True)
    weights = open_store(root).policies.names()
    ended = maintain.fn(advanced=MaintenanceParameters(store=str(root), retention_hours=0))
    assert ended.is_failed() and "the ledger has no row of it" in ended.message
    assert open_store(root).policies.names() == weights


def test_rollouts_that_are_not_all_there_are_rebuilt_as_a_part(root, call):
    (rollout,) = (entry for entry in open_store(root).ledger.entries(run="base", stage="rollout") if entry.step == 1)
    lose(root, "ledger", with_head=True)
    traces = open_store(root).slices.table("traces")
    (file,) = (file for file in traces.active_files() if file.path == rollout.slices("traces")[0].files[0].path)
    rows = traces.read(file.path)
    traces.replace([file], [rows.filter(pc.not_equal(rows["group_id"], rows["group_id"][-1]))], "base")
    for _ in range(2):  # the second time nothing is added
        call("repair", "--deep")
        (part,) = (entry for entry in open_store(root).ledger.entries(run="base", stage="rollout") if entry.step == 1)
        assert (part.key, part.part) == (rollout.key, rollout.attempt)


def test_a_table_of_which_most_would_go_is_left_alone(root, call):
    store = open_store(root)
    named = len(store.slices.table("messages").active_files())
    for number in range(named + MIN_FILES):
        place = {"run": "base", "step": 0, "key": "unknown", "attempt": f"dead-{number}"}
        store.append("messages", messages(), **place)
    age(root, 1000)
    total = 2 * named + MIN_FILES
    for command in (("maintain",), ("repair",)):
        status, said = call(*command)
        assert status and f"the ledger does not name {named + MIN_FILES} of {total} files of table 'messages'" in said
    assert call("maintain", "--trust-ledger")[0] == 0
    assert len(open_store(root).slices.table("messages").active_files()) == named


def test_work_is_not_forgotten_while_the_ledger_is_in_doubt(root, call):
    store = open_store(root)
    entry = next(entry for entry in store.ledger.entries(run="again", stage="packing"))
    (root / "tables" / "batches" / entry.outputs[0].files[0].path).unlink()
    rows = {(entry.key, entry.part) for entry in store.ledger.entries(run="base")}
    store.ledger.remove("base", rows, datetime.now(UTC))
    status, said = call("repair", "--forget")
    assert status == 2 and "run 'base' finished, the ledger has no row of it" in said
    assert entry.row_id in {each.row_id for each in open_store(root).ledger.entries()}
    call("repair", "--forget", "--trust-ledger")
    assert entry.row_id not in {each.row_id for each in open_store(root).ledger.entries()}


def test_a_removal_that_was_cut_off_is_no_lost_ledger(root, call):
    store = open_store(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.runs, "record", lambda **event: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            carry_out(store, plan_removal(store, ["base"]))
    assert not open_store(root).ledger.entries(run="again")
    assert call("gc", "--yes")[0] == 0
    assert open_store(root).runs.last_event("again") == "removed"
    assert call("maintain")[0] == 0
