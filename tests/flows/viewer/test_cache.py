"""The cache: what is held within its bound, and about how many bytes a value takes."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from flows.queries.store_reader import MOST_ITEMS, SMALL, Cache, size_in_bytes


def frame(rows: int) -> pl.DataFrame:
    return pl.DataFrame({"n": pl.Series(range(rows), dtype=pl.Int64)})


def test_a_value_is_made_once_and_again_where_it_could_not_be_made_or_is_put() -> None:
    cache = Cache()
    with pytest.raises(ValueError):
        cache.once("a", lambda: int("no number"))
    assert [cache.once("a", lambda n=n: n) for n in (1, 2)] == [1, 1]  # type: ignore[misc]
    assert cache.peek("b") is None
    for rows in (1000, 100):
        assert cache.put("a", frame(rows)).height == rows
    assert cache.peek("a").height == 100 and cache.num_bytes == SMALL + 800


def test_what_was_not_requested_longest_goes_first() -> None:
    cache = Cache(most_bytes=3 * (SMALL + 800))
    for name in "abc":
        cache.once(name, lambda: frame(100))
    cache.once("a", lambda: pytest.fail("it is held"))
    assert cache.peek("b") is not None, "what is only looked for counts as requested"
    cache.once("d", lambda: frame(100))
    assert [cache.peek(name) is None for name in "abcd"] == [False, False, True, False]
    assert cache.num_bytes == 3 * size_in_bytes(frame(100)) == 3 * (SMALL + 800)


def test_what_is_larger_than_the_room_is_held_alone_and_what_grew_leaves_no_weight() -> None:
    cache, grown = Cache(most_bytes=3 * SMALL), list[int]()
    cache.once("grown", lambda: grown)
    grown += range(10_000)
    cache.once("large", lambda: frame(1000))
    assert cache.peek("grown") is None and cache.num_bytes == size_in_bytes(frame(1000)) == SMALL + 8000


def test_many_threads_leave_the_weight_right() -> None:
    cache = Cache(most_bytes=20 * (SMALL + 800))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: cache.once(n % 40, lambda: frame(100)), range(800)))
    held = [cache.peek(n) for n in range(40) if cache.peek(n) is not None]
    assert cache.num_bytes == sum(map(size_in_bytes, held)) == 20 * (SMALL + 800)


@dataclass(frozen=True)
class Step:
    """A value as pages have them: names, numbers, another one inside."""

    name: str
    values: dict[tuple[str, str], float]
    before: "Step | None" = None


@dataclass(frozen=True, slots=True)
class Slim:
    """One without a dictionary of its own."""

    text: str


def step(number: int) -> Step:
    values = {(f"scope {number}", f"measure {at}"): number + at / 7 for at in range(100)}
    return Step(f"step {number}" * 50, values, Step("before", {("a" * 999, "b"): 0.5}))


MADE: dict[str, Callable[[], Any]] = {
    "dataclasses": lambda: [step(number) for number in range(30)],
    "with slots": lambda: [Slim(f"{number}" * 5000) for number in range(20)],
    "rows": lambda: [{"step": n + 1000, "name": f"{n}" * 9, "value": n / 3} for n in range(1500)],
    "more than are looked at": lambda: [f"{number:09}" * 20 for number in range(5 * MOST_ITEMS + 1)],
    "a long dictionary": lambda: {f"{number:09}": [number / 3] for number in range(3 * MOST_ITEMS + 7)},
    "nested": lambda: {"a": [({"b": ["c" * 9000 + str(n)]},) for n in range(9)]},
}


@pytest.mark.parametrize("name", MADE)
def test_it_is_what_python_really_took(name: str) -> None:
    gc.collect()
    tracemalloc.start()
    try:
        made = MADE[name]()
        took = tracemalloc.get_traced_memory()[0]
        assert size_in_bytes(made) - SMALL == pytest.approx(took, rel=0.1)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("table", "size"),
    [
        (frame(1000), 8000),
        (pl.Series(range(1000), dtype=pl.Int32), 4000),
        (pa.table({"n": pa.array(range(1000), pa.int64())}), 8000),
        (np.zeros(1000), 8000),
    ],
)
def test_tables_say_what_they_take_wherever_they_are(table: Any, size: int) -> None:
    assert size_in_bytes(table) == SMALL + size
    twice = [table, table]
    assert size_in_bytes(twice) == SMALL + size + sys.getsizeof(twice), "the same one twice is there once"


def test_what_holds_itself_or_goes_deep_has_an_end() -> None:
    ring: list[Any] = ["a" * 1000]
    ring.append(ring)
    assert SMALL + 1000 < size_in_bytes(ring) < SMALL + 1300
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert size_in_bytes(deep) > 5000 * sys.getsizeof([None]) * 0.9
