"""A commit buffer: many quick stages become visible together, in one commit of each table and one of the ledger.

Files are durable as soon as they are written; only their commits wait. Until `flush` nobody but the owner of the buffer
sees the work. Dying before a flush loses all of it and never a part: the ledger's rows are still written last, at once.
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

MAX_ENTRIES = 128
MAX_SECONDS = 5.0
"""A buffer is flushed with the commit that finds it this full or this old."""


class CommitBuffer(AbstractContextManager["CommitBuffer"]):
    """Delays what one run commits, for one thread; leaving the block flushes, also when an error passes through.

    That error is still the one raised: where the flush fails as well, it gets a note.
    """

    def __init__(self, store: "Store") -> None:
        self._store = store
        self._written: dict[str, list[WrittenSlice]] = {}
        self._entries: dict[str, Entry] = {}
        self._first_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.flush()
        except StoreError as lost:
            if error is None:
                raise
            error.add_note(f"What was finished and not yet visible is lost as well, and computed again: {lost.what}.")

    def append(self, table: str, rows: pa.Table, *, run: str, step: int, key: str, attempt: str) -> Slice:
        """Write rows as one slice, durable, that its table does not hold yet; raises as Slices.append does."""
        written = self._store.slices.write(table, rows, run=run, step=step, key=key, attempt=attempt)
        self._written.setdefault(table, []).append(written)
        return written.piece

    def commit(self, entry: Entry) -> Entry:
        """Buffer the ledger row of finished work and return it; flush where the buffer is full or old.

        A row that another run has committed under the same key by then takes its place in the flush.
        """
        if not self._entries:
            self._first_at = time.monotonic()
        standing = self._entries.setdefault(entry.key, entry)
        if len(self._entries) >= MAX_ENTRIES or time.monotonic() - self._first_at > MAX_SECONDS:
            self.flush()
        return standing

    def find(self, key: str) -> Entry | None:
        """The buffered row of a key, if there is one."""
        return self._entries.get(key)

    def flush(self) -> Mapping[str, Entry]:
        """Commit what is buffered: the slices of each table, then all ledger rows at once; return the rows that stand.

        Raises what Ledger.commit raises; nothing of the buffer is then visible.
        """
        for table, written in self._written.items():
            self._store.slices.commit(table, written)
        standing = self._store.ledger.commit_all(list(self._entries.values()))
        self._written, self._entries = {}, {}
        return {entry.key: entry for entry in standing}
