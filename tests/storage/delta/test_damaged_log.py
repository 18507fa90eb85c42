"""Damage in a table's log is damaged or missing, and never taken for a log without that commit."""

from itertools import product

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType

from storage.delta.log import CHECKPOINT, head_path
from storage.errors import SchemaError, StoreError, StoreUnavailable
from storage.maintenance.repair import inspect_logs
from storage.roots import Root
from storage.store import open_store
from tests.fixtures.faults import happened, spoil
from tests.fixtures.histories import finish, work
from tests.fixtures.rows import entry

TABLES = ("ledger", "runs", "messages")


@pytest.fixture
def filled(store):
    """A store with events, rows and finished work, beyond the first checkpoint."""
    store.runs.record(run="a", event="started", kind="train", config={})
    for step in range(12):
        work(store, "a", f"key-{step}", step)
    for _ in range(12):
        finish(store, "a")
    return store


def contents(root):
    """How much there is of the three tables: for a store that is opened anew."""
    store = open_store(root)
    files = store.slices.table("messages").active_files()
    return len(store.ledger.entries()), len(store.runs.events("a")), len(files)


def newest(root, table, ending=".json"):
    return max((root / "tables" / table / "_delta_log").glob(f"*{ending}"))


def is_not_opened(root, words):
    for read_only in (False, True):
        with pytest.raises(StoreUnavailable, match=words):
            open_store(root, read_only=read_only)


