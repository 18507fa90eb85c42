"""The store: one root that holds many runs, and the one object through which stages and flows use it."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from storage.delta.table import StoredTable
from storage.errors import DamagedSlice, LayoutError, StoreError, StoreUnavailable, border
from storage.judge_answers import AnswerTable
from storage.ledger import Ledger
from storage.policies.store import Policies
from storage.records import Notes, Quarantines, Runs
from storage.refs import Entry, Slice
from storage.roots import Root, open_root
from storage.schemas.stage_tables import GROUPS
from storage.schemas.system_tables import SYSTEM_TABLES
from storage.slices import Slices

if TYPE_CHECKING:
    import polars as pl

# Raised by a change that a program before it would read wrongly: it then refuses the store.
LAYOUT = 2
FORMAT = "format.json"
REPAIR = "quarantine/unfinished.json"
"""What a repair that is under way, or was killed, is doing: until it has ended rows of any table may be missing."""


class Store:
    """A root with its ledger, runs, policies and tables; safe to share between threads, not across a fork."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.slices = Slices(root)
        self.ledger = Ledger(root)
        self.runs = Runs(root)
        self.quarantines = Quarantines(root)
        self.notes = Notes(root)
        self.answers = AnswerTable(root)
        self.policies = Policies(root)
        self._units: dict[tuple[str, tuple[Slice, ...]], frozenset[str]] = {}

    def append(self, table: str, rows: pa.Table, *, run: str, step: int, key: str, attempt: str) -> Slice:
        """Add rows to a table as one slice, durable but unseen until the ledger names it; see Slices.write."""
        written = self.slices.write(table, rows, run=run, step=step, key=key, attempt=attempt)
        self.slices.commit(table, [written])
        return written.piece

    def read(self, slices: Sequence[Slice], columns: Sequence[str] | None = None) -> pa.Table:
        """The verified rows of slices of one table, in the order given; see Slices.read."""
        return self.slices.read(slices, columns)

    def table(self, name: str) -> StoredTable:
        """The open table of a name, a stage's or a system table; SchemaError for other names."""
        kept = (self.ledger, self.runs, self.quarantines, self.notes, self.answers, self.slices.expired_slices)
        system = {records.contract.name: records for records in kept}
        return system[name].table if name in system else self.slices.table(name)

    def table_names(self, system: bool) -> list[str]:
        """The names of the tables that are there, those that stages write or the `system` tables."""
        names = self.root.names("tables")
        system_names = [table.name for table in SYSTEM_TABLES if table.name in names]
        return system_names if system else [name for name in names if name not in system_names]

    def scan(self, table: str) -> "pl.LazyFrame":
        """The rows of a table in `counted_entries`, of all runs, with run, step, key, attempt and seq.

        For exploration: filters and columns are pushed into the files. Digests are not checked; stages use `read`.
        """
        named = (piece for entry in self.counted_entries() for piece in entry.slices(table))
        return self.slices.table(table).scan(self.held_attempts(table, named))

    def counted_entries(self) -> list[Entry]:
        """Return the rows of the ledger for readers of rows, so that no group of rollouts is there twice.

        Parts of finished work are left out: its own row names the slices that count. Of unfinished work, a part that
        repeats a group of an older part has no outputs. Where parts cannot be read, all of their key keep theirs.
        """
        entries = self.ledger.entries()
        finished = {entry.key for entry in entries if not entry.part}
        entries = [entry for entry in entries if not entry.part or entry.key not in finished]
        parts: dict[str, dict[str, Entry]] = {}
        for entry in entries:
            if entry.part:
                parts.setdefault(entry.key, {}).setdefault(entry.part, entry)
        repeated = set[tuple[str, str]]()
        for key, by_name in parts.items():
            # One attempt repeats nothing, and its parts need not be read.
            if len({part.attempt for part in by_name.values()}) > 1:
                with suppress(StoreError):
                    first, _ = self.first_parts(list(by_name.values()), GROUPS)
                    repeated |= {(key, name) for name in by_name.keys() - {part.part for part in first}}
        return [replace(entry, outputs=()) if (entry.key, entry.part) in repeated else entry for entry in entries]

    def first_parts(self, parts: Iterable[Entry], unit: tuple[str, str]) -> tuple[list[Entry], set[str]]:
        """Return the parts of a key whose units no older part has, oldest first, and their units.

        `unit` is the table and the column that name a unit. Two attempts that ran at the same time may both have
        committed one. Raises what `read` raises.
        """
        first, units = list[Entry](), set[str]()
        table, column = unit
        # The same order for everybody: two runs must leave out the same parts.
        for part in sorted(parts, key=lambda part: (part.finished_at, part.part)):
            names = self._unit_names(part.slices(table), column)
            if not names & units:
                first.append(part)
                units |= names
        return first, units

    def _unit_names(self, slices: tuple[Slice, ...], column: str) -> frozenset[str]:
        if slices and (column, slices) not in self._units:
            names = self.read(slices, [column])[column].to_pylist()
            self._units[column, slices] = frozenset(map(str, names))
        return self._units.get((column, slices), frozenset())

    def held_attempts(self, table: str, pieces: Iterable[Slice]) -> dict[str, list[str]]:
        """The attempts of some slices of a table by run, for a scan of it.

        Raises DamagedSlice where the table does not hold one of them though the ledger names it: a scan would be silent
        about its rows.
        """
        wanted = list(dict.fromkeys(pieces))
        lost = self.slices.not_held(table, wanted)
        if lost:  # or gc has removed it since these slices were looked up
            named = {piece for entry in self.ledger.entries() for piece in entry.slices(table)}
            lost = self.slices.expired_slices.exclude(piece for piece in lost if piece in named)
        if lost:
            raise DamagedSlice(
                f"the table does not hold {len(lost)} slices that the ledger names: commits of its log are missing",
                self.root.child(f"tables/{table}/_delta_log"),
                "the ledger and the files of those slices; nothing was changed",
                "put the log back from a copy, or run `stagecoach repair`",
            )
        attempts: dict[str, list[str]] = {}
        for piece in wanted:
            attempts.setdefault(piece.run, []).append(piece.attempt)
        return attempts


