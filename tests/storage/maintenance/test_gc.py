"""Whole runs go, and what a kept run reaches stays, whoever computed it."""

import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from storage.delta.table import StoredTable
from storage.errors import PolicyAbsent, PolicyConflict, RunUnknown, StoreError, WorkRemoved
from storage.maintenance.plan import PolicyRetention, plan_removal
from storage.maintenance.sweep import carry_out
from storage.store import open_store
from tests.fixtures.histories import collect, contents, evaluate, finish, lasting, publish, thinned, train, work
from tests.fixtures.rows import append, messages

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("long_ago")]


def files(root):
    return {path.name for path in (root / "tables").rglob("run=*/*.parquet")}


def test_a_run_goes_and_what_another_shares_with_it_stays(root, store):
    train(store, "a", "xxxx")
    train(store, "b", "xxyy")
    before = contents(store, ["b"])
    going = plan_removal(store, ["b"])
    assert (going.removed, going.kept) == (("a",), ("b",))
    assert len(going.rows) == 8 and len(going.slices) == 2 * 3 and len(going.policies) == 2
    swept = carry_out(store, going)
    assert (swept.rows, swept.slices, swept.policies) == (8, 6, 2)
    for reader in (store, open_store(root)):
        assert contents(reader, ["b"]) == before
        lasting(reader, ["b"])
        assert reader.ledger.entries(run="a") == []
        assert [event.event for event in reader.runs.events("a")] == ["started", "finished", "removed"]
        assert reader.runs.latest() == "b"
        assert reader.scan("messages").collect().height == sum(
            piece.rows for entry in reader.ledger.entries() for piece in entry.slices("messages")
        )
    gone = {Path(file.path).name for piece in going.slices for file in piece.files}
    assert len(gone) == 6 and not gone & files(root)
    assert plan_removal(store, ["b"]).empty
    assert not list((root / "removals").iterdir())


def test_a_copy_of_the_directory_is_cut_down_to_one_run(root, store, tmp_path):
    train(store, "a", "xxxx")
    train(store, "b", "xxyy")
    evaluate(store, "trial", "training-xxx")
    copy = open_store(shutil.copytree(root, tmp_path / "copy"))
    collect(copy, "b", "trial")
    for there in (copy, open_store(tmp_path / "copy")):
        assert contents(there, ["b", "trial"]) == contents(store, ["b", "trial"])
        lasting(there, ["b"])
        assert there.policies.directory("training-xxx").is_relative_to(tmp_path / "copy")
    assert contents(store, ["a"]) and store.policies.directory("training-xxxx").is_dir(), "the original has all of it"


def test_runs_that_may_go_on_are_spared_unless_they_are_named(store):
    train(store, "done", "x")
    train(store, "open", "y", finished=False)
    train(store, "failed", "z", finished=False)
    store.runs.record(run="failed", event="failed", message="no luck")
    going = plan_removal(store, [])
    assert going.removed == ("done",)
    assert dict(going.protected) == {"open": "its last event is 'started'", "failed": "its last event is 'failed'"}
    assert plan_removal(store, [], force=["failed"]).removed == ("done", "failed")
    assert plan_removal(store, ["open"]).protected == (("failed", "its last event is 'failed'"),)


def test_a_run_that_just_finished_is_spared(store, monkeypatch):
    monkeypatch.setattr("storage.maintenance.plan.RECENT_HOURS", 1.0)
    train(store, "a", "x")
    assert dict(plan_removal(store, []).protected) == {"a": "it finished less than 1 h ago"}
    assert plan_removal(store, [], force=["a"]).removed == ("a",)


def test_names_are_checked(store):
    train(store, "a", "x")
    with pytest.raises(RunUnknown, match="no run b, c"):
        plan_removal(store, ["c"], force=["b"])


def test_another_process_sees_the_removal_and_computes_again(root, store):
    train(store, "a", "xx")
    elsewhere = open_store(root)
    assert elsewhere.ledger.find("rollout-xx") is not None
    collect(store)
    assert elsewhere.ledger.find("rollout-xx") is None
    train(elsewhere, "a", "xx")
    assert len(contents(open_store(root), ["a"])) == 4
    lasting(store, ["a"])


