"""Recent: tables that were read and verified a moment ago, kept while the stages of a step ask for them again."""

import threading
from collections.abc import Callable, Hashable

import pyarrow as pa

MAX_BYTES = 256 << 20


class Recent:
    """The last tables read, up to so many bytes; the ones not asked for longest go first. Threads may share one."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._tables: dict[Hashable, tuple[pa.Table, int]] = {}
        self._lock = threading.Lock()

    def get(self, name: Hashable, read: Callable[[], pa.Table]) -> pa.Table:
        """Return the table kept under `name`, or `read` it; a name stands for one content for ever."""
        with self._lock:
            kept = self._tables.pop(name, None)
        if kept is None:
            table = read()
            kept = table, table.nbytes  # asking for the size takes as long as a small read
        with self._lock:
            self._tables[name] = kept  # the last one now
            self._drop()
        return kept[0]

    def _drop(self) -> None:
        total = sum(size for _, size in self._tables.values())
        for name in list(self._tables):
            if total <= self._max_bytes:
                return
            total -= self._tables.pop(name)[1]