def open_store(
    root: str | Path, options: Mapping[str, str] | None = None, read_only: bool = False, make: bool = True
) -> Store:
    """Open the store at a directory or URL; where there is nothing yet, `make` it.

    With `read_only` the store must be there, and nothing is ever written to it or made in it.
    Raises LayoutError where something else, or a store of another layout version, is there; nothing is then touched.
    """
    place = replace(open_root(str(root), options), read_only=read_only)
    with border("opening the store", place.address):
        _check_layout(place, make)
        _check_repaired(place)
    return Store(place)


def _check_repaired(root: Root) -> None:
    """Raise StoreUnavailable where a repair has not ended: rows may be missing that are only about to be put back."""
    with suppress(FileNotFoundError):
        root.read(REPAIR)
        what = "a repair of this store has not ended: it was interrupted, or is under way"
        safe = "everything that the ledger names; what was moved aside is in quarantine/"
        raise StoreUnavailable(what, root.child(REPAIR), safe, "run `stagecoach repair` again: it goes on from there")


def enclosing_store(path: Path) -> Path | None:
    """The store, on this machine's disks, in which a path lies, links followed; None where it lies in none."""
    real = path.expanduser().resolve()
    for parent in (real, *real.parents):
        with suppress(OSError, ValueError, TypeError):
            if "layout" in json.loads((parent / FORMAT).read_bytes()):
                return parent
    return None


def _check_layout(root: Root, make: bool) -> None:
    text = _read_format(root, make)
    try:
        layout = json.loads(text)["layout"]
    except (ValueError, KeyError, TypeError) as error:
        what = f"{FORMAT} cannot be read: {text[:80]!r}"
        raise LayoutError(what, root.address, "nothing was touched", _ADVICE) from error
    if layout != LAYOUT:
        what = f"the store has layout {layout}, this version of the program reads layout {LAYOUT}"
        raise LayoutError(what, root.address, "nothing was touched", _ADVICE)
    if root.bucket is not None and not root.read_only:
        # At every opening: the server behind an address may have been replaced.
        root.bucket.require_conditional_puts(FORMAT, text)


def _read_format(root: Root, make: bool) -> bytes:
    """The text of the file that names the layout; where there is nothing yet, the first process makes it a store."""
    try:
        return root.read(FORMAT)
    except FileNotFoundError:
        if not make and not root.names(""):
            what = f"there is no store: {FORMAT} is missing"
            advice = "name the root of a store with --store (or stagecoach.open); `stagecoach run` makes a new one"
            raise LayoutError(what, root.address, "nothing was touched and nothing was made", advice) from None
        if root.directory is not None and (outer := enclosing_store(root.directory.parent)):
            what, advice = f"this is inside the store {outer}", "name a place outside of it, or that store"
            raise LayoutError(what, root.address, "nothing was touched", advice) from None
        if root.directory is not None and re.search("%[0-9A-Fa-f]{2}", root.address):
            what = "other readers of Delta tables decode a percent sign before two hex digits, and find no table there"
            raise LayoutError(what, root.address, "nothing was touched", "choose another name") from None
        others = [name for name in root.names("") if not name.startswith(f".{FORMAT}")]
    if others and FORMAT not in others:  # else another process has just made it
        raise LayoutError(
            f"this is not a store: there is no {FORMAT}, but there are {', '.join(others[:3])}",
            root.address,
            "nothing was touched",
            "name an empty or new directory, or an existing store",
        )
    root.create(FORMAT, json.dumps({"layout": LAYOUT}).encode())
    return root.read(FORMAT)


_ADVICE = "use the version of the program that made the store, or another root"
