"""What was derived of finished work, held in memory within a bound. Safe to share between threads."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, TypeVar

from flows.viewer.weights import weight

MOST_BYTES = 512 * 2**20
Value = TypeVar("Value")


class Kept:
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
        weighs = weight(value)  # outside the lock: it may take a while
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
