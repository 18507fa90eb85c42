"""Damage that a store does not survive by itself, each shown to be so, then mended with nothing lost that was whole."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from storage.delta.snapshot import prune_log
from storage.errors import DamagedSlice, StoreError, StoreUnavailable
from storage.maintenance.compact import compact
from storage.maintenance.repair import (
    forget,
    inspect_logs,
    inspect_policies,
    inspect_slices,
    inspect_tables,
    plan_forget,
    repair_logs,
    repair_tables,
)
from storage.read.frames import Frames
from storage.roots import Root, open_root
from storage.schemas.system_tables import LEDGER
from storage.store import open_store
from tests.fixtures.dying import die_at
from tests.fixtures.faults import happened, spoil
from tests.fixtures.histories import add, age, collect, contents, fill, finish, lasting, train, work
from tests.fixtures.rows import append, entry

pytestmark = pytest.mark.engine

RUNS = ("a",)


def mended(root):
    place = open_root(str(root))
    return repair_logs(place, inspect_logs(place))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A store whose logs are long enough to have been pruned up to the last checkpoint but one, and what it holds."""
    root = tmp_path_factory.mktemp("original") / "my store"
    store = open_store(root)
    store.runs.record(run="a", event="started", kind="train", config={})
    for step in range(26):
        work(store, "a", f"key-{step}", step)
    finish(store, "a")
    age(root, 1)
    for name in ("messages", "ledger"):
        assert prune_log(store.root, f"tables/{name}") > 0
    return root, contents(store, RUNS)


@pytest.fixture
def long(root, original):
    """The same store at this test's root; what it holds."""
    shutil.copytree(original[0], root)
    return original[1]


def log(root, table):
    return root / "tables" / table / "_delta_log"


def last(root, table, ending):
    return max(log(root, table).glob(f"*{ending}"))


def cut(path, keep):
    spoil(path, path.read_bytes()[:keep])


def whole_again(root, before):
    store = open_store(root)
    assert contents(store, RUNS) == before
    assert store.scan("messages").collect().height == sum(rows[0].num_rows for rows in before.values())
    work(store, "a", "one more", 99)
    assert len(open_store(root).ledger.entries()) == len(before) + 1
    assert inspect_logs(store.root) == [] and inspect_slices(store, deep=True) == []


CHECKPOINT, POINTER = ".checkpoint.parquet", "_last_checkpoint"


@pytest.mark.fault(
    "log", "the last checkpoint is cut or gone, or its pointer is cut", "repair makes the table whole again"
)
@pytest.mark.parametrize(
    ("table", "ending", "keep"),
    [
        *((table, CHECKPOINT, keep) for table in ("messages", "ledger") for keep in (None, 0, 200)),
        ("messages", POINTER, 0),
        ("messages", POINTER, 10),
    ],
)
def test_a_truncated_or_missing_checkpoint(root, long, table, ending, keep):
    path = last(root, table, ending)
    spoil(path, None if keep is None else path.read_bytes()[:keep])
    if keep is None:
        assert contents(open_store(root), RUNS) == long, "the one before it and the commits since hold the same"
    (one,) = mended(root)
    damaged = (path.name, POINTER) if ending == CHECKPOINT and keep is not None else (POINTER,)
    assert one.damage.files == damaged and one.damage.lost_versions == ()
    assert (Path(one.quarantine) / POINTER).is_file()
    whole_again(root, long)


@pytest.mark.fault("log", "the pointer to the last checkpoint is gone", "nothing is wrong")
def test_a_missing_pointer_is_no_damage(root, long):
    spoil(log(root, "messages") / "_last_checkpoint", None)
    assert mended(root) == []
    whole_again(root, long)


@pytest.mark.fault("log", "the last commit is cut at the end of a line", "repair brings its row back")
def test_a_last_commit_cut_at_the_end_of_a_line_would_be_believed(root, long):
    commit = last(root, "ledger", ".json")
    spoil(commit, commit.read_bytes().splitlines(keepends=True)[0])
    delta = DeltaTable(str(log(root, "ledger").parent))  # which says nothing: finished work is not there any more
    assert pc.sum(pa.table(delta.get_add_actions())["num_records"]).as_py() == 25
    (one,) = mended(root)
    assert one.damage.lost_versions == (int(commit.name[:20]),) and len(one.restored) == 1
    whole_again(root, long)


