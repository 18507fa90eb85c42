"""Turns of rollouts under way: what a process that died has left is there, and goes once nobody needs it."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from storage import turns
from storage.errors import NoSpace
from storage.store import Store, open_store
from storage.turns import CachedTurn, TurnCache
from tests.fixtures.waiting import until


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(turns, "LINGER_SECONDS", 0.01)
    monkeypatch.setattr(turns, "PAUSE_RATIO", 0.0)


class Died(Exception):
    """Stands for what ends a run."""


def turn(group, member=0, request="r", policies=("p",)):
    return CachedTurn(group, f"{group}/{member}", request, f'{{"said": "{request}"}}', policies)


@contextmanager
def dying(store, run="run"):
    """Give the turns of a run that ends by an error after the block."""
    with pytest.raises(Died), TurnCache(store, run) as kept:
        yield kept
        raise Died


def again(store, run="run"):
    """Return the turns as the next process of the run finds them."""
    return TurnCache(open_store(store.root.address), run)


def files(store):
    table = open_store(store.root.address).table("turns")
    return [each.path for each in table.active_files()]


def until_files(store, number):
    """Wait until turns lie in so many files."""
    until(lambda: len(files(store)) == number, lambda: str(files(store)))


def until_committed(store, *expected):
    """Wait until the next process would find these turns of group `a`."""
    until(lambda: again(store).of("a") == [*expected], lambda: "the turn was not committed")


def test_a_run_that_died_finds_its_turns_in_their_order_and_no_other_run_does(store):
    own = [turn("a", request="1"), turn("a", request="2", policies=()), turn("a", 1, policies=("p", "q")), turn("b")]
    with dying(store) as kept:
        for each in own:
            kept.put(each)
        kept.put(replace(own[0], answer="another answer to the same request"))
    found = again(store)
    assert found.of("a") == own[:3] and found.of("b") == own[3:] and found.of("c") == []
    assert again(store, "another").of("a") == []


def test_what_another_policy_sampled_takes_the_place_of_a_turn(store):
    first, second = turn("a"), turn("a", policies=("q",))
    with dying(store) as kept:
        kept.put(first)
        until_committed(store, first)
        kept.put(second)
        assert kept.of("a") == [second]
    assert again(store).of("a") == [second]


def test_turns_of_groups_that_are_committed_go_and_their_files_with_them(store):
    with dying(store) as kept:
        kept.put(turn("a"))
        until_files(store, 1)
        kept.put(turn("a", request="2"))
        kept.put(turn("b"))
        until(lambda: len(files(store)) > 1, lambda: str(files(store)))
        kept.forget(["a", "unknown"])
        assert kept.of("a") == []
        until_files(store, 1)
    assert again(store).of("b") == [turn("b")]


def test_a_run_that_ends_leaves_none_what_died_before_it_among_them(store):
    with dying(store) as kept:
        kept.put(turn("a"))
    with again(store) as kept:
        kept.put(turn("b"))
    assert files(store) == []
    place = store.table("turns").place
    assert store.root.paths_older(place, -1.0, ".parquet") == [], "files of removed turns are left"


def test_turns_wait_while_the_store_refuses_and_the_run_goes_on(store, monkeypatch, caplog):
    append, refusals = Store.append, list[str]()

    def refuse(self, table, *arguments, **others):
        if len(refusals) < 2:
            refusals.append(table)
            raise OSError("the disk is full")
        return append(self, table, *arguments, **others)

    monkeypatch.setattr(Store, "append", refuse)
    with dying(store) as kept:
        kept.put(turn("a"))
        until_committed(store, turn("a"))
    assert refusals == ["turns", "turns"] and "the disk is full" in caplog.text


def test_an_error_says_what_could_not_be_kept(store, monkeypatch):
    def refuse(*_, **__):
        raise NoSpace("the disk is full", "here", "everything", "make room")

    monkeypatch.setattr(Store, "append", refuse)
    with pytest.raises(Died) as caught, TurnCache(store, "run") as kept:
        kept.put(turn("a"))
        raise Died
    assert "1 turns of rollouts under way are lost" in caught.value.__notes__[0]


def test_a_file_that_cannot_be_read_is_no_reason_to_stop(store):
    with dying(store) as kept:
        kept.put(turn("a"))
    (path,) = files(store)
    place = f"{store.table('turns').place}/{path}"
    store.root.delete(place)
    store.root.write(place, b"damaged")
    with again(store) as kept:
        assert kept.of("a") == []
    assert files(store) == []
