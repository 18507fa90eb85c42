"""What is held in memory: made once, within its bound, whoever asks."""

from concurrent.futures import ThreadPoolExecutor

import polars as pl
import pytest

from flows.viewer.kept import Kept
from flows.viewer.weights import SMALL, weight


def frame(rows: int) -> pl.DataFrame:
    return pl.DataFrame({"n": pl.Series(range(rows), dtype=pl.Int64)})


def test_a_thing_is_made_once() -> None:
    kept, made = Kept(), []
    for _ in range(3):
        assert kept.once("a", lambda: made.append(1) or "value") == "value"
    assert made == [1] and kept.held("a") == "value" and kept.held("b") is None


def test_a_thing_that_cannot_be_made_is_asked_for_again() -> None:
    kept = Kept()
    with pytest.raises(ValueError):
        kept.once("a", lambda: int("no number"))
    assert kept.once("a", lambda: 1) == 1


def test_what_was_not_asked_for_longest_goes_first() -> None:
    kept = Kept(most_bytes=3 * (SMALL + 800))
    for name in "abc":
        kept.once(name, lambda: frame(100))
    kept.once("a", lambda: pytest.fail("it is held"))
    kept.once("d", lambda: frame(100))
    assert [kept.held(name) is None for name in "abcd"] == [False, True, False, False]
    assert kept.num_bytes == 3 * weight(frame(100)) == 3 * (SMALL + 800)


def test_what_is_only_looked_for_counts_as_asked_for() -> None:
    kept = Kept(most_bytes=2 * (SMALL + 800))
    for name in "ab":
        kept.once(name, lambda: frame(100))
    assert kept.held("a") is not None
    kept.once("c", lambda: frame(100))
    assert [kept.held(name) is None for name in "abc"] == [False, True, False]


def test_what_is_larger_than_the_room_is_held_alone() -> None:
    kept = Kept(most_bytes=SMALL)
    kept.once("small", lambda: 1)
    kept.once("large", lambda: frame(1000))
    assert kept.held("small") is None and kept.held("large") is not None
    assert kept.num_bytes == SMALL + 8000


def test_what_is_put_again_is_in_the_place_of_what_was_there() -> None:
    kept = Kept()
    for rows in (1000, 100):
        assert kept.put("a", frame(rows)).height == rows
    assert kept.held("a").height == 100 and kept.num_bytes == SMALL + 800


def test_what_was_changed_meanwhile_leaves_no_weight_behind() -> None:
    kept, grown = Kept(most_bytes=3 * SMALL), list[int]()
    kept.once("grown", lambda: grown)
    grown += range(10_000)
    kept.once("large", lambda: frame(1000))
    assert kept.held("grown") is None and kept.num_bytes == weight(frame(1000))


def test_many_threads_leave_the_weight_right() -> None:
    kept = Kept(most_bytes=20 * (SMALL + 800))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: kept.once(n % 40, lambda: frame(100)), range(800)))
    held = [kept.held(n) for n in range(40) if kept.held(n) is not None]
    assert kept.num_bytes == sum(map(weight, held)) == 20 * (SMALL + 800)