def flips(data, number):
    """Yield the bytes with one bit flipped, at places spread over all of them."""
    for place in range(number):
        flipped = bytearray(data)
        flipped[place * len(data) // number] ^= 1 << place % 8
        yield bytes(flipped)


@pytest.mark.fault(
    "log",
    "one bit of a commit, a checkpoint or a head is flipped, at 40 places",
    "the damage is reported, or the same is read",
)
@pytest.mark.parametrize(
    ("file", "table"),
    [*product(("commit", "checkpoint"), TABLES), ("head", "ledger"), ("head", "runs")],
)
def test_one_flipped_bit_is_said_or_changes_nothing(root, filled, table, file):
    before = contents(root)
    endings = {"commit": ".json", "checkpoint": CHECKPOINT}
    path = root / head_path(table) if file == "head" else newest(root, table, endings[file])
    data, said = path.read_bytes(), 0
    for damaged in flips(data, 40):
        spoil(path, damaged)
        try:
            assert contents(root) == before
        except StoreUnavailable as error:
            said += 1
            assert "stagecoach repair" in error.do
            assert str(path.relative_to(root)).split("/")[1].removesuffix(".json") in error.where
    assert said >= 39  # of a word that nobody reads, such as that of the digest in a head, one may go unseen
    spoil(path, data)
    assert contents(root) == before


HARM = {
    "nothing left": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "first line alone": lambda data: data.splitlines(keepends=True)[0],
    "without its end": lambda data: data[:-1],
    "a hole": lambda data: data[:40] + b"\0" * 60 + data[100:],
    "another size": lambda data: data.replace(b'"size":', b'"size":1', 1),
    "unlinked": lambda data: None,
}


@pytest.mark.fault("log", "the newest commit of the ledger is damaged", "it is said that it is damaged or missing")
@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_the_newest_commit_of_the_ledger(root, filled, harm):
    path = newest(root, "ledger")
    spoil(path, harm(path.read_bytes()))
    is_not_opened(root, f"commit {int(path.stem)} is (damaged|missing)")


@pytest.mark.fault("log", "the log or the directory of a table is gone", "the store is not opened as one without rows")
@pytest.mark.parametrize("gone", ["_delta_log", "."])
def test_a_log_that_is_gone_is_no_new_table(root, filled, gone):
    (root / "tables/ledger" / gone).rename(root.parent / "elsewhere")
    happened(f"tables/ledger/{gone} is elsewhere")
    is_not_opened(root, "commit 0 is missing")
    (root / "tables/messages/_delta_log").rename(root.parent / "another")
    (root.parent / "elsewhere").rename(root / "tables/ledger" / gone)
    with pytest.raises(StoreUnavailable, match="the log is missing"):
        open_store(root).slices.table("messages")


@pytest.mark.fault("process", "a process dies as it makes the first table of a store", "the next one makes it")
def test_a_table_that_was_about_to_be_made_is_made(root):
    open_store(root)
    log = root / "tables/ledger/_delta_log"
    log.mkdir(parents=True)
    (log / f".{0:020d}.json.draft").write_text("{")
    happened(f"{log.name} holds a draft alone")
    work(open_store(root), "a", "key")
    assert len(open_store(root).ledger.entries()) == 1


@pytest.mark.fault("log", "the table of quarantines is gone", "it is not one without records")
def test_a_table_of_records_that_is_gone_is_not_one_without_records(root, filled):
    filled.quarantines.record(["t"], where="reward > 1", reason="unfit")
    (root / "tables/quarantines").rename(root.parent / "elsewhere")
    happened("tables/quarantines is elsewhere")
    with pytest.raises(StoreUnavailable, match="commit 0 is missing"):
        open_store(root).quarantines.all()


def test_a_head_that_is_behind_is_no_damage(root, filled, monkeypatch):
    """A process died between a commit and its head, or the disk was full; a loss of power leaves an empty one."""
    head = root / head_path("ledger")
    behind = head.read_bytes()
    with monkeypatch.context() as patch:
        replace = Root.replace

        def full(self, path, data, durable=True):
            if path == head_path("ledger"):
                raise StoreError("no space left")
            replace(self, path, data, durable)

        patch.setattr(Root, "replace", full)
        filled.ledger.commit(entry("late"))
    assert head.read_bytes() == behind
    for text in (behind, b"", None):
        head.unlink() if text is None else head.write_bytes(text)
        assert len(open_store(root).ledger.entries()) == 13


def test_the_library_may_append_and_reads_what_we_append(tmp_path):
    store = open_store(root := tmp_path / "plain")
    store.ledger.commit(entry("one"))
    table = store.ledger.table
    rows = table.read(table.active_files()[0].path).append_column("run", pa.array(["other"], pa.string()))
    write_deltalake(str(root / table.place), rows.select(table.schema.names).cast(table.schema), mode="append")
    assert {each.run for each in open_store(root).ledger.entries()} == {"run", "other"}
    open_store(root).ledger.commit(entry("two"))
    assert pl.scan_delta(str(root / table.place)).collect().height == 3
    assert len(open_store(root).ledger.entries()) == 3


def test_a_table_that_another_program_altered_is_refused_until_it_is_put_right(tmp_path):
    """Also by a process that has it open, however often it tries again."""
    store = open_store(tmp_path / "plain")
    store.ledger.commit(entry("one"))
    table = store.ledger.table
    place = tmp_path / "plain" / table.place
    DeltaTable(str(place)).alter.add_columns([Field("more", PrimitiveType("string"))])
    for _ in range(3):
        for look in (table.refresh, lambda: store.ledger.commit(entry("two"))):
            with pytest.raises(SchemaError, match="another program altered the table: metaData") as caught:
                look()
    assert DeltaTable(str(place)).version() == 2
    assert caught.value.where == f"{place}/_delta_log"
    with pytest.raises(SchemaError, match="another program altered the table: metaData"):
        open_store(tmp_path / "plain")


@pytest.mark.parametrize("has_columns", [False, True], ids=["nothing", "other columns"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(root, filled, has_columns):
    before = contents(root)
    last = newest(root, "ledger")
    torn = last.with_name(last.stem + CHECKPOINT)
    torn.write_bytes(b"")
    if has_columns:
        pq.write_table(pa.table({"add": [1]}), torn)
    assert contents(root) == before
    (damage,) = inspect_logs(filled.root)
    assert damage.files == (torn.name,)


def test_a_table_is_opened_anew_from_the_versions_that_are_there(root, filled):
    """Not from those in memory, which a repair has taken out."""
    other = open_store(root).slices.table("messages")
    for _ in range(2):
        newest(root, "messages").unlink()
    assert other.refresh() == 10 == int(newest(root, "messages").stem)
    assert len(other.active_files()) == 10
