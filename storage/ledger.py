"""The ledger: which work is finished and which slices are its output. Its row is the only commit point of a stage."""

import math
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from datetime import UTC, datetime
from itertools import pairwise
from operator import attrgetter
from typing import Any

import pyarrow as pa

from storage.delta.table import CommitConflict
from storage.errors import StoreError, StoreUnavailable, WorkRemoved
from storage.records import CachedTable
from storage.refs import Entry, File, Slice, parse_json
from storage.roots import Root
from storage.schemas.system_tables import LEDGER
from storage.slices import one_array

APPLICATION = "ledger"
# A lost race means that another writer got on; to lose so many in a row is a fault and no bad luck.
MAX_RACES = 200
REMOVAL = "removal"
"""Application id of commits that remove rows; one after the name of a run holds when rows of it were last removed."""
MERGE_FILES = 16
"""Small files of one run in the ledger that are merged, so that opening stays quick between maintenances."""


def entries_of(rows: pa.Table) -> list[Entry]:
    """Return the entries out of rows of the ledger table, run included.

    Column by column: every query on a run of a thousand steps reads ten thousand rows, and with a dictionary for each
    it takes twice as long.
    """
    values = {name: _values(one_array(rows[name])) for name in rows.column_names}
    values |= {name: [parse_json(text) for text in values[name]] for name in ("section", "versions")}
    values |= {name: [at.replace(tzinfo=UTC) for at in values[name]] for name in ("started_at", "finished_at")}
    values["inputs"] = [dict(pairs) for pairs in values["inputs"]]
    values["outputs"] = [tuple(map(_slice, pieces)) for pieces in values["outputs"]]
    return [Entry(*row) for row in zip(*(values[field.name] for field in fields(Entry)), strict=True)]


def _slice(values: Sequence[Any]) -> Slice:
    table, run, attempt, rows, digest, files = values
    return Slice(table, run, attempt, rows, digest, tuple([File(*file) for file in files]))


def _values(column: Any) -> list[Any]:
    """What a column without nulls holds, a struct as a tuple; through numpy, without an Arrow object for each value."""
    if pa.types.is_list(column.type):
        items, borders = _values(column.flatten()), column.offsets.to_pylist()
        return [items[start - borders[0] : end - borders[0]] for start, end in pairwise(borders)]
    if pa.types.is_struct(column.type):
        return list(zip(*map(_values, column.flatten()), strict=True))
    values = column.to_numpy(zero_copy_only=False).tolist()
    # Names, keys and attempts are in many rows, and all rows are held: each text once.
    return [*map(sys.intern, values)] if pa.types.is_string(column.type) else list(values)


