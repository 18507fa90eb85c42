"""A run copied into another store is there as it was, or not at all; doing it again copies nothing."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from storage.delta.parquet import encode
from storage.errors import CopyConflict, DamagedSlice, PolicyAbsent, SliceExpired, StoreError
from storage.maintenance.compact import maintain
from storage.maintenance.plan import needed_rows
from storage.maintenance.run_copy import CopyReport, copy_work
from storage.maintenance.sweep import Retention, expire
from storage.records import REMOVED
from storage.refs import Entry
from storage.store import Store, open_store
from tests.fixtures.dying import count_moments, die_at
from tests.fixtures.histories import contents, evaluate, finish, lasting, train
from tests.fixtures.rows import append, entry

NO_NEWS = CopyReport(0, 0, 0)


@pytest.fixture
def source(root: Path, store: Store) -> Store:
    """A store with two runs that share a step; the second is the one to copy."""
    train(store, "first", "xy")
    train(store, "second", "xzz")
    store.quarantines.record(["trace"], where="true", reason="fooled", run="first")
    return store


def copy(source: Store, target: Path | str, run: str = "second", with_policies: bool = True) -> CopyReport:
    """Copy a run as a command does: between stores that were just opened."""
    store = open_store(source.root.address)
    return copy_work(store, open_store(target), needed_rows(store, [run]), [run], with_policies)


def in_place(entries: list[Entry]) -> list[Entry]:
    """Return ledger rows without where their files lie, which compaction decides."""
    return [
        replace(row, outputs=tuple(replace(piece, files=()) for piece in row.outputs))
        for row in sorted(entries, key=lambda row: row.row_id)
    ]


def check_whole(source: Store, target: Path | str, run: str = "second") -> None:
    """Assert that a run is in the other store as it is here."""
    there = open_store(target)
    assert contents(there, [run]) == contents(source, [run])
    assert in_place(there.ledger.entries(run=run)) == in_place(source.ledger.entries(run=run))
    assert there.runs.events(run) == source.runs.events(run)
    assert there.quarantines.all() == source.quarantines.all()
    lasting(there, [run])
    named = {piece for row in there.ledger.entries() for piece in row.slices("messages")}
    num_rows = sum(piece.rows for piece in named)
    assert there.scan("messages").collect().height == num_rows, "no row is there twice"


def files(root: Path) -> dict[str, tuple[int, int]]:
    """Return what is on disk, with when it was written."""
    found = [path for path in root.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def test_a_copy_is_the_run_as_it_was_and_is_made_once(source: Store, tmp_path: Path) -> None:
    target = tmp_path / "other"
    assert copy(source, target) == CopyReport(rows=6, slices=9, policies=3)
    check_whole(source, target)
    there = open_store(target)
    assert there.runs.names() == ["second"] and {row.run for row in there.ledger.entries()} == {"second"}
    before = files(target)
    assert copy(source, target).nothing and files(target) == before
    source.runs.record(run="second", event="resumed")
    assert copy(source, target).records == 1, "what a run said since is added"
    train(source, "second", "xzzy")
    assert copy(source, target) == CopyReport(rows=2, slices=3, policies=1), "what came since is added"
    check_whole(source, target)


def test_rows_of_others_that_went_into_a_run_come_along(source: Store, tmp_path: Path) -> None:
    evaluate(source, "trial", "training-xy")
    copy(source, tmp_path / "other", "trial")
    there = open_store(tmp_path / "other")
    assert {(row.run, row.key) for row in there.ledger.entries()} == {
        ("trial", "tried-training-xy"),
        ("first", "training-xy"),
    }
    assert there.runs.names() == ["trial"], "a run of which parts are there is no run of the store"
    assert there.policies.names() == ["training-xy"]
    copy(source, tmp_path / "other", "first")
    check_whole(source, tmp_path / "other", "first")


def test_weights_that_were_left_behind_say_so_and_can_follow(source: Store, tmp_path: Path) -> None:
    target = tmp_path / "other"
    assert copy(source, target, with_policies=False).policies == 0
    with pytest.raises(PolicyAbsent, match=r"were removed on .* by a copy of the run without its weights"):
        open_store(target).policies.directory("training-xz")
    assert copy(source, target) == CopyReport(0, 0, 3)
    check_whole(source, target)


def test_what_was_compacted_or_has_expired_is_so_in_the_copy(source: Store, tmp_path: Path) -> None:
    train(source, "long", "abcdefghi")
    done = maintain(source, 0)
    assert done.merged > 0 and done.deleted > 0
    assert copy(source, tmp_path / "compacted", "long").rows == 18
    check_whole(source, tmp_path / "compacted", "long")
    expire(source, Retention("messages", 0))
    for news in (18, 0):
        assert copy(source, tmp_path / "expired", "long").rows == news
    there = open_store(tmp_path / "expired")
    for entry_there in there.ledger.entries(run="long"):
        with pytest.raises(SliceExpired, match="keeps rows for 0 hours"):
            there.read(entry_there.slices("messages"))
    assert len(there.slices.expired_slices.find(p for row in there.ledger.entries() for p in row.outputs)) == 18


def test_other_rows_under_a_key_are_refused_before_anything_is_written(source: Store, tmp_path: Path) -> None:
    other = open_store(tmp_path / "other")
    other.runs.record(run="mine", event="started", kind="train", config={})
    made = append(other, 7, run="mine", step=1, key="rollout-xz", attempt="own")
    other.ledger.commit(entry("rollout-xz", run="mine", outputs=(made,)))
    before = files(tmp_path / "other")
    with pytest.raises(
        CopyConflict, match=r"run 'mine' has other rows under the key .* 'second': rollout-xz"
    ) as caught:
        copy(source, tmp_path / "other")
    assert "nothing was written" in caught.value.safe and files(tmp_path / "other") == before


def test_another_run_of_that_name_is_refused(source: Store, tmp_path: Path) -> None:
    other = open_store(tmp_path / "other")
    train(other, "second", "q")
    before = files(tmp_path / "other")
    with pytest.raises(CopyConflict, match="there is another run 'second'"):
        copy(source, tmp_path / "other")
    assert files(tmp_path / "other") == before


def test_the_same_rows_of_another_run_are_no_conflict(source: Store, tmp_path: Path) -> None:
    copy(source, tmp_path / "other", "first")
    assert copy(source, tmp_path / "other") == CopyReport(rows=6, slices=6, policies=2), (
        "the first step's slices are there"
    )
    check_whole(source, tmp_path / "other")


def test_a_run_that_was_removed_there_can_come_back(source: Store, tmp_path: Path) -> None:
    copy(source, tmp_path / "other")
    there = open_store(tmp_path / "other")
    rows = {(row.key, row.part) for row in there.ledger.entries(run="second")}
    there.ledger.remove("second", rows, there.runs.events("second")[-1].at)
    there.runs.record(run="second", event=REMOVED)
    assert copy(source, tmp_path / "other").rows == 6
    there = open_store(tmp_path / "other")
    assert contents(there, ["second"]) == contents(source, ["second"])
    assert there.runs.events("second")[-1].event == "finished"


def test_damaged_rows_are_not_copied(root: Path, source: Store, tmp_path: Path) -> None:
    (piece,) = source.ledger.find("rollout-xzz").slices("messages")  # type: ignore[union-attr]
    path = root / "tables/messages" / piece.files[0].path
    path.write_bytes(encode([source.slices.read_stored(piece).slice(1)]))
    with pytest.raises(DamagedSlice):
        copy(source, tmp_path / "other")
    assert open_store(tmp_path / "other").ledger.entries() == []


def check_visible(source: Store, target: Path) -> None:
    """Assert that all of the ledger's rows can be read there, and that those of a run are there all or none."""
    there = open_store(target)
    rows = there.ledger.entries()
    assert len(rows) in (0, 6)
    if rows:
        check_whole(source, target)
    assert there.scan("messages").collect().height == sum(p.rows for row in rows for p in row.slices("messages"))


