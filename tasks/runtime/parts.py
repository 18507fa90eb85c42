"""Parts: commits the finished groups of a long stage while the others are still computed, as parts of one key."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from storage.commits import GroupCommitter
from storage.refs import Entry, Slice
from storage.store import Store
from tasks.runtime.run_context import keep_recent

LINGER_SECONDS = 0.1
"""How long a first finished group waits for others that then share its commit: those of a batch end close together."""
PAUSE_RATIO = 3.0
"""Pause after a commit, in durations of that commit: committing takes at most a quarter of the time."""
_log = logging.getLogger("stagecoach")


class Parts(GroupCommitter[Mapping[str, pa.Table]]):
    """Commits the finished units (groups) of one key as they come, and knows those that an earlier attempt committed.

    `put` returns immediately, so that the caller's event loop never waits for the disk; the pauses between commits let
    more groups share one, and leave the processor to running rollouts.
    """

    def __init__(
        self,
        store: Store,
        make_entry: Callable[[str, Sequence[Slice], int], Entry],
        unit: tuple[str, str],
        commit_earlier: Callable[[], None],
        tell: Callable[[Collection[str], int], None],
    ) -> None:
        """Open the parts of a key. `unit` is the table and the column that name a unit: that of a group's id, say.

        `make_entry` makes the ledger row of a part, or of the whole, of its name, slices and number of tokens.
        `commit_earlier` waits for the commit of the inputs: nothing is committed before that. After each commit `tell`
        is called with the units that it made safe and the number of all units handed over.
        """
        super().__init__("parts", LINGER_SECONDS, PAUSE_RATIO)
        self._store, self._make_entry, self._unit = store, make_entry, unit
        self._commit_earlier, self._tell = commit_earlier, tell
        # Only for what all parts have in common: run, step, key, attempt.
        first = make_entry("", (), 0)
        self._identity: dict[str, Any] = {name: getattr(first, name) for name in ("run", "step", "key", "attempt")}
        # The other rows of a part that repeats a unit are computed again.
        self._earlier, self._units = store.first_parts(store.ledger.parts(first.key), unit)
        self._committed: list[Entry] = list(self._earlier)
        self.start()

    @property
    def tokens(self) -> int:
        """Tokens over all committed parts."""
        return sum(entry.tokens for entry in self._committed)

    def earlier_rows(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table that earlier attempts committed."""
        slices = [piece for entry in self._earlier for piece in entry.slices(table)]
        return self._store.read(slices).to_pylist() if slices else []

    def finished_units(self) -> set[str]:
        """Return the units that were handed over, by earlier attempts or this one; raises as `put` does."""
        with self.lock:
            self.raise_failure()
            return set(self._units)

    def put(self, tables: Mapping[str, pa.Table]) -> None:
        """Hand over the rows of finished units, or rows of no unit. Raises the failure of an earlier commit."""
        with self.lock:
            super().put(tables)
            # Before they are committed: the caller must not begin them again.
            self._units |= self._unit_names(tables)

    def close(self) -> list[Slice]:
        """Commit what is waiting and return the slices of every part, in the order of their commits."""
        self.stop()
        self.raise_failure()
        return [piece for entry in self._committed for piece in entry.outputs]

    def _unit_names(self, tables: Mapping[str, pa.Table]) -> set[str]:
        table, column = self._unit
        return {str(name) for name in tables[table][column].to_pylist()} if table in tables else set()

    def _commit(self, groups: Sequence[Mapping[str, pa.Table]]) -> None:
        names = dict.fromkeys(name for group in groups for name in group)  # an optional table is not in every group
        tables = {name: pa.concat_tables([group[name] for group in groups if name in group]) for name in names}
        self._commit_earlier()
        slices = [self._store.append(name, rows, **self._identity) for name, rows in tables.items()]
        for piece in slices:
            keep_recent(piece, tables[piece.table])
        self._committed.append(self._store.ledger.commit(self._make_entry(uuid4().hex, slices, count_tokens(tables))))
        try:
            self._tell(self._unit_names(tables), len(self._units))
        except Exception:  # the part is committed: a repetition would double its rows
            _log.exception("the commit of a part was not told")


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
