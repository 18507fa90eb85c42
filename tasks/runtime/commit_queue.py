"""CommitQueue: commits finished stages in a thread, in their order, while the next ones compute from memory.

The files of rows are durable as soon as they are written; only the commits wait. A stage counts when its row is in the
ledger, for this run as for others: a crash before loses the waiting stages, whole and the newest first.
"""

from collections.abc import Callable, Sequence
from typing import Self

import pyarrow as pa

from storage.commits import GroupCommitter
from storage.ledger import Ledger
from storage.refs import Entry, Slice
from storage.slices import Slices, WrittenSlice

LINGER_SECONDS = 0.05
"""How long a first stage waits for others that then share its commit: stages on tables alone take less."""
MAX_WAITING = 128
"""Stages with which a commit waits no longer."""


class CommitQueue(GroupCommitter[Entry]):
    """Commits what threads of one run finish: one commit of each table for all that waits, then one of the ledger.

    For repeatable work: the row of another run that finished the same work first replaces this run's, which continues
    with its own rows.
    """

    def __init__(self, slices: Slices, ledger: Ledger, linger_seconds: float = LINGER_SECONDS) -> None:
        """`linger_seconds` is how long a stage may wait for others if no caller flushes."""
        super().__init__("commits", linger_seconds, max_waiting=MAX_WAITING)
        self._slices, self._ledger = slices, ledger
        self._written: dict[str, list[WrittenSlice]] = {}
        """By attempt; of a failed attempt, which has no ledger row, they are never committed."""
        self._actions: dict[str, Callable[[], object]] = {}
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.flush()
        except Exception as lost:
            if error is None:
                raise
            error.add_note(f"What was finished and not yet visible is lost as well, and computed again: {lost}.")
        finally:
            self.stop(drop=True)

    def append(self, table: str, rows: pa.Table, *, run: str, step: int, key: str, attempt: str) -> Slice:
        """Write rows as one slice, durable, that its table does not hold yet; raises as Slices.write does."""
        written = self._slices.write(table, rows, run=run, step=step, key=key, attempt=attempt)
        with self.lock:
            self._written.setdefault(attempt, []).append(written)
        return written.piece

    def before(self, attempt: str, action: Callable[[], object]) -> None:
        """Have `action` done in the thread before the work of an attempt is committed; its failure is the commit's."""
        with self.lock:
            self._actions[attempt] = action

    def commit(self, entry: Entry) -> Entry:
        """Hand over the ledger row of finished work, committed with others; returns immediately.

        Returns the waiting row of the same key, if there is one. Raises the failure of an earlier commit.
        """
        with self.lock:
            self.raise_failure()
            if (standing := self.find(entry.key)) is not None:
                return standing
            self.put(entry)
            return entry

    def find(self, key: str) -> Entry | None:
        """The row of a key that is still to be committed, if there is one."""
        return next((entry for entry in self.waiting if entry.key == key), None)

    def _commit(self, entries: Sequence[Entry]) -> None:
        with self.lock:
            slices = [written for entry in entries for written in self._written.get(entry.attempt, ())]
            actions = [self._actions[entry.attempt] for entry in entries if entry.attempt in self._actions]
        for action in actions:
            action()
        # Tables before the ledger: a row must never name a slice that its table does not hold.
        for table in dict.fromkeys(written.piece.table for written in slices):
            self._slices.commit(table, [written for written in slices if written.piece.table == table])
        self._ledger.commit_all(entries)
        with self.lock:
            for entry in entries:
                self._written.pop(entry.attempt, None)
                self._actions.pop(entry.attempt, None)
