"""Two processes that sample one step commit parts of the same groups, cut differently: each group counts once."""

from dataclasses import replace
from datetime import timedelta

import pytest

from flows.queries.store_reader import StoreReader
from storage.maintenance.compact import compact
from storage.maintenance.repair import inspect_slices
from storage.read.frames import Frames
from storage.read.sql import ask
from storage.store import open_store
from tasks.runtime.parts import count_tokens
from tests.fixtures.builders import table, trace
from tests.fixtures.rows import MOMENT, entry

MEMBERS = 2


def scanned(store):
    return store.scan("traces").collect()["group_id"].to_list()


def framed(store):
    return _groups(Frames(open_store(store.root.address)))


def asked(store):
    return list(ask(Frames(open_store(store.root.address)), "select group_id from traces")["group_id"].to_pylist())


def of_run(store):
    return _groups(Frames(open_store(store.root.address)).run("run"))


def _groups(frames):
    return frames["traces"].collect()["group_id"].to_list()


READERS = (scanned, framed, asked, of_run)
readers = pytest.mark.parametrize("read", READERS)


@pytest.fixture
def store(root):
    made = open_store(root)
    made.runs.record(run="run", event="started", kind="train", config={})
    return made


def commit_part(store, writer, groups, second, run="run"):
    """Commit a part of `writer` with some groups, each a letter, `second` seconds after the first."""
    rows = [trace(f"{writer}-{group}-{member}", group_id=group) for group in groups for member in range(MEMBERS)]
    traces = table("traces", rows)
    piece = store.append("traces", traces, run=run, step=0, key="k", attempt=f"{writer}-{groups}")
    at = MOMENT + timedelta(seconds=second)
    part = entry("k", run, f"{writer}-{groups}", (piece,), attempt=writer, started_at=at, finished_at=at)
    return store.ledger.commit(replace(part, tokens=count_tokens({"traces": traces})))


def commit_whole(store, *parts):
    pieces = tuple(piece for part in parts for piece in part.outputs)
    store.ledger.commit(entry("k", outputs=pieces, attempt=parts[0].attempt))


@readers
def test_of_finished_work_the_parts_of_its_own_row_alone_count(store, read):
    first = [commit_part(store, "a", "pq", 0), commit_part(store, "a", "rs", 3)]
    commit_part(store, "b", "p", 1)
    commit_part(store, "b", "qr", 2)
    commit_whole(store, *first)
    commit_part(store, "b", "s", 4)  # of a process that has not noticed it yet
    assert sorted(read(store)) == sorted("pqrs" * MEMBERS)


@readers
def test_of_unfinished_work_a_group_counts_once_in_the_part_that_was_first(store, read):
    commit_part(store, "b", "pq", 1)
    commit_part(store, "a", "p", 0)
    commit_part(store, "b", "r", 3)
    commit_part(store, "a", "rs", 2)
    assert sorted(read(store)) == sorted("prs" * MEMBERS), "q is sampled again by whoever goes on: its part repeats p"


def test_a_run_whose_part_is_repeated_keeps_its_unfinished_work(store):
    store.runs.record(run="other", event="started", kind="train", config={})
    commit_part(store, "a", "pq", 0)
    commit_part(store, "b", "pq", 1, run="other")
    frames = Frames(open_store(store.root.address))
    assert frames["traces"].collect()["trace_id"].str.head(1).to_list() == ["a"] * 4
    assert frames.run("other")["traces"].collect().equals(frames["traces"].collect())
    assert frames.graph.works["k"].runs == ("other", "run")


def test_tokens_and_rows_of_unfinished_work_count_once(store):
    parts = [commit_part(store, "a", "pq", 0), commit_part(store, "b", "q", 1), commit_part(store, "b", "r", 2)]
    assert [part.tokens for part in parts] == [20, 10, 10]
    library = StoreReader(store)
    assert library.frames("run")["stage_times"].collect()["tokens"].to_list() == [30]
    assert library.frames("run")["slices"].collect()["rows"].to_list() == [6]


def test_a_damaged_part_hides_no_other(store, root):
    part = commit_part(store, "a", "p", 0)
    commit_part(store, "b", "q", 1)
    (root / "tables/traces" / part.outputs[0].files[0].path).write_bytes(b"")
    assert {piece for work in Frames(open_store(root)).graph.works.values() for piece in work.slices} == {
        piece for row in store.ledger.entries() for piece in row.outputs
    }


@pytest.mark.parametrize("finished", [True, False])
def test_maintenance_changes_no_count(store, finished):
    first = [commit_part(store, "a", group, 2 * second) for second, group in enumerate("pqrstuvw")]
    for second, groups in enumerate(("pq", "rs", "tu")):
        commit_part(store, "b", groups, 2 * second + 1)
    if finished:
        commit_whole(store, *first)
    before = sorted(scanned(store))
    assert before == sorted("pqrstuvw" * MEMBERS)
    assert compact(store, store.table("traces")) > 0
    assert all(sorted(read(store)) == before for read in READERS)
    assert inspect_slices(store, deep=True) == []
