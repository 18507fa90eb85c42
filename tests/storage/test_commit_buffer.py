"""Gathered work: all of it or nothing becomes visible, once, whatever fails on the way."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from storage.errors import StoreUnavailable, WorkRemoved
from storage.ledger import CommitBuffer, Ledger
from storage.refs import Entry
from storage.slices import Slices
from storage.store import Store, open_store
from tests.fixtures.rows import entry, messages


def gather(store: Store, gathering: CommitBuffer, key: str, rows: int = 3, run: str = "run") -> Entry:
    made = gathering.append("messages", messages(rows), run=run, step=0, key=key, attempt=f"{run}-{key}")
    return gathering.commit(entry(key, run=run, outputs=(made,)))


def unanswered(*_: object, **__: object) -> None:
    raise StoreUnavailable("the store does not answer", "", "everything", "wait")


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), ValueError("a stage failed")], ids=type)
def test_what_is_finished_is_kept_when_an_error_passes(root: Path, store: Store, problem: BaseException) -> None:
    with pytest.raises(type(problem)), CommitBuffer(store.slices, store.ledger) as gathering:
        gather(store, gathering, "a")
        assert open_store(root).ledger.entries() == []
        raise problem
    assert [each.key for each in open_store(root).ledger.entries()] == ["a"]


def test_the_error_that_passes_is_told_also_where_the_flush_fails(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, CommitBuffer(store.slices, store.ledger) as gathering:
        gather(store, gathering, "a")
        monkeypatch.setattr(Slices, "commit", unanswered)
        raise KeyboardInterrupt
    assert "the store does not answer" in caught.value.__notes__[0]
    with pytest.raises(StoreUnavailable), CommitBuffer(store.slices, store.ledger) as gathering:
        gather(store, gathering, "b")


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

    gathering = CommitBuffer(store.slices, store.ledger)
    for key in ("a", "b"):
        gather(store, gathering, key)
    with monkeypatch.context() as patch:
        patch.setattr(*where, failing)
        with pytest.raises(StoreUnavailable):
            gathering.flush()
    assert gathering.find("a") is not None, "whoever is called again finds it"
    assert sorted(gathering.flush()) == ["a", "b"]
    found = open_store(root)
    assert [each.key for each in found.ledger.entries()] == ["a", "b"]
    assert found.scan("messages").collect().height == 6 == store.scan("messages").collect().height


def test_of_two_that_gather_the_same_work_both_rows_name_the_slices_of_the_first(root: Path, store: Store) -> None:
    other = open_store(root)
    with CommitBuffer(other.slices, other.ledger) as late:
        gather(other, late, "a", run="late")
        with CommitBuffer(store.slices, store.ledger) as first:
            gather(store, first, "a", run="first")
    rows = open_store(root).ledger.entries()
    assert [(each.run, each.outputs[0].run) for each in rows] == [("first", "first"), ("late", "first")]
    assert store.scan("messages").collect().height == 3


def test_work_that_was_removed_meanwhile_takes_all_that_was_gathered_with_it(root: Path, store: Store) -> None:
    with CommitBuffer(store.slices, store.ledger) as first:
        found = gather(store, first, "a", run="first")
    other = open_store(root)
    late = CommitBuffer(other.slices, other.ledger)
    gather(other, late, "b", run="late")
    late.commit(replace(found, run="late"))
    store.ledger.remove("first", [("a", "")], found.finished_at)
    for _ in range(2):
        with pytest.raises(WorkRemoved):
            late.flush()
    assert open_store(root).ledger.entries() == []