@pytest.mark.fault("log", "the last commit is cut", "repair brings its rows back")
@pytest.mark.parametrize("keep", [0, 40])
@pytest.mark.parametrize("table", ["messages", "ledger"])
def test_a_truncated_last_commit_goes_and_its_rows_come_back(root, long, table, keep):
    cut(last(root, table, ".json"), keep)
    (one,) = mended(root)
    assert len(one.damage.lost_versions) == len(one.restored) == 1
    whole_again(root, long)


@pytest.mark.fault("log", "the last commit is cut, a dead process left rows of its work", "each row is there once")
@pytest.mark.parametrize("lost", [2, 3])
def test_rows_that_a_dead_process_left_do_not_stand_beside_those_of_the_work_done_again(root, store, lost):
    table = store.ledger.table

    def leave(key, attempt):
        made = append(store, 2, run="a", step=1, key=key, attempt=attempt)
        left = entry(key, run="a", outputs=(made,), step=1, attempt=attempt)
        table.write([pa.Table.from_pylist([left.to_row()], LEDGER.arrow).drop_columns("run")], "a")
        happened(f"{key} by {attempt} has a file and no commit")
        return left

    work(store, "a", "first", 0)
    leave("again", "died")
    nobody = leave("by nobody again", "died")
    work(store, "a", "again", 1)
    work(store, "a", "last", 2)
    before = contents(store, RUNS)
    cut(log(root, "ledger") / f"{lost:020d}.json", 40)
    mended(root)
    again = open_store(root)
    after = contents(again, RUNS)
    assert after == before | {nobody.row_id: after[nobody.row_id]}  # finished work, as good as one whose commit is lost
    ledger = DeltaTable(str(log(root, "ledger").parent))
    assert pc.sum(pa.table(ledger.get_add_actions())["num_records"]).as_py() == len(after) == 4


@pytest.mark.fault("log", "a commit in the middle is gone", "repair brings its rows and those after it back")
@pytest.mark.parametrize("table", ["messages", "ledger"])
def test_a_commit_missing_in_the_middle(root, long, table):
    commits = sorted(log(root, table).glob("*.json"))
    checkpoint = last(root, table, ".checkpoint.parquet").name[:20]
    after = [commit for commit in commits if commit.name[:20] > checkpoint]
    assert len(after) > 2
    spoil(after[1], None)
    with pytest.raises(StoreError):
        contents(open_store(root), RUNS)
        open_store(root).slices.table(table)
    (one,) = mended(root)
    assert len(one.damage.files) == len(after) - 2
    assert len(one.restored) == len(after) - 1
    whole_again(root, long)


@pytest.mark.fault("log", "the newest commits of a stage table are gone", "no scan is silent, repair puts them back")
def test_missing_newest_commits_of_a_stage_table(root, long):
    commits = sorted(log(root, "messages").glob("*.json"))[-2:]
    for commit in commits:
        spoil(commit, None)
    assert mended(root) == [], "the log by itself looks whole"
    store = open_store(root)
    assert contents(store, RUNS) == long, "stages read the files that the ledger names"
    for scan in (lambda: store.scan("messages"), lambda: Frames(open_store(root))["messages"]):
        with pytest.raises(DamagedSlice, match="does not hold 2 slices that the ledger names"):
            scan()
    lacking = inspect_tables(store)
    assert [len(each.restored) for each in repair_tables(store, lacking)] == [2]
    assert inspect_tables(store) == []
    whole_again(root, long)


@pytest.mark.fault("log", "the newest commit of a compacted table is gone", "no scan is silent, repair puts it back")
@pytest.mark.parametrize(("key", "part"), [("135", ""), ("21", ".3")], ids=["work", "a part among others of its work"])
def test_merged_files_do_not_hide_that_a_slice_is_not_held(root, store, key, part):
    for each in range(10, 18):
        add(store, f"{each}")
    for each in (1, 5):
        add(store, "21", part=f".{each}")
    table = store.slices.table("messages")
    assert compact(store, table) == 10
    add(store, key, part=part)
    whole = contents(store, RUNS)
    (merged,) = [each for each in table.active_files() if each.first_attempt != each.last_attempt]
    spoil(last(root, "messages", ".json"), None)
    store = open_store(root)
    lost = store.slices.table("messages").active_files()
    assert [each.path for each in lost] == [merged.path]
    with pytest.raises(DamagedSlice, match="does not hold 1 slices that the ledger names"):
        store.scan("messages")
    (mended_table,) = repair_tables(store, inspect_tables(store))
    assert len(mended_table.restored) == 1
    assert inspect_tables(open_store(root)) == []
    assert contents(open_store(root), RUNS) == whole


