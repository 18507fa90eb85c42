"""Parts: commits the finished groups of a long stage while the others are still computed, as parts of one key."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from storage.refs import Entry, Slice
from storage.store import Store
from tasks.runtime.run_context import RECENT

LINGER_SECONDS = 0.1
"""How long a first finished group waits for others that then share its commit: those of a batch end close together."""
PAUSE_RATIO = 3.0
"""Pause after a commit, in durations of that commit: committing takes at most a quarter of the time."""


class MakeEntry(Protocol):
    """Makes the ledger row of a part, or of the whole, out of its slices."""

    def __call__(self, part: str, outputs: Sequence[Slice], tokens: int) -> Entry: ...


class Parts:
    """Commits the finished units (groups) of one key as they come, and knows those that an earlier attempt committed.

    `put` returns at once; one thread commits everything that has come since its last commit, so that the caller's
    event loop never waits for the disk and a slow disk means larger parts, not a queue. It waits LINGER_SECONDS before
    a commit, and PAUSE_RATIO times what that took after it: more groups then share one, and running rollouts have the
    processor.
    """

    def __init__(
        self,
        store: Store,
        make_entry: MakeEntry,
        unit: tuple[str, str],
        commit_earlier: Callable[[], None] = lambda: None,
        tell: Callable[[Collection[str], int], None] = lambda units, num_units: None,
    ) -> None:
        """Open the parts of a key. `unit` is the table and the column that name a unit: that of a group's id, say.

        `commit_earlier` waits for the commit of what they are made from: nothing is committed before that. After
        each commit `tell` is called with the units that are safe by it and the number of all units handed over.
        """
        self._tell = tell
        self._store = store
        self._commit_earlier = commit_earlier
        self._unit = unit
        self._make_entry = make_entry
        # Only for what all parts have in common: run, step, key, attempt.
        first = make_entry("", (), 0)
        self._identity: dict[str, Any] = {name: getattr(first, name) for name in ("run", "step", "key", "attempt")}
        # What else is in a part that repeats a unit is made again.
        self._earlier, self._units = store.first_parts(store.ledger.parts(first.key), unit)
        self._committed: list[Entry] = list(self._earlier)
        self._waiting: list[Mapping[str, pa.Table]] = []
        self._wake = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="parts", daemon=True)
        self._thread.start()

    @property
    def tokens(self) -> int:
        """Tokens over all committed parts."""
        return sum(entry.tokens for entry in self._committed)

    def earlier_rows(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table that earlier attempts committed."""
        slices = [piece for entry in self._earlier for piece in entry.slices(table)]
        return self._store.read(slices).to_pylist() if slices else []

    def finished_units(self) -> set[str]:
        """Return the units that were handed over, by earlier attempts or this one."""
        with self._wake:
            self._raise()
            return set(self._units)

    def put(self, tables: Mapping[str, pa.Table]) -> None:
        """Hand over the rows of finished units, or rows of no unit; raises what an earlier commit raised."""
        with self._wake:
            self._raise()
            self._waiting.append(tables)
            # At once, not when they are committed: the caller must not begin them again.
            self._units |= self._unit_names(tables[self._unit[0]]) if self._unit[0] in tables else set()
            self._wake.notify()

    def close(self) -> list[Slice]:
        """Commit what is waiting and return the slices of every part, in the order of their commits."""
        self.stop()
        self._raise()
        return [piece for entry in self._committed for piece in entry.outputs]

    def stop(self) -> None:
        """Commit what is waiting and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        # What was handed over is safe before the stage ends, whichever way.
        self._thread.join()

    def _unit_names(self, rows: pa.Table) -> set[str]:
        return {str(name) for name in rows[self._unit[1]].to_pylist()}

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while (pieces := self._take()) is not None:
                began = time.monotonic()
                self._commit(pieces)
                self._pause(PAUSE_RATIO * (time.monotonic() - began))
        except BaseException as failure:  # handed to the caller at its next put or close
            self._failure = failure

    def _pause(self, seconds: float) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._closing, seconds)

    def _take(self) -> list[Mapping[str, pa.Table]] | None:
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._closing)
            self._wake.wait_for(lambda: self._closing, LINGER_SECONDS)
            pieces, self._waiting = self._waiting, []
            return pieces or None

    def _commit(self, pieces: Sequence[Mapping[str, pa.Table]]) -> None:
        names = dict.fromkeys(name for piece in pieces for name in piece)  # an optional table is not in every piece
        tables = {name: pa.concat_tables([piece[name] for piece in pieces if name in piece]) for name in names}
        self._commit_earlier()
        slices = [self._store.append(name, rows, **self._identity) for name, rows in tables.items()]
        for piece in slices:
            RECENT.put((piece.table, piece.digest), tables[piece.table])
        self._committed.append(self._store.ledger.commit(self._make_entry(uuid4().hex, slices, count_tokens(tables))))
        name, column = self._unit
        self._tell(self._unit_names(tables[name].select([column])) if name in tables else (), len(self._units))


def count_tokens(tables: Mapping[str, pa.Table]) -> int:
    """Return how many tokens `tables` speak of: trained, packed, or sampled and fed in; 0 where that means nothing."""
    if "updates" in tables:
        return int(pc.sum(tables["updates"]["num_tokens"]).as_py() or 0)
    if "batches" in tables:
        return int(pc.sum(pc.list_value_length(tables["batches"]["token_ids"])).as_py() or 0)
    if "traces" in tables:
        traces = tables["traces"]
        return int(pc.sum(pc.add(traces["num_input_tokens"], traces["num_output_tokens"])).as_py() or 0)
    return 0
