"""The ledger: one row for each piece of work, whoever commits it, however often and whatever is lost on the way.

Buffered work: all of it or nothing becomes visible, once, whatever fails on the way.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from storage.delta.table import StoredTable
from storage.errors import StoreUnavailable, WorkRemoved
from storage.ledger import CommitBuffer, Ledger
from storage.refs import Entry, File, Slice
from storage.slices import Slices
from storage.store import Store, open_store
from tests.fixtures.rows import entry, messages
from tests.fixtures.writer import race_writers

LATER = timedelta(seconds=1)
ANYWHERE = pytest.mark.parametrize("root", ["local", pytest.param("s3", marks=pytest.mark.engine)], indirect=True)


def test_an_entry_survives_the_way_through_a_row() -> None:
    piece = Slice("messages", "run", "attempt", 3, "digest", (File("run=run/x.parquet", 10, "abc"),))
    full = replace(entry("k", outputs=(piece, piece)), section={"b": [1, None], "a": 0.1}, versions={"torch": "2"})
    assert Entry.from_row(full.to_row()) == full


@ANYWHERE
def test_what_is_committed_is_found_by_everyone(store: Store, root: Path) -> None:
    elsewhere = open_store(root)
    assert elsewhere.ledger.find("k") is None
    mine = entry("k")
    assert store.ledger.commit(mine) == mine
    assert elsewhere.ledger.find("k") == mine
    assert open_store(root).ledger.find("k") == mine


@ANYWHERE
def test_the_same_row_again_is_not_appended(store: Store) -> None:
    first = store.ledger.commit(entry("k", attempt="first"))
    version = store.ledger.table.refresh()
    assert store.ledger.commit(entry("k", attempt="second")) == first
    assert store.ledger.table.refresh() == version


@ANYWHERE
def test_find_prefers_the_run_s_own_row_and_else_the_earliest(store: Store) -> None:
    now = entry().finished_at
    late = store.ledger.commit(entry("k", run="late", finished_at=now + LATER))
    early = store.ledger.commit(entry("k", run="early", finished_at=now))
    part = store.ledger.commit(entry("other", run="late", part="p"))
    assert store.ledger.find("k") == early
    assert store.ledger.find("k", run="late") == late
    assert store.ledger.find("k", run="nobody") == early
    assert store.ledger.find("other") is None
    assert store.ledger.parts("other") == [part]


@ANYWHERE
def test_parts_and_entries_are_listed(store: Store) -> None:
    for part in ("b", "a", ""):
        store.ledger.commit(entry("k", part=part))
    store.ledger.commit(entry("k", run="branch", part="a", finished_at=entry().finished_at + LATER))
    store.ledger.commit(entry("l", stage="packing", step=1))
    assert [(e.part, e.run) for e in store.ledger.parts("k")] == [("a", "run"), ("b", "run")]
    assert [e.key for e in store.ledger.entries(stage="packing")] == ["l"]
    assert len(store.ledger.entries(run="run")) == 4
    assert len(store.ledger.entries()) == 5


def test_a_look_reads_only_what_is_new(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = open_store(root)
    for number in range(15):
        store.ledger.commit(entry(f"key-{number}"))
    assert elsewhere.ledger.find("key-14") is not None
    read: list[str] = []
    original = StoredTable.load
    monkeypatch.setattr(StoredTable, "load", lambda self, path: (read.append(path), original(self, path))[1])
    store.ledger.commit(entry("new"))
    assert elsewhere.ledger.find("new") is not None
    assert len(read) == 1  # the new file, by the other: who wrote it knows what is in it
    assert elsewhere.ledger.find("new") is not None
    assert len(read) == 1


def test_an_application_transaction_is_accepted_once_at_a_look(root: Path, store: Store) -> None:
    """Two handles that looked at the same state: the second append must lose, look again and return the first's row."""
    other = open_store(root)
    other.ledger.find("k")
    stale = other.ledger.table.version
    first = store.ledger.commit(entry("k", attempt="first"))
    real = other.ledger.table.new_files
    looks: list[int] = []

    def blind(since: int | None) -> tuple[list[str], int]:
        looks.append(1)
        return ([], stale) if len(looks) == 1 else real(since)  # the first look is before the other's commit

    other.ledger.table.new_files = blind  # type: ignore[method-assign]
    assert other.ledger.commit(entry("k", attempt="second")) == first
    assert len(looks) == 2
    assert [e.attempt for e in open_store(root).ledger.entries()] == ["first"]
    assert len(list((root / "tables/ledger").glob("run=run/*.parquet"))) == 1


