"""The ledger: one row for each piece of work, whoever commits it, however often and whatever is lost on the way."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pyarrow as pa
import pytest

from storage.delta.table import StoredTable
from storage.errors import StoreUnavailable
from storage.ledger import Ledger, entries_of
from storage.refs import File, Slice
from storage.schemas.system_tables import LEDGER
from storage.store import open_store
from tests.fixtures.faults import happened
from tests.fixtures.rows import entry
from tests.fixtures.writer import race_writers

LATER = timedelta(seconds=1)
ANYWHERE = pytest.mark.parametrize("root", ["local", pytest.param("s3", marks=pytest.mark.engine)], indirect=True)


def test_an_entry_survives_the_way_through_a_row():
    piece = Slice("messages", "run", "attempt", 3, "digest", (File("run=run/x.parquet", 10, "abc"),))
    full = replace(entry("k", outputs=(piece, piece)), section={"b": [1, None], "a": 0.1}, versions={"torch": "2"})
    bare = replace(entry("other"), inputs={}, outputs=(replace(piece, files=()),))
    rows = pa.Table.from_pylist([each.to_row() for each in (full, bare, entry("empty"), full)], LEDGER.arrow)
    assert entries_of(rows) == [full, bare, entry("empty"), full]


@ANYWHERE
def test_what_is_committed_is_found_by_everyone(store, root):
    elsewhere = open_store(root)
    assert elsewhere.ledger.find("k") is None
    assert store.ledger.commit(entry("k")) == entry("k")
    for reader in (elsewhere, open_store(root)):
        assert reader.ledger.find("k") == entry("k")


@ANYWHERE
def test_the_same_row_again_is_not_appended(store):
    first = store.ledger.commit(entry("k", attempt="first"))
    version = store.ledger.table.refresh()
    assert store.ledger.commit(entry("k", attempt="second")) == first
    assert store.ledger.table.refresh() == version


@ANYWHERE
def test_find_prefers_the_run_s_own_row_and_else_the_earliest(store):
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
def test_parts_and_entries_are_listed(store):
    for part in ("b", "a", ""):
        store.ledger.commit(entry("k", part=part))
    store.ledger.commit(entry("k", run="branch", part="a", finished_at=entry().finished_at + LATER))
    store.ledger.commit(entry("l", stage="packing", step=1))
    assert [(e.part, e.run) for e in store.ledger.parts("k")] == [("a", "run"), ("b", "run")]
    assert [e.key for e in store.ledger.entries(stage="packing")] == ["l"]
    assert (len(store.ledger.entries(run="run")), len(store.ledger.entries())) == (4, 5)


def test_a_look_reads_only_what_is_new(store, root, monkeypatch):
    monkeypatch.setattr("storage.ledger.MERGE_FILES", 100)  # merging reads files too
    elsewhere = open_store(root)
    for number in range(15):
        store.ledger.commit(entry(f"key-{number}"))
    assert elsewhere.ledger.find("key-14") is not None
    read = []
    original = StoredTable.read
    monkeypatch.setattr(StoredTable, "read", lambda self, path: (read.append(path), original(self, path))[1])
    store.ledger.commit(entry("new"))
    for _ in range(2):
        assert elsewhere.ledger.find("new") is not None
        assert len(read) == 1  # the new file, by the other: who wrote it knows what is in it


def test_an_application_transaction_is_accepted_once_at_a_look(root, store):
    """Two handles that looked at the same state: the second append must lose, look again and return the first's row."""
    other = open_store(root)
    other.ledger.find("k")
    stale = other.ledger.table.version
    first = store.ledger.commit(entry("k", attempt="first"))
    real = other.ledger.table.new_files
    looks = []

    def blind(since):
        looks.append(1)
        return ([], stale) if len(looks) == 1 else real(since)  # the first look is before the other's commit

    other.ledger.table.new_files = blind
    assert other.ledger.commit(entry("k", attempt="second")) == first
    assert len(looks) == 2
    assert [e.attempt for e in open_store(root).ledger.entries()] == ["first"]
    assert len(list((root / "tables/ledger").glob("run=run/*.parquet"))) == 1


def test_the_ledger_folds_itself_and_nobody_notices(store, root, monkeypatch):
    monkeypatch.setattr("storage.ledger.MERGE_FILES", 4)
    elsewhere = open_store(root)
    for number in range(10):
        store.ledger.commit(entry(f"key-{number}"))
        assert elsewhere.ledger.find(f"key-{number}") is not None
    assert len(store.ledger.table.active_files()) == 3  # the first eight in one, in two goes, and the last two
    for ledger in (store.ledger, elsewhere.ledger, open_store(root).ledger):
        assert sorted(e.key for e in ledger.entries()) == [f"key-{number}" for number in range(10)]


def test_a_fold_that_fails_takes_no_commit_with_it(store, root, monkeypatch):
    def fold(*_, **__):
        raise StoreUnavailable("no luck")

    monkeypatch.setattr("storage.ledger.MERGE_FILES", 1)
    monkeypatch.setattr(StoredTable, "merge_files", fold)
    assert store.ledger.commit(entry("k")) == entry("k")
    assert open_store(root).ledger.entries() == [entry("k")]


@pytest.mark.fault("log", "the acknowledgement of a commit is lost", "the row is there once")
@pytest.mark.parametrize("error", [RuntimeError("gone"), OSError("connection reset")])
def test_a_lost_acknowledgement_neither_loses_nor_doubles(store, root, monkeypatch, error):
    original = StoredTable._write_commit
    lost = []

    def push(self, *arguments):
        original(self, *arguments)
        lost.append(1)
        raise error

    monkeypatch.setattr(StoredTable, "_write_commit", push)
    assert store.ledger.commit(entry("k")) == entry("k")
    assert store.ledger.commit(entry("k", attempt="again")) == entry("k")
    assert lost == [1]
    happened(repr(error))
    assert open_store(root).ledger.entries() == [entry("k")]


@pytest.mark.fault("log", "a commit fails", "one error; the commit again succeeds")
def test_a_commit_that_failed_is_an_error_and_leaves_nothing(store, root, monkeypatch):
    def push(self, *arguments):
        raise OSError("the network is down")

    with monkeypatch.context() as patch:
        patch.setattr(StoredTable, "_write_commit", push)
        with pytest.raises(StoreUnavailable, match="network is down") as caught:
            store.ledger.commit(entry("k"))
        assert isinstance(caught.value.__cause__, OSError)
        happened(caught.value.__cause__)
    assert open_store(root).ledger.entries() == []
    assert store.ledger.commit(entry("k")) == entry("k")


@pytest.mark.fault("two writers", "three processes commit the same keys", "each key once, all agree")
@ANYWHERE
@pytest.mark.engine
def test_processes_that_race_on_the_same_keys_agree(root, store):
    keys, names = 8, ("a", "b", "c")
    told = race_writers(root, *(["race", name, str(keys)] for name in names))
    standing = {e.key: e.attempt for e in store.ledger.entries()}
    assert len(standing) == keys
    happened(f"{len(names)} processes, {keys} keys")
    assert told == [[standing[f"key-{number}"] for number in range(keys)]] * len(names)
    rows = [row for each in store.ledger.table.active_files() for row in store.ledger.table.read(each.path).to_pylist()]
    assert len(rows) == keys


@ANYWHERE
def test_threads_that_share_a_store_agree(store):
    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(lambda n: store.ledger.commit(entry("k", attempt=f"attempt-{n}")).attempt, range(8)))
    assert len(set(won)) == 1
    assert len(Ledger(store.root).entries()) == 1
