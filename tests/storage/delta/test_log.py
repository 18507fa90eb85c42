"""The log that we write: the table library reads from it what we do, whoever else commits, prunes or dies."""

import os
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from storage.delta import snapshot
from storage.delta.log import Log
from storage.delta.snapshot import prune_log
from storage.delta.table import PRUNE_INTERVAL, CommitConflict, StoredTable
from storage.maintenance.compact import compact, remove_temporary
from storage.roots import Root
from storage.store import open_store
from tests.fixtures.rows import append, entry, messages


def fill(store, numbers):
    for number in numbers:
        key = f"key-{number}"
        piece = append(store, 2, step=number, key=key, attempt=key)
        store.ledger.commit(entry(key, outputs=(piece,), step=number))


def library(table, root):
    return DeltaTable(str(root / table.place))


def check_same(table, root):
    """Assert that the library sees the files and numbers that a table has in memory, and that one opened anew has."""
    delta = library(table, root)
    seen = {(row["path"], row["size_bytes"], row["min.attempt"], row["max.attempt"]) for row in added(delta)}
    for each in (table, StoredTable(open_store(root).root, table.name, table.schema)):
        each.refresh()
        assert each.version == delta.version()
        assert {(f.path, f.size, f.first_attempt, f.last_attempt) for f in each.active_files()} == seen
        for name in ("ledger", "compaction", "nobody"):
            assert each.transaction_version(name) == (delta.transaction_version(name) or 0)


def added(delta):
    return pa.table(delta.get_add_actions(flatten=True)).to_pylist()


def test_the_library_reads_what_we_wrote(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "RETAINED_MINUTES", 0)
    store = open_store(root := tmp_path / "plain")  # Polars finds no Delta table below a space
    tables = store.slices.table("messages"), store.ledger.table
    for table in tables:
        table.active_files()  # from here on moved forward, and never read again
    for first in range(0, 48, 8):
        fill(store, range(first, first + 8))
        if first == 24:
            compact(store, tables[0])
            prune_log(store.root, tables[0].place)
        for table in tables:
            check_same(table, root)
    rows = pl.scan_delta(str(root / "tables/messages")).sort("step", "seq").collect()
    read = pa.RecordBatchReader.from_stream(library(tables[0], root).scan()).read_all()
    assert rows.equals(pl.DataFrame(read).sort("step", "seq"))
    wanted = pl.DataFrame(pa.concat_tables([messages(2)] * 48))
    assert rows.select(wanted.columns).equals(wanted)
    assert pl.scan_delta(str(root / "tables/ledger")).collect().height == 48


def test_checkpoints_are_whole_and_small(store, root):
    fill(store, range(45))
    names = [path.name for path in sorted((root / "tables/ledger/_delta_log").glob("*.checkpoint.parquet"))]
    assert [int(name[:20]) for name in names] == [9, 19, 29, 39]
    columns = pq.read_schema(root / "tables/ledger/_delta_log" / names[-1]).names
    assert columns == ["add", "metaData", "protocol", "txn"]
    # Without the versions before, as pruning leaves it.
    for path in (root / "tables/ledger/_delta_log").iterdir():
        if path.name < names[-1]:
            path.unlink()
    check_same(store.ledger.table, root)
    assert len(open_store(root).ledger.entries()) == 45


def test_a_handle_left_behind_loses_no_commit(store, root, monkeypatch):
    behind = open_store(root).slices.table("messages")
    behind.refresh()
    fill(store, range(PRUNE_INTERVAL))
    monkeypatch.setattr(snapshot, "RETAINED_MINUTES", 0)
    table = store.slices.table("messages")
    assert prune_log(store.root, table.place) > 0
    assert not (root / table.place / f"_delta_log/{behind.version + 1:020d}.json").exists()
    rows = open_store(root).slices.table("messages").read(table.active_files()[0].path)
    behind.append(rows, "late")
    assert behind.version == PRUNE_INTERVAL + 1
    assert [each.run for each in behind.active_files()].count("late") == 1
    check_same(behind, root)
    with pytest.raises(CommitConflict):  # what it saw when the number was chosen is no longer known
        stale = open_store(root).slices.table("messages")
        stale._snapshot.version = 3
        stale.append(rows, "late", {"ledger": 1})
    check_same(behind, root)


def test_others_in_between_do_not_matter_unless_they_have_the_same_number(store, root):
    fill(store, range(1))
    one, other = (open_store(root).slices.table("messages") for _ in range(2))
    rows = one.read(one.active_files()[0].path)
    for table in (one, other):
        table.refresh()
    one.append(rows, "plain")
    other.append(rows, "numbered", {"a": 1})
    one.append(rows, "another", {"b": 1})
    with pytest.raises(CommitConflict):
        one._snapshot.version -= 2
        one.append(rows, "same", {"a": 1})
    check_same(one, root)
    assert sorted(each.run for each in one.active_files()) == ["another", "numbered", "plain", "run"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_is_passed_on_and_nothing_is_lost(store, root, monkeypatch, when):
    fill(store, range(2))
    create = Log.create

    def interrupt(log, version, actions):
        if when == "after":
            create(log, version, actions)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Log, "create", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.ledger.commit(entry("k"))
    assert store.ledger.commit(entry("k")) == entry("k")
    assert [each.key for each in open_store(root).ledger.entries()].count("k") == 1
    check_same(store.ledger.table, root)


def test_drafts_of_the_dead_are_seen_by_nobody_and_swept(store, root):
    fill(store, range(3))
    draft = root / "tables/messages/_delta_log/.00000000000000000004.json.0123"
    draft.write_text('{"commitInfo":')
    assert library(store.slices.table("messages"), root).version() == 3
    fill(open_store(root), range(3, 5))
    check_same(store.slices.table("messages"), root)
    assert remove_temporary(store.root) == 0, "a young one may be somebody's"
    os.utime(draft, (0, 0))
    assert remove_temporary(store.root) == 1 and not draft.exists()


def test_pruning_leaves_no_gap(store, root, monkeypatch):
    fill(store, range(35))
    log = root / "tables/messages/_delta_log"
    for path in log.iterdir():
        os.utime(path, (0, 0))
    os.utime(log / f"{5:020d}.json")
    deleted = []
    original = Root.delete
    monkeypatch.setattr(Root, "delete", lambda self, path: (deleted.append(path), original(self, path))[1])
    assert prune_log(store.root, "tables/messages") == 5
    assert [int(Path(path).name[:20]) for path in deleted] == [0, 1, 2, 3, 4]
    assert store.slices.table("messages").refresh() == 35