@pytest.mark.fault("log", "a commit that a checkpoint holds is cut, and then the newest", "repair loses nothing")
def test_a_damaged_commit_that_a_checkpoint_holds_does_not_stop_a_repair(root, long):
    held = max(log(root, "ledger").glob("*.checkpoint.parquet")).name.replace(".checkpoint.parquet", ".json")
    for commit in (log(root, "ledger") / held, last(root, "ledger", ".json")):
        spoil(commit, commit.read_bytes()[:40])
    (found,) = mended(root)
    assert len(found.restored) == len(found.damage.lost_versions) == 1
    whole_again(root, long)


@pytest.mark.fault("log", "the log of a stage table is gone", "no scan is silent, repair makes it anew")
def test_a_log_that_is_gone_is_not_taken_for_a_table_without_rows(root, long):
    shutil.rmtree(log(root, "messages"))
    happened("the directory of the log is gone")
    with pytest.raises(StoreUnavailable, match="the log is missing"):
        _ = Frames(open_store(root))["messages"]
    mended(root)
    assert Frames(open_store(root))["messages"].collect().height == sum(rows[0].num_rows for rows in long.values())
    whole_again(root, long)


@pytest.mark.fault("log", "all files of a log are cut", "repair makes the log anew")
def test_a_log_that_is_gone_is_made_anew_from_what_the_ledger_names(root, long):
    for path in log(root, "messages").iterdir():
        cut(path, 5)
    (one,) = mended(root)
    assert len(one.restored) == 26
    whole_again(root, long)


def test_nothing_wrong_nothing_touched(root, long):
    before = open_root(str(root)).file_sizes("")
    assert inspect_logs(open_root(str(root))) == [] and mended(root) == []
    store = open_store(root)
    assert inspect_slices(store, deep=True) == inspect_policies(store, deep=True) == []
    assert store.root.file_sizes("") == before


@pytest.mark.usefixtures("long_ago")
def test_rows_that_gc_removed_do_not_come_back(root, store):
    train(store, "gone", "yy")
    train(store, "a", "xx")
    collect(store, "a")
    before = contents(store, RUNS)
    store.ledger.commit(store.ledger.entries(run="a")[0])
    work(store, "late", "late")
    cut(last(root, "ledger", ".json"), 0)
    mended(root)
    again = open_store(root)
    assert contents(again, RUNS) == before
    assert [entry.run for entry in again.ledger.entries() if entry.run != "a"] == ["late"]


@pytest.mark.usefixtures("long_ago")
def test_a_removal_whose_commit_is_lost_is_done_again(root, store):
    train(store, "gone", "yy")
    train(store, "a", "xx")
    work(store, "a", "one more", 2)  # the removal is not the version that a checkpoint repeats
    collect(store, "a")
    before = contents(store, RUNS)
    cut(last(root, "ledger", ".json"), 30)
    with pytest.raises(StoreError, match="is damaged"):  # else four rows would be there again, naming what is gone
        open_store(root)
    (one,) = mended(root)
    assert one.removed_again == 4
    again = open_store(root)
    assert contents(again, RUNS) == before and inspect_slices(again) == []
    assert {entry.run for entry in again.ledger.entries()} == {"a"}


def first_file(root, piece):
    return root / "tables" / piece.table / piece.files[0].path


HARM = {
    "missing": (lambda path: spoil(path, None), "FileNotFoundError", False),
    "short": (lambda path: cut(path, 30), "has 30 bytes instead of", False),
    "other": (lambda path: spoil(path, path.read_bytes()[:-9] + b"x" + path.read_bytes()[-8:]), "SHA-256", True),
}


@pytest.mark.fault(
    "files",
    "a data file is gone, short or altered",
    "the work is forgotten where it can be done again, and comes out the same",
)
@pytest.mark.parametrize(("harm", "words", "deep"), HARM.values(), ids=HARM)
def test_damaged_work_that_can_be_done_again_is_forgotten_and_done_again(root, store, harm, words, deep):
    train(store, "a", "xx")
    train(store, "b", "xx")
    before = contents(store, ["a", "b"])
    entry = store.ledger.entries(run="a", stage="training")[0]
    harm(first_file(root, entry.outputs[0]))
    with pytest.raises(DamagedSlice):
        contents(open_store(root), ["b"])
    again = open_store(root)
    if deep:
        assert inspect_slices(again) == []
    (damage,) = inspect_slices(again, deep=deep)
    assert words in damage.what
    assert {each.run for each in damage.entries} == {"a", "b"} and damage.stage == "training"

    kept = plan_forget(again, [damage], repeatable=["advantage"])
    assert kept.rows == () and kept.lost == (damage,)  # other work was made of it, and it would not come out the same
    forgetting = plan_forget(again, [damage], repeatable=["training"])
    assert forget(again, forgetting) == 2
    assert again.ledger.find(entry.key) is None
    assert inspect_slices(again, deep=True) == []
    for run in ("a", "b"):
        train(again, run, "xx")
    after = contents(open_store(root), ["a", "b"])
    assert {row: [table.num_rows for table in tables] for row, tables in after.items()} == {
        row: [table.num_rows for table in tables] for row, tables in before.items()
    }
    lasting(again, ["a", "b"])


