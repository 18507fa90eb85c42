"""Gathering: the work of many quick stages becomes visible together, in one commit of each table and one of the ledger.

Files are durable as soon as they are written; what waits is their names. Until `flush` nobody but the gatherer sees the
work, and dying before it costs what was gathered, never part of it: the ledger's rows are still written last, at once.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from storage.errors import StoreError
from storage.refs import Entry, Slice
from storage.slices import WrittenSlice

if TYPE_CHECKING:
    from storage.store import Store

MOST_ENTRIES = 128
MOST_SECONDS = 5.0


class CommitBuffer(AbstractContextManager["CommitBuffer"]):
    """Holds back what one run commits, for one thread; leaving the block flushes, also when an error passes through.

    That error stays the one that is told: where the flush fails as well, it carries a note.
    """

    def __init__(self, store: "Store") -> None:
        self._store = store
        self._written: dict[str, list[WrittenSlice]] = {}
        self._entries: dict[str, Entry] = {}
        self._since = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.flush()
        except StoreError as lost:
            if problem is None:
                raise
            problem.add_note(f"What was finished and not yet visible is lost as well, and computed again: {lost.what}.")

    def append(self, table: str, rows: pa.Table, *, run: str, step: int, key: str, attempt: str) -> Slice:
        """Write rows as one slice, durable, whose table does not know of it yet; raises as Slices.append does."""
        written = self._store.slices.write(table, rows, run=run, step=step, key=key, attempt=attempt)
        self._written.setdefault(table, []).append(written)
        return written.piece

    def commit(self, entry: Entry) -> Entry:
        """Take a ledger row of a whole piece of work and return it; what is gathered is flushed now and then.

        What another run committed in the meantime under the same key takes its place when it is flushed.
        """
        if not self._entries:
            self._since = time.monotonic()
        standing = self._entries.setdefault(entry.key, entry)
        if len(self._entries) >= MOST_ENTRIES or time.monotonic() - self._since > MOST_SECONDS:
            self.flush()
        return standing

    def find(self, key: str) -> Entry | None:
        """The gathered row of a key, if there is one."""
        return self._entries.get(key)

    def flush(self) -> Mapping[str, Entry]:
        """Commit what is gathered: first what the tables hold, then all ledger rows at once; return those that stand.

        Raises what Ledger.commit raises; nothing gathered is then visible.
        """
        for table, written in self._written.items():
            self._store.slices.hold(table, written)
        standing = self._store.ledger.commit_all(list(self._entries.values()))
        self._written, self._entries = {}, {}
        return {entry.key: entry for entry in standing}
