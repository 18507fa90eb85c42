"""The cache: what is held within its bound, and about how many bytes a value takes."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import polars as pl
import pytest

from flows.queries.store_reader import SMALL, Cache, size_in_bytes


def frame(rows):
    return pl.DataFrame({"n": pl.Series(range(rows), dtype=pl.Int64)})


def test_a_value_is_made_once_and_again_where_making_it_failed():
    cache, made = Cache(), []
    with pytest.raises(ValueError):
        cache.once("a", lambda: int("no number"))
    for _ in range(3):
        assert cache.once("a", lambda: made.append(1) or "value") == "value"
    assert made == [1] and cache.peek("a") == "value" and cache.peek("b") is None


def test_the_value_that_was_not_requested_for_longest_goes_first():
    cache = Cache(most_bytes=3 * (SMALL + 800))
    for name in "abc":
        cache.once(name, lambda: frame(100))
    cache.once("a", lambda: pytest.fail("it is held"))
    assert cache.peek("b") is not None, "a look counts as a request"
    cache.once("d", lambda: frame(100))
    assert [cache.peek(name) is None for name in "abcd"] == [False, False, True, False]
    assert cache.num_bytes == 3 * (SMALL + 800)
    cache.once("large", lambda: frame(1000))
    assert cache.peek("a") is None and cache.num_bytes == SMALL + 8000, "what is larger than the room is held alone"
    cache.put("large", frame(100))
    assert cache.peek("large").height == 100 and cache.num_bytes == SMALL + 800


def test_values_are_read_together():
    cache = Cache()
    found = cache.each_once("steps", range(100), lambda names: {name: frame(name) for name in names if name != 7})
    assert [*found] == [name for name in range(100) if name != 7] and found[5].height == 5
    assert cache.num_bytes == sum(map(size_in_bytes, found.values()))
    cache.each_once("steps", range(7), lambda names: pytest.fail("all are held"))


def test_many_threads_leave_the_weight_right():
    cache = Cache(most_bytes=20 * (SMALL + 800))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: cache.once(n % 40, lambda: frame(100)), range(800)))
    held = [cache.peek(n) for n in range(40) if cache.peek(n) is not None]
    assert cache.num_bytes == sum(map(size_in_bytes, held)) == 20 * (SMALL + 800)


def test_the_weight_is_about_what_python_takes():
    tracemalloc.start()
    value = {("scope", f"step {n}"): [{"step": n, "name": f"{n}" * 9, "value": n / 3}] for n in range(1500)}
    took = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert took / 2 < size_in_bytes(value) < 2 * took