class Ledger(CachedTable):
    """Finished work by key, held in memory and moved forward by what was added since; safe to share between threads."""

    contract = LEDGER

    def __init__(self, root: Root) -> None:
        super().__init__(root)
        self._lock = self.table.lock  # one lock: nobody may move the handle between a refresh and the append
        self._by_key: dict[str, dict[tuple[str, str], Entry]] = {}
        """The rows of each key, by run and part."""
        self._users: dict[str, set[str]] = {}
        """By the key of a policy, the runs that have work of it."""
        self._commits = 0
        self._removals = 0
        self._refreshed_at = -math.inf

    def find(self, key: str, run: str | None = None, staleness: float = 0.0) -> Entry | None:
        """The finished whole of a key: the row of `run` if there is one, else the earliest row of any run.

        `staleness` is how many seconds old the last refresh may be: what another process committed since is then not
        found yet, and is noticed at the latest when the same work is committed.
        """
        whole = {row_run: entry for (row_run, part), entry in self._rows(key, staleness).items() if part == ""}
        if run in whole:
            return whole[run]
        return min(whole.values(), key=attrgetter("age"), default=None)

    def parts(self, key: str) -> list[Entry]:
        """The committed parts of a key, in order of part; of a part in several runs, the earliest."""
        earliest: dict[str, Entry] = {}
        for entry in sorted((e for e in self._rows(key).values() if e.part != ""), key=attrgetter("age")):
            earliest.setdefault(entry.part, entry)
        return [earliest[part] for part in sorted(earliest)]

    def entries(self, run: str | None = None, stage: str | None = None) -> list[Entry]:
        """All rows, of one run or stage where given, by run, step and time."""
        with self._lock:
            self._refresh()
            rows = [row for rows in self._by_key.values() for row in rows.values()]
        chosen = [row for row in rows if run in (None, row.run) and stage in (None, row.stage)]
        return sorted(chosen, key=lambda entry: (entry.run, entry.step, *entry.age))

    def users(self, policy: str) -> set[str]:
        """The runs that have work of a policy, which is named by its key."""
        with self._lock:
            self._refresh()
            return {*self._users.get(policy, ())}

    def commit(self, entry: Entry) -> Entry:
        """Append a row unless one for the same run, key and part is there; return the row that stands.

        Where another run has finished the same key, the row is made to point at that run's slices: two runs at the same
        work at the same time go on with the same rows.

        Refreshes before every append. Another commit in between makes the append fail, and it refreshes again; a commit
        whose acknowledgement was lost is found the same way, so a row is never there twice.
        Raises WorkRemoved, with nothing written, where slices that the row names were removed from the store meanwhile.
        """
        return self.commit_all([entry])[0]

    def commit_all(self, entries: Sequence[Entry], rebuilt: bool = False) -> list[Entry]:
        """Append rows of one run in one commit, all or none, as `commit` does each; return the rows that stand.

        Rows that are `rebuilt` from files keep their own slices where another run has finished the same key, and name
        what is there.
        """
        if not entries:
            return []
        for _ in range(MAX_RACES):
            with self._lock:
                self._refresh()
                standing = [
                    self._standing(entry) or (entry if rebuilt else self._reuse_finished(entry)) for entry in entries
                ]
                new = [entry for entry in standing if self._standing(entry) is None]
                if not new:
                    return standing
                for entry in () if rebuilt else new:
                    self._check_not_removed(entry)
                rows = pa.Table.from_pylist([entry.to_row() for entry in new], LEDGER.arrow)
                # One id for all rows: of two writers that saw the same version only one can commit, whatever the keys.
                number = self.table.transaction_version(APPLICATION) + 1
                try:
                    file = self.table.append(rows.drop_columns(["run"]), new[0].run, {APPLICATION: number})
                except CommitConflict:
                    continue
                self._add_rows(rows)  # as every reader has them, which saves reading them back
                self._read_files.add(file.path)
                self._commits += 1
                if self._commits % MERGE_FILES == 0:
                    with suppress(StoreError):  # the row is safe; merging can wait
                        self.table.merge_files(new[0].run, MERGE_FILES, small=True)
                return standing
        raise _too_busy(entries[0].run, f"committing key {entries[0].key!r}")

    def _standing(self, entry: Entry) -> Entry | None:
        return self._by_key.get(entry.key, {}).get((entry.run, entry.part))

    def remove(self, run: str, rows: Collection[tuple[str, str]], at: datetime, whole: bool = True) -> int:
        """Remove rows of a run, named by key and part, in one commit; return how many there were.

        Every other process sees it at its next refresh. With `whole`, work of that run that began before `at` can no
        longer be committed: its inputs may be gone. Raises StoreUnavailable where too many others commit meanwhile.
        """
        for _ in range(MAX_RACES):
            with self._lock:
                self._refresh()
                # The table is partitioned by run: a run's rows lie in files of its own.
                files = self.table.active_files(run)
                tables = [self.table.read(file.path) for file in files]
                left = [row for table in tables for row in table.to_pylist() if (row["key"], row["part"]) not in rows]
                num_removed = sum(table.num_rows for table in tables) - len(left)
                if not num_removed:
                    return 0
                groups = [pa.Table.from_pylist(left, self.table.data_schema)] if left else []
                marks = {name: self.table.transaction_version(name) + 1 for name in (APPLICATION, REMOVAL)}
                if whole:
                    # Delta keeps one integer for an id: milliseconds, with which the start of later work is compared.
                    marks[f"{REMOVAL}:{run}"] = int(at.timestamp() * 1000)
                try:
                    self.table.replace(files, groups, run, marks)
                except CommitConflict:
                    continue
                self._refresh()
                return num_removed
        raise _too_busy(run, "removing rows")

    def _check_not_removed(self, entry: Entry) -> None:
        """Raise WorkRemoved where the row would name slices that may be gone: another's, or made before a removal."""
        named = {piece for row in self._by_key.get(entry.key, {}).values() for piece in row.outputs}
        unknown = [piece for piece in entry.outputs if piece not in named]
        removed = self.table.transaction_version(f"{REMOVAL}:{entry.run}")
        if any(piece.run != entry.run for piece in unknown) or (
            removed and unknown and entry.started_at.timestamp() * 1000 < removed
        ):
            raise WorkRemoved(
                f"stage {entry.stage!r} at step {entry.step} builds on work that was removed from the store meanwhile",
                f"run {entry.run!r}, key {entry.key!r}",
                "everything in the ledger; nothing of this attempt is visible",
                "run the same again: what is gone is then computed anew",
            )

    def _reuse_finished(self, entry: Entry) -> Entry:
        whole = [row for (_, part), row in self._by_key.get(entry.key, {}).items() if part == ""]
        if entry.part != "" or not whole:
            return entry
        return replace(min(whole, key=attrgetter("age")), run=entry.run, step=entry.step)

    def _rows(self, key: str, staleness: float = 0.0) -> dict[tuple[str, str], Entry]:
        with self._lock:
            if time.monotonic() - self._refreshed_at >= staleness:
                self._refresh()
            return {**self._by_key.get(key, {})}

    def _refresh(self) -> None:
        super()._refresh()
        self._refreshed_at = time.monotonic()

    def _unread(self, paths: Sequence[str]) -> list[str]:
        if (removals := self.table.transaction_version(REMOVAL)) != self._removals:
            # Rows may have gone from any file that was read: the index is built anew.
            self._removals = removals
            self._read_files, self._by_key, self._users = set(), {}, {}
            return [file.path for file in self.table.active_files()]
        return super()._unread(paths)

    def _add_file(self, path: str, run: str) -> None:
        rows = self.table.read(path)
        self._add_rows(rows.append_column("run", pa.repeat(pa.scalar(run), rows.num_rows)))

    def _add_rows(self, rows: pa.Table) -> None:
        for entry in entries_of(rows):
            # A merged file repeats rows: the one that was read first stands.
            self._by_key.setdefault(entry.key, {}).setdefault((entry.run, entry.part), entry)
            self._users.setdefault(entry.inputs.get("policy", ""), set()).add(entry.run)


def _too_busy(run: str, action: str) -> StoreUnavailable:
    what = f"the ledger is too busy: {MAX_RACES} races lost"
    return StoreUnavailable(what, f"run {run!r}, {action}", "everything in the ledger", "run the same again")