def test_work_by_chance_is_done_again_while_nothing_was_made_of_it(root, store):
    train(store, "a", "x")
    last_work = work(store, "a", "nobody built on it", 1)
    first_file(root, last_work.outputs[0]).unlink()
    (damage,) = inspect_slices(store)
    forgetting = plan_forget(store, [damage], repeatable=())
    assert forgetting.lost == () and forget(store, forgetting) == 1
    assert store.ledger.find("nobody built on it") is None


@pytest.mark.fault("files", "the last byte of weights is another", "repair finds it, training is done again")
def test_damaged_weights_are_found_forgotten_and_made_again(root, store):
    train(store, "a", "xx")
    weights = root / "policies" / "training-x" / "model.safetensors"
    spoil(weights, weights.read_bytes()[:-1] + b"?")
    assert inspect_policies(store) == []
    (damage,) = inspect_policies(store, deep=True)
    assert "SHA-256 differs" in damage.what
    forget(store, plan_forget(store, [damage], repeatable=["training"]))
    train(store, "a", "xx")
    lasting(store, ["a"])
    assert inspect_policies(store, deep=True) == []


def test_a_slice_that_compaction_moved_is_not_missing(root, store):
    pieces = fill(store, 6)
    compact(store, store.slices.table("messages"))
    for piece in pieces:
        first_file(root, piece).unlink()
    assert inspect_slices(store, deep=True) == []


def die_after(moment, root):
    """Repair up to its n-th change of a file; False where it ended before."""
    files = [(Root, name) for name in ("write", "create", "replace", "delete")]
    return die_at(2 * moment - 1, lambda: mended(root), files)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A store with one checkpoint and two commits after it, and what it holds."""
    root = tmp_path_factory.mktemp("short") / "my store"
    store = open_store(root)
    for step in range(11):
        work(store, "a", f"key-{step}", step)
    return root, contents(store, RUNS)


HARMED = {
    "lose_the_last_commits": lambda root, table: cut(last(root, table, ".json"), 30),
    "lose_the_logs": lambda root, table: shutil.rmtree(log(root, table)),
    "lose_commits_in_the_middle": lambda root, table: (log(root, table) / f"{10:020d}.json").unlink(),
    "damage_the_checkpoints": lambda root, table: cut(last(root, table, ".checkpoint.parquet"), 100),
}


def harm_both(root, harm):
    for table in ("ledger", "messages"):
        HARMED[harm](root, table)


@pytest.mark.fault("repair", "repair dies after each of its changes", "called again it ends the same")
@pytest.mark.parametrize("harm", HARMED)
def test_killed_at_any_moment_and_called_again_it_ends_the_same(root, short, harm):
    shutil.copytree(short[0], damaged := root.parent / "damaged")
    harm_both(damaged, harm)
    moment, killed = 1, True
    while killed:
        shutil.copytree(damaged, root)
        killed = die_after(moment, root)
        if (root / "quarantine/unfinished.json").exists():
            with pytest.raises(StoreError, match="a repair of this store has not ended"):
                open_store(root)
        mended(root)
        store = open_store(root)
        assert contents(store, RUNS) == short[1]
        assert len(store.slices.table("messages").active_files()) == 11
        assert inspect_logs(store.root) == []
        shutil.rmtree(root)
        moment += 1 if moment < 12 else 9  # what is moved one by one, then some of the rows that are put back
    assert moment > 6
    happened(f"died after each of {moment} changes")


@pytest.mark.fault("repair", "repair dies three times", "called again it ends the same")
def test_killed_again_and_again_it_goes_on(root, long):
    harm_both(root, "lose_the_last_commits")
    for moment in (4, 3, 5):
        assert die_after(moment, root)
    happened("died after its 4th, 3rd and 5th change")
    assert len(list((root / "quarantine").iterdir())) == 2, "one directory for all of them, and what is to be done"
    mended(root)
    whole_again(root, long)
    assert mended(root) == []