@pytest.mark.parametrize("every", [pytest.param(1, marks=(pytest.mark.engine, pytest.mark.nightly)), 7])
def test_dying_at_any_moment(source: Store, tmp_path: Path, every: int) -> None:
    num_moments = count_moments(lambda: copy(source, tmp_path / "whole"))
    assert num_moments > 30
    for moment in range(0, num_moments, every):
        target = tmp_path / str(moment)
        assert die_at(moment, partial(copy, source, target))
        if (target / "format.json").exists():
            check_visible(source, target)
        copy(source, target)
        check_whole(source, target)


KILLED = """
import sys
from storage.maintenance.plan import needed_rows
from storage.maintenance.compact import maintain
from storage.maintenance.run_copy import copy_work
from storage.store import open_store
from tests.fixtures.dying import kill_at, moments
source, target = open_store(sys.argv[1]), open_store(sys.argv[2])
with moments(kill_at(int(sys.argv[3]))):
    copy_work(source, target, needed_rows(source, ["second"]), ["second"], True)
"""


@pytest.mark.engine
@pytest.mark.parametrize("moment", [5, 20, 29])
def test_killed_for_real(source: Store, tmp_path: Path, moment: int) -> None:
    argv = [sys.executable, "-c", KILLED, source.root.address, str(tmp_path / "other"), str(moment)]
    assert subprocess.run(argv, timeout=120, check=False).returncode == -9
    check_visible(source, tmp_path / "other")
    copy(source, tmp_path / "other")
    check_whole(source, tmp_path / "other")


@pytest.mark.engine
def test_from_a_directory_to_an_object_store_and_back(source: Store, s3_root: str, tmp_path: Path) -> None:
    assert copy(source, s3_root) == CopyReport(6, 9, 3)
    assert copy(source, s3_root) == NO_NEWS
    check_whole(source, s3_root)
    copy(open_store(s3_root), tmp_path / "back")
    check_whole(source, tmp_path / "back")


def test_a_run_that_is_not_there(source: Store, tmp_path: Path) -> None:
    finish(source, "second")
    with pytest.raises(StoreError, match="there is no run 'third'"):
        copy_work(source, open_store(tmp_path / "other"), [], ["third"])
