"""A table whose rows are dropped for their age: the ledger stays, everything else reads, and whoever asks is told."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from storage.errors import SliceExpired, StoreError
from storage.maintenance.compact import compact, maintain
from storage.maintenance.repair import inspect_slices
from storage.maintenance.sweep import Retention, expire
from storage.store import open_store
from tests.fixtures.histories import age
from tests.fixtures.rows import append, entry, messages

DAY = Retention("messages", 24)


def made(store, key, days, run="run"):
    """Work that finished so many days ago."""
    then = datetime.now(UTC) - timedelta(days=days)
    piece = append(store, 3, run=run, key=key, attempt=f"attempt {key}")
    store.ledger.commit(replace(entry(key, run=run, outputs=(piece,)), finished_at=then))
    return piece


def test_what_is_past_its_time_goes_and_says_so(root, store):
    old, young = made(store, "old", 2), made(store, "young", 0.5)
    before = store.ledger.entries()
    done = expire(store, DAY)
    assert (done.slices, done.bytes) == (1, old.files[0].size)
    for reader in (store, open_store(root)):
        with pytest.raises(SliceExpired, match=r"3 rows were dropped on \S+: table 'messages' keeps rows for 24 hours"):
            reader.read([young, old])
        assert reader.read([young]).equals(messages(3))
        assert reader.ledger.entries() == before
        assert reader.ledger.find("old") is not None
        assert reader.scan("messages").collect().height == 3
    assert not (root / "tables/messages" / old.files[0].path).exists()
    assert inspect_slices(store, deep=True) == []


def test_a_second_call_finds_nothing_and_a_dry_run_changes_nothing(root, store):
    made(store, "old", 2)
    assert expire(store, DAY, dry_run=True).slices == 1
    assert not (root / "tables/retirements").exists()
    assert expire(store, DAY).slices == 1
    again = expire(store, DAY)
    assert (again.slices, again.bytes) == (0, 0)
    table = store.slices.expired_slices.table
    assert sum(table.read(each.path).num_rows for each in table.active_files()) == 1


def test_rows_among_those_of_others_in_a_merged_file_go_too(root, store):
    pieces = [made(store, f"key {number}", number) for number in range(10)]
    compact(store, store.slices.table("messages"))
    age(root, 200)
    maintain(store)
    done = expire(store, Retention("messages", 36))
    assert done.slices == 8
    age(root, 200)
    maintain(store)
    assert store.read(pieces[:2]).num_rows == 6
    (left,) = store.slices.table("messages").active_files()
    assert store.slices.table("messages").read(left.path).num_rows == 6
    for piece in pieces[2:]:
        with pytest.raises(SliceExpired):
            store.read([piece])


def test_a_call_that_died_between_saying_and_doing_is_finished_by_the_next(root, store):
    old = made(store, "old", 2)
    store.slices.expired_slices.record([old], 24)
    assert open_store(root).read([old]).equals(messages(3))  # said, and still there
    expire(open_store(root), DAY)
    with pytest.raises(SliceExpired):
        open_store(root).read([old])


@pytest.mark.parametrize(("text", "hours"), [("messages=30d", 720), ("token_statistics=12h", 12), ("traces=0h", 0)])
def test_a_retention_is_a_table_and_a_time(text, hours):
    assert Retention.parse(text).hours == hours


@pytest.mark.parametrize(
    "text", ["", "messages", "messages=3", "ledger=3d", "runs=3d", "messages=-1d", "messages=1.5d"]
)
def test_other_words_are_no_retention(text):
    with pytest.raises(StoreError, match="is no retention"):
        Retention.parse(text)
