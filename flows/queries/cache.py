"""Keeps what was derived of finished work in memory, within a bound. Safe to share between threads."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import islice
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa

MOST_BYTES = 512 * 2**20
Name = TypeVar("Name", bound=Hashable)
Value = TypeVar("Value")


class Cache:
    """Things by name, the one that was not asked for longest going first when there is no room."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = Lock()
        self._things: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.num_bytes = 0
        """What all of them weigh, each as it was when it came: things are not changed while they are held."""

    def once(self, name: Hashable, make: Callable[[], Value]) -> Value:
        """Return what `make` returns, made once while there is room; two threads that ask at once may both make it."""
        with self._lock:
            if name in self._things:
                self._things.move_to_end(name)
                found: Value = self._things[name][0]
                return found
        return self.put(name, make())

    def put(self, name: Hashable, value: Value) -> Value:
        """Hold a value under a name, in place of what is held there, and return it."""
        weighs = size_in_bytes(value)  # outside the lock: it may take a while
        with self._lock:
            self.num_bytes += weighs - self._things.pop(name, (None, 0))[1]
            self._things[name] = value, weighs
            while self.num_bytes > self._most_bytes and len(self._things) > 1:
                self.num_bytes -= self._things.popitem(last=False)[1][1]
        return value

    def held(self, name: Hashable) -> Any | None:
        """Return what is held under a name; None where there is nothing."""
        with self._lock:
            if name in self._things:
                self._things.move_to_end(name)
            return self._things.get(name, (None, 0))[0]

    def each_once(
        self, purpose: Hashable, names: Sequence[Name], read: Callable[[list[Name]], Mapping[Name, Value]]
    ) -> dict[Name, Value]:
        """Return what belongs to each name; `read` is asked once, for all names at once of which nothing is held.

        A name that `read` leaves out has no entry.
        """
        held = {name: self.held((purpose, name)) for name in names}
        new = [name for name, value in held.items() if value is None]
        for name, value in (read(new) if new else {}).items():
            held[name] = self.put((purpose, name), value)
        return {name: value for name, value in held.items() if value is not None}

    def while_same(self, name: Hashable, state: Hashable, make: Callable[[], Value]) -> Value:
        """Return what `make` returns, made anew when `state` is another; what was made before is let go.

        A run that goes on has another state after each piece of work: all of them would fill the memory.
        """
        known: tuple[Hashable, Value] | None = self.held(name)
        if known is None or known[0] != state:
            known = self.put(name, (state, make()))
        return known[1]


SMALL = 1024
"""Bytes that anything which is kept counts for beside its own: its name and its place."""
MOST_ITEMS = 2000
"""Items of a long list or dictionary that are looked at, evenly spread; the others are taken to be like them."""
_TABLES = (pa.Table, pa.RecordBatch, pa.Array, pa.ChunkedArray, np.ndarray)
_ATOMS = (str, bytes, bytearray, int, float, complex, type)


def size_in_bytes(value: Any) -> int:
    """Return about how many bytes something takes: tables as they say, all else with what it holds, however deep.

    What is held twice in it counts once. Of long lists and dictionaries some items alone are weighed.
    """
    seen: set[int] = set()
    total, waiting = 0.0, [(value, 1.0)]
    while waiting:
        each, times = waiting.pop()
        if each is None or isinstance(each, bool) or id(each) in seen:
            continue
        seen.add(id(each))
        total += times * _own_bytes(each)
        waiting += [(item, times * like) for item, like in _items(each)]
    return SMALL + round(total)


def _own_bytes(value: Any) -> int:
    if isinstance(value, (pl.DataFrame, pl.Series)):
        return int(value.estimated_size())
    return int(value.nbytes) if isinstance(value, _TABLES) else sys.getsizeof(value)


def _items(value: Any) -> Iterator[tuple[Any, float]]:
    """Yield what a value holds, and for how many items like it each stands."""
    if isinstance(value, (pl.DataFrame, pl.Series, *_TABLES, *_ATOMS)):
        return
    if isinstance(value, (Mapping, Sequence, set, frozenset)):
        apart = -(-len(value) // MOST_ITEMS) or 1
        like = len(value) / -(-len(value) // apart) if value else 1.0
        for items in (value.keys(), value.values()) if isinstance(value, Mapping) else (value,):
            yield from ((item, like) for item in islice(items, 0, None, apart))
        return
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    yield getattr(value, "__dict__", None), 1.0
    yield from ((getattr(value, name, None), 1.0) for name in slots)
