"""What was derived of finished work, held in memory within a bound. Safe to share between threads."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from threading import Lock
from typing import Any, TypeVar

import polars as pl

MOST_BYTES = 512 * 2**20
SMALL = 1024
"""Bytes that anything else than a frame counts for."""
Value = TypeVar("Value")


class Kept:
    """Things by name, the one that was not asked for longest going first when there is no room."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = Lock()
        self._things: OrderedDict[Hashable, Any] = OrderedDict()
        self.num_bytes = 0
        """What all of them weigh."""

    def once(self, name: Hashable, make: Callable[[], Value]) -> Value:
        """Return what `make` returns, made once while there is room; two threads that ask at once may both make it."""
        with self._lock:
            if name in self._things:
                self._things.move_to_end(name)
                found: Value = self._things[name]
                return found
        made = make()
        with self._lock:
            self._keep(name, made)
        return made

    def held(self, name: Hashable) -> Any | None:
        """Return what is held under a name; None where there is nothing."""
        with self._lock:
            if name in self._things:
                self._things.move_to_end(name)
            return self._things.get(name)

    def _keep(self, name: Hashable, made: Any) -> None:
        self.num_bytes += weight(made) - weight(self._things.pop(name, None))
        self._things[name] = made
        while self.num_bytes > self._most_bytes and len(self._things) > 1:
            self.num_bytes -= weight(self._things.popitem(last=False)[1])


def weight(value: Any) -> int:
    """Return about how many bytes something takes: frames are counted, alone or in containers, the rest is small."""
    if value is None:
        return 0
    if isinstance(value, pl.DataFrame):
        return SMALL + int(value.estimated_size())
    if isinstance(value, Mapping):
        return SMALL + sum(map(weight, value.values()))
    if isinstance(value, (list, tuple)):
        return SMALL + sum(map(weight, value))
    return SMALL
