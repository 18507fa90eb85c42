"""What a run works with: tables read lately, and work that another process finished a moment ago."""

from pathlib import Path

import pyarrow as pa
import pytest

from configs.run import RunConfig
from storage.store import open_store
from tasks.runtime import run_context as contexts
from tasks.runtime.run_context import RecentTables, RunContext
from tasks.runtime.stage import ref_of
from tests.fixtures.rows import entry, messages


class Reader:
    """Counts how often it was asked, by name."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, name: str) -> pa.Table:
        self.asked.append(name)
        return pa.table({"value": pa.array([len(self.asked)], pa.int64())})


def fetch(recent: RecentTables, reader: Reader, name: str) -> int:
    return int(recent.get(name, lambda: reader(name))["value"][0].as_py())


def test_a_table_is_read_once_while_it_is_kept():
    recent, reader = RecentTables(), Reader()
    assert [fetch(recent, reader, name) for name in ("a", "b", "a", "b")] == [1, 2, 1, 2]
    assert reader.asked == ["a", "b"]


def test_the_one_not_asked_for_longest_goes_first():
    recent, reader = RecentTables(max_bytes=16), Reader()  # two tables of one int64 each
    for name in ("a", "b", "a", "c"):
        fetch(recent, reader, name)
    assert reader.asked == ["a", "b", "c"]
    fetch(recent, reader, "a")
    assert reader.asked == ["a", "b", "c"]  # b went, not a
    fetch(recent, reader, "b")
    assert reader.asked == ["a", "b", "c", "b"]


def test_a_table_larger_than_the_bound_is_given_out_and_not_kept():
    recent, reader = RecentTables(max_bytes=7), Reader()
    assert [fetch(recent, reader, "a"), fetch(recent, reader, "a")] == [1, 2]


def test_a_table_that_is_put_again_counts_once():
    recent, reader = RecentTables(max_bytes=16), Reader()
    for name in ("a", "a", "b", "a"):
        recent.put(name, reader(name))
    fetch(recent, reader, "b")
    assert [fetch(recent, reader, "a"), reader.asked] == [4, ["a", "a", "b", "a"]], "both are there, the newest of each"


def test_a_failed_read_keeps_nothing():
    recent, reader = RecentTables(), Reader()

    def fails() -> pa.Table:
        raise OSError("no such disk")

    for _ in range(2):
        try:
            recent.get("a", fails)
        except OSError:
            continue
        raise AssertionError("the failure was swallowed")
    assert fetch(recent, reader, "a") == 1


def test_rows_that_another_process_has_just_finished_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "LEDGER_SECONDS", 3600.0)
    here, there = (RunContext(open_store(tmp_path), "run", RunConfig(name="run"), {}) for _ in range(2))
    assert here.find("k") is None
    made = there.append("messages", messages(3), step=0, key="k", attempt="a")
    ref = ref_of(there.commit(entry("k", run="run", outputs=(made,))), computed=True)
    assert here.table("messages", [ref]).num_rows == 3
