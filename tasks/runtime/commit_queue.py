"""Commits finished stages in a thread, in their order, while the next ones compute from what is in memory.

The files of rows are durable as soon as they are written; only the commits wait. A stage counts when its row is in the
ledger, for this run as for others that look: dying before loses what waited, whole stages and the newest first.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import pyarrow as pa

from storage.ledger import Ledger
from storage.refs import Entry, Slice
from storage.slices import Slices, WrittenSlice

LINGER_SECONDS = 0.05
"""How long a first stage waits for others that then share its commit: stages on tables alone take less."""
MAX_WAITING = 128
"""Stages with which a commit waits no longer."""


class CommitQueue:
    """Commits what threads of one run finish; all that waits goes in one commit of each table and one of the ledger.

    For work that comes out the same when it is done again: the row of another run that finished the same work first
    takes the place of this one's, which has gone on with its own rows by then.
    """

    def __init__(self, slices: Slices, ledger: Ledger, linger_seconds: float = LINGER_SECONDS) -> None:
        """`linger_seconds` is how long a stage may wait for others where nobody hurries it."""
        self._slices, self._ledger, self._linger_seconds = slices, ledger, linger_seconds
        self._written: dict[str, list[WrittenSlice]] = {}
        self._actions: dict[str, Callable[[], object]] = {}
        self._waiting: dict[str, Entry] = {}
        self._changed = threading.Condition()
        self._hurry = 0
        self._due = math.inf
        """When the next commit is due."""
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="commits", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.flush()
        except Exception as lost:
            if error is None:
                raise
            error.add_note(f"What was finished and not yet visible is lost as well, and computed again: {lost}.")
        finally:
            self._close()

    def append(self, table: str, rows: pa.Table, *, run: str, step: int, key: str, attempt: str) -> Slice:
        """Write rows as one slice, durable, that its table does not hold yet; raises as Slices.append does."""
        written = self._slices.write(table, rows, run=run, step=step, key=key, attempt=attempt)
        with self._changed:
            # With its attempt: that of one that fails has no row in the ledger, and is never committed.
            self._written.setdefault(attempt, []).append(written)
        return written.piece

    def before(self, attempt: str, action: Callable[[], object]) -> None:
        """Have `action` done in the thread before the work of an attempt is committed; its failure is the commit's."""
        with self._changed:
            self._actions[attempt] = action

    def commit(self, entry: Entry, soon: bool = False) -> Entry:
        """Hand over the ledger row of finished work, which is committed `soon` or may wait for others; returns at once.

        Raises what an earlier commit raised.
        """
        with self._changed:
            self._raise()
            standing = self._waiting.setdefault(entry.key, entry)
            self._due = min(self._due, time.monotonic() + (LINGER_SECONDS if soon else self._linger_seconds))
            self._changed.notify_all()
            return standing

    def hurry(self) -> None:
        """Let what was handed over be committed now, without waiting for it."""
        with self._changed:
            if self._waiting:
                self._due = 0.0
                self._changed.notify_all()

    def find(self, key: str) -> Entry | None:
        """The row of a key that is still to be committed, if there is one."""
        with self._changed:
            return self._waiting.get(key)

    def flush(self) -> None:
        """Wait until all that was handed over is committed; raises what a commit raised, and then it can be called
        again."""
        with self._changed:
            self._hurry += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: not self._waiting or self._failure)
            finally:
                self._hurry -= 1
            self._raise()

    def _raise(self) -> None:
        # Taken: the thread then tries the same again.
        failure, self._failure = self._failure, None
        if failure is not None:
            self._due = 0.0
            self._changed.notify_all()
            raise failure

    def _close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while entries := self._take():
            try:
                self._commit(entries)
            except BaseException as failure:  # handed to whoever commits or flushes next
                with self._changed:
                    self._failure = failure
                    self._changed.notify_all()
            else:
                self._forget(entries)

    def _take(self) -> list[Entry]:
        """Wait for work; return it in the order in which it was finished, and nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or (self._waiting and self._failure is None))
            while not (self._closing or self._hurry or len(self._waiting) >= MAX_WAITING):
                if (left := self._due - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
            self._due = math.inf  # for what is handed over from now on
            return [] if self._closing else list(self._waiting.values())

    def _commit(self, entries: Sequence[Entry]) -> None:
        with self._changed:
            written = [each for entry in entries for each in self._written.get(entry.attempt, ())]
            actions = [self._actions[entry.attempt] for entry in entries if entry.attempt in self._actions]
        for action in actions:
            action()
        # Tables before the ledger: a row must never name a slice that its table does not hold.
        for table in dict.fromkeys(each.piece.table for each in written):
            self._slices.commit(table, [each for each in written if each.piece.table == table])
        self._ledger.commit_all(entries)

    def _forget(self, entries: Sequence[Entry]) -> None:
        with self._changed:
            for entry in entries:
                del self._waiting[entry.key]
                self._written.pop(entry.attempt, None)
                self._actions.pop(entry.attempt, None)
            self._changed.notify_all()
