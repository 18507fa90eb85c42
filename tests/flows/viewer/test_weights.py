"""What things take in memory: as much as is really freed when they go."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from flows.viewer.weights import MOST, SMALL, weight


@dataclass(frozen=True)
class Step:
    """A kept thing as pages have them: names, numbers, another one inside."""

    name: str
    values: dict[tuple[str, str], float]
    before: "Step | None" = None


@dataclass(frozen=True, slots=True)
class Slim:
    """One without a dictionary of its own."""

    text: str


def step(number: int) -> Step:
    values = {(f"scope {number}", f"measure {each}"): number + each / 7 for each in range(100)}
    return Step(f"step {number}" * 50, values, Step("before", {("a" * 999, "b"): 0.5}))


MADE: dict[str, Callable[[], Any]] = {
    "a dataclass": lambda: step(1),
    "many of them": lambda: [step(number) for number in range(30)],
    "with slots": lambda: [Slim(f"{number}" * 5000) for number in range(20)],
    "rows": lambda: [{"step": n + 1000, "name": f"{n}" * 9, "value": n / 3} for n in range(1500)],
    "more than are looked at": lambda: [f"{number:09}" * 20 for number in range(5 * MOST + 1)],
    "a long dictionary": lambda: {f"{number:09}": [number / 3] for number in range(3 * MOST + 7)},
    "nested": lambda: {"a": [({"b": ["c" * 9000 + str(n)]},) for n in range(9)]},
}


@pytest.mark.parametrize("name", MADE)
def test_it_is_what_python_really_took(name: str) -> None:
    gc.collect()
    tracemalloc.start()
    try:
        made = MADE[name]()
        took = tracemalloc.get_traced_memory()[0]
        assert weight(made) - SMALL == pytest.approx(took, rel=0.1)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("table", "size"),
    [
        (pl.DataFrame({"n": pl.Series(range(1000), dtype=pl.Int64)}), 8000),
        (pl.Series(range(1000), dtype=pl.Int32), 4000),
        (pa.table({"n": pa.array(range(1000), pa.int64())}), 8000),
        (np.zeros(1000), 8000),
    ],
)
def test_tables_say_what_they_take_wherever_they_are(table: Any, size: int) -> None:
    assert weight(table) == SMALL + size
    assert weight([table, table]) == SMALL + size + sys.getsizeof([table, table]), "the same one twice is there once"
    assert weight(Step("", {("", ""): table})) >= SMALL + size


def test_nothing_weighs_nothing() -> None:
    assert weight(None) == weight(True) == SMALL


def test_what_holds_itself_or_goes_deep_has_an_end() -> None:
    ring: list[Any] = ["a" * 1000]
    ring.append(ring)
    assert SMALL + 1000 < weight(ring) < SMALL + 1300
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert weight(deep) > 5000 * sys.getsizeof([None]) * 0.9