def test_whoever_found_work_before_it_went_cannot_take_it_over(root, store):
    train(store, "a", "x")
    elsewhere = open_store(root)
    found = elsewhere.ledger.find("rollout-x")
    assert found is not None
    collect(store)
    with pytest.raises(WorkRemoved, match="removed from the store meanwhile"):
        elsewhere.ledger.commit(replace(found, run="late"))
    assert open_store(root).ledger.entries() == []


def test_a_run_removed_while_it_works_cannot_commit_what_it_began_before(root, store):
    train(store, "a", "x", finished=False)
    elsewhere = open_store(root)
    began = datetime.now(UTC)
    made = append(elsewhere, 3, run="a", step=1, attempt="flying")
    collect(store, force=["a"])
    row = replace(work(store, "other", "o"), run="a", key="k", attempt="flying", outputs=(made,))
    with pytest.raises(WorkRemoved):
        elsewhere.ledger.commit(replace(row, started_at=began))
    later = datetime.now(UTC) + timedelta(seconds=1)
    assert elsewhere.ledger.commit(replace(row, started_at=later)).outputs == (made,)
    assert store.read([made]).equals(messages(3))  # what the ledger did not name is left to time


def test_a_row_that_is_committed_meanwhile_is_not_lost(root, store, monkeypatch):
    train(store, "a", "x")
    elsewhere = open_store(root)
    late = []
    replace_files = StoredTable.replace

    def replace_late(table, *arguments):
        if not late:
            late.append(work(elsewhere, "a", "late", 1))
        replace_files(table, *arguments)

    going = plan_removal(store, [])
    monkeypatch.setattr(StoredTable, "replace", replace_late)
    assert carry_out(store, going).rows == 2
    assert open_store(root).ledger.entries() == late
    assert store.read(late[0].outputs).equals(messages(2 + len("late") % 3))


def test_thinning_keeps_what_a_run_starts_from_and_goes_on_from(store):
    train(store, "a", "xxxxxx")  # versions 1 to 6; optimizer state with 1, 3, 5
    names = [f"training-{'x' * number}" for number in range(1, 7)]
    assert thinned(store, "a") == tuple(names[n - 1] for n in (2, 3, 4))
    assert thinned(store, "a", every=4) == tuple(names[n - 1] for n in (2, 3))
    assert thinned(store, "a", every=1) == ()
    evaluate(store, "tried", names[1])
    assert thinned(store, "a", "tried") == (names[2], names[3])
    train(store, "branch", "xxxy")
    assert thinned(store, "a", "tried", "branch") == (names[3],)


def test_policies_of_a_run_that_may_go_on_are_not_thinned(store):
    train(store, "a", "xxxxx", finished=False)
    assert thinned(store, "a") == ()
    finish(store, "a")
    assert len(thinned(store, "a")) == 3


def test_a_thinned_run_can_be_read_and_says_what_is_gone(root, store):
    train(store, "a", "xxxxx")
    before = contents(store, ["a"])
    swept = collect(store, "a", retention=PolicyRetention())
    assert (swept.rows, swept.slices, swept.policies) == (0, 0, 3)
    again = open_store(root)
    assert contents(again, ["a"]) == before
    assert again.policies.names() == ["training-x", "training-xxxxx"]
    with pytest.raises(PolicyAbsent, match=r"were removed on \S+ by `stagecoach gc --policies`"):
        again.policies.directory("training-xxx")


def test_thinned_weights_can_be_made_again_but_no_others_in_their_place(store):
    train(store, "a", "xxx")
    collect(store, "a", retention=PolicyRetention())
    assert store.policies.find("training-xx") is None
    scratch = store.policies.scratch("training-xx")
    (scratch / "model.safetensors").write_text("others")
    with pytest.raises(PolicyConflict):
        store.policies.publish(scratch, "training-xx")
    publish(store, "training-xx")
    lasting(store, ["a"])


@pytest.mark.parametrize(
    "text", ["", "every", "every:0", "every:x", "last:0", "last:2,", "all,last:2", "last,last:2", "some"]
)
def test_other_words_are_no_retention(text):
    with pytest.raises(StoreError, match="which policies to keep"):
        PolicyRetention.parse(text)