def test_the_ledger_folds_itself_and_nobody_notices(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.ledger.MERGE_FILES", 4)
    elsewhere = open_store(root)
    for number in range(10):
        store.ledger.commit(entry(f"key-{number}"))
        assert elsewhere.ledger.find(f"key-{number}") is not None
    assert len(store.ledger.table.active_files()) == 3  # the first eight in one, in two goes, and the last two
    for ledger in (store.ledger, elsewhere.ledger, open_store(root).ledger):
        assert sorted(e.key for e in ledger.entries()) == [f"key-{number}" for number in range(10)]


def test_a_fold_that_fails_takes_no_commit_with_it(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fold(*_: Any, **__: Any) -> int:
        raise StoreUnavailable("no luck")

    monkeypatch.setattr("storage.ledger.MERGE_FILES", 1)
    monkeypatch.setattr(StoredTable, "merge_files", fold)
    assert store.ledger.commit(entry("k")) == entry("k")
    assert open_store(root).ledger.entries() == [entry("k")]


@pytest.mark.parametrize("error", [RuntimeError("gone"), OSError("connection reset")])
def test_a_lost_acknowledgement_neither_loses_nor_doubles(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    original = StoredTable._write_commit
    lost: list[int] = []

    def push(self: StoredTable, *arguments: Any) -> None:
        original(self, *arguments)
        lost.append(1)
        raise error

    monkeypatch.setattr(StoredTable, "_write_commit", push)
    assert store.ledger.commit(entry("k")) == entry("k")
    assert store.ledger.commit(entry("k", attempt="again")) == entry("k")
    assert lost == [1]
    assert open_store(root).ledger.entries() == [entry("k")]


def test_a_commit_that_failed_is_an_error_and_leaves_nothing(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def push(self: StoredTable, *arguments: Any) -> None:
        raise OSError("the network is down")

    with monkeypatch.context() as patch:
        patch.setattr(StoredTable, "_write_commit", push)
        with pytest.raises(StoreUnavailable, match="network is down") as caught:
            store.ledger.commit(entry("k"))
        assert isinstance(caught.value.__cause__, OSError)
    assert open_store(root).ledger.entries() == []
    assert store.ledger.commit(entry("k")) == entry("k")


@ANYWHERE
@pytest.mark.engine
def test_processes_that_race_on_the_same_keys_agree(root: Path, store: Store) -> None:
    keys, names = 8, ("a", "b", "c")
    told = race_writers(root, *(["race", name, str(keys)] for name in names))
    standing = {e.key: e.attempt for e in store.ledger.entries()}
    assert len(standing) == keys
    assert told == [[standing[f"key-{number}"] for number in range(keys)]] * len(names)
    rows = [row for each in store.ledger.table.active_files() for row in store.ledger.table.read(each.path).to_pylist()]
    assert len(rows) == keys


@ANYWHERE
def test_threads_that_share_a_store_agree(store: Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(lambda n: store.ledger.commit(entry("k", attempt=f"attempt-{n}")).attempt, range(8)))
    assert len(set(won)) == 1
    assert len(Ledger(store.root).entries()) == 1


def commit_buffered(store: Store, buffer: CommitBuffer, key: str, rows: int = 3, run: str = "run") -> Entry:
    made = buffer.append("messages", messages(rows), run=run, step=0, key=key, attempt=f"{run}-{key}")
    return buffer.commit(entry(key, run=run, outputs=(made,)))


def unanswered(*_: object, **__: object) -> None:
    raise StoreUnavailable("the store does not answer", "", "everything", "wait")


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), ValueError("a stage failed")], ids=type)
def test_what_is_finished_is_kept_when_an_error_passes(root: Path, store: Store, problem: BaseException) -> None:
    with pytest.raises(type(problem)), CommitBuffer(store.slices, store.ledger) as buffer:
        commit_buffered(store, buffer, "a")
        assert open_store(root).ledger.entries() == []
        raise problem
    assert [each.key for each in open_store(root).ledger.entries()] == ["a"]


def test_the_error_that_passes_is_told_also_where_the_flush_fails(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, CommitBuffer(store.slices, store.ledger) as buffer:
        commit_buffered(store, buffer, "a")
        monkeypatch.setattr(Slices, "commit", unanswered)
        raise KeyboardInterrupt
    assert "the store does not answer" in caught.value.__notes__[0]
    with pytest.raises(StoreUnavailable), CommitBuffer(store.slices, store.ledger) as buffer:
        commit_buffered(store, buffer, "b")


@pytest.mark.parametrize("where", [(Slices, "commit"), (Ledger, "commit_all")], ids=["tables", "ledger"])
@pytest.mark.parametrize("after", [False, True])
def test_a_flush_that_fails_is_made_good_by_the_next(
    root: Path, store: Store, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str], after: bool
) -> None:
    true: Callable[..., object] = getattr(*where)

    def failing(*given: object) -> None:
        if after:
            true(*given)
        unanswered()

    buffer = CommitBuffer(store.slices, store.ledger)
    for key in ("a", "b"):
        commit_buffered(store, buffer, key)
    with monkeypatch.context() as patch:
        patch.setattr(*where, failing)
        with pytest.raises(StoreUnavailable):
            buffer.flush()
    assert buffer.find("a") is not None, "whoever is called again finds it"
    assert sorted(buffer.flush()) == ["a", "b"]
    found = open_store(root)
    assert [each.key for each in found.ledger.entries()] == ["a", "b"]
    assert found.scan("messages").collect().height == 6 == store.scan("messages").collect().height


def test_of_two_that_buffer_the_same_work_both_rows_name_the_slices_of_the_first(root: Path, store: Store) -> None:
    other = open_store(root)
    with CommitBuffer(other.slices, other.ledger) as late:
        commit_buffered(other, late, "a", run="late")
        with CommitBuffer(store.slices, store.ledger) as first:
            commit_buffered(store, first, "a", run="first")
    rows = open_store(root).ledger.entries()
    assert [(each.run, each.outputs[0].run) for each in rows] == [("first", "first"), ("late", "first")]
    assert store.scan("messages").collect().height == 3


def test_work_that_was_removed_meanwhile_takes_all_that_was_buffered_with_it(root: Path, store: Store) -> None:
    with CommitBuffer(store.slices, store.ledger) as first:
        found = commit_buffered(store, first, "a", run="first")
    other = open_store(root)
    late = CommitBuffer(other.slices, other.ledger)
    commit_buffered(other, late, "b", run="late")
    late.commit(replace(found, run="late"))
    store.ledger.remove("first", [("a", "")], found.finished_at)
    for _ in range(2):
        with pytest.raises(WorkRemoved):
            late.flush()
    assert open_store(root).ledger.entries() == []
