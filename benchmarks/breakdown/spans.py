"""Wall-clock of the main thread by component."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Spans:
    """dict[str, float] of the main thread by component: time inside a nested span is the nested component's alone."""

    def __init__(self) -> None:
        self.exclusive: dict[str, float] = defaultdict(float)
        self.total: dict[str, float] = defaultdict(float)
        self._open: list[str] = ["flow"]
        self._since = time.perf_counter()

    @contextmanager
    def span(self, component: str) -> Iterator[None]:
        """Count the block's time for a component; other threads are not followed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._settle()
        self._open.append(component)
        began = self._since
        try:
            yield
        finally:
            self._settle()
            self._open.pop()
            self.total[component] += self._since - began

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return what was counted since the last call: exclusive and total seconds."""
        self._settle()
        taken = dict(self.exclusive), dict(self.total)
        self.exclusive.clear()
        self.total.clear()
        return taken

    def _settle(self) -> None:
        now = time.perf_counter()
        self.exclusive[self._open[-1]] += now - self._since
        self._since = now

    def wrap(self, owner: Any, name: str, component: str) -> None:
        """Let a function of a module or class run inside a span."""
        inner = getattr(owner, name)

        def spanned(*positional: Any, **named: Any) -> Any:
            with self.span(component):
                return inner(*positional, **named)

        setattr(owner, name, spanned)
