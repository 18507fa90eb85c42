"""Commits the finished groups of a long stage while the rest is still under way, each commit as a part of its key."""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from storage.refs import Entry, Slice
from storage.store import Store

PAUSE_RATIO = 3.0
"""Pause after a commit, in durations of that commit: committing takes at most a quarter of the time."""


class MakeEntry(Protocol):
    """Makes the ledger row of a part, or of the whole, out of its slices."""

    def __call__(self, part: str, outputs: Sequence[Slice], tokens: int) -> Entry: ...


class Parts:
    """Commits the finished units (groups) of one key as they come, and knows those that an earlier attempt committed.

    `put` returns at once; one thread commits everything that has come since its last commit, so that the caller's
    event loop never waits for the disk and a slow disk means larger parts, not a queue. After a commit it pauses for
    PAUSE_RATIO times what that took: more groups then share the next one, and running rollouts have the processor.
    """

    def __init__(self, store: Store, make_entry: MakeEntry, unit: tuple[str, str]) -> None:
        """Open the parts of a key. `unit` is the table and the column that name a unit: that of a group's id, say."""
        self._store = store
        self._unit = unit
        self._make_entry = make_entry
        first = make_entry("", (), 0)
        self._identity: dict[str, Any] = {name: getattr(first, name) for name in ("run", "step", "key", "attempt")}
        self._earlier, self._units = self._drop_repeated(store.ledger.parts(first.key))
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

    def finished_units(self) -> set[str]:
        """Return the units that were handed over, by earlier attempts or this one."""
        with self._wake:
            self._raise()
            return set(self._units)

    def put(self, tables: Mapping[str, pa.Table]) -> None:
        """Hand over the rows of finished units; raises what an earlier commit raised."""
        with self._wake:
            self._raise()
            self._waiting.append(tables)
            self._units |= self._unit_names(tables[self._unit[0]])
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
        self._thread.join()

    def _drop_repeated(self, parts: Sequence[Entry]) -> tuple[list[Entry], set[str]]:
        """Return the parts whose units no older part has, and their units.

        Two attempts that ran at the same time may both have committed a unit. One of the two counts; what else is in a
        part that repeats one is made again.
        """
        counted, units = [], set[str]()
        table, column = self._unit
        for part in sorted(parts, key=lambda part: (part.finished_at, part.part)):
            found = self._unit_names(self._store.read(part.slices(table), [column]))
            if not found & units:
                counted.append(part)
                units |= found
        return counted, units

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
            pieces, self._waiting = self._waiting, []
            return pieces or None

    def _commit(self, pieces: Sequence[Mapping[str, pa.Table]]) -> None:
        names = dict.fromkeys(name for piece in pieces for name in piece)  # an optional table is not in every piece
        tables = {name: pa.concat_tables([piece[name] for piece in pieces if name in piece]) for name in names}
        slices = [self._store.append(name, rows, **self._identity) for name, rows in tables.items()]
        self._committed.append(self._store.ledger.commit(self._make_entry(uuid4().hex, slices, count_tokens(tables))))


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
