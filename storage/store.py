"""The store: one root that holds many runs, and the one object through which stages and flows use it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from storage.delta.table import StoredTable
from storage.errors import DamagedSlice, LayoutError, StoreUnavailable, border
from storage.ledger import Ledger
from storage.policies.store import Policies
from storage.records import CachedTable, Notes, Quarantines, Runs
from storage.refs import Slice, attempts_by_run
from storage.roots import Root, open_root
from storage.schemas.system_tables import EXPIRED_SLICES, LEDGER, NOTES_TABLE, QUARANTINES, RUNS
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
        self.policies = Policies(root)

    def append(self, table: str, rows: pa.Table, *, run: str, step: int, key: str, attempt: str) -> Slice:
        """Add rows to a table as one slice, durable but unseen until the ledger names it; see Slices.append."""
        return self.slices.append(table, rows, run=run, step=step, key=key, attempt=attempt)

    def read(self, slices: Sequence[Slice], columns: Sequence[str] | None = None) -> pa.Table:
        """The verified rows of slices of one table, in the order given; see Slices.read."""
        return self.slices.read(slices, columns)

    def table(self, name: str) -> StoredTable:
        """The open table of a name, a stage's or a system table, made if missing; SchemaError for other names."""
        system_tables: dict[str, Ledger | CachedTable] = {
            LEDGER.name: self.ledger,
            RUNS.name: self.runs,
            QUARANTINES.name: self.quarantines,
            NOTES_TABLE.name: self.notes,
            EXPIRED_SLICES.name: self.slices.expired_slices,
        }
        return system_tables[name].table if name in system_tables else self.slices.table(name)

    def scan(self, table: str) -> "pl.LazyFrame":
        """The rows of a table that the ledger names, of all runs, with run, step, key, attempt and seq.

        For exploration: filters and columns are pushed into the files. Digests are not checked; stages use `read`.
        """
        named = (piece for entry in self.ledger.entries() for piece in entry.slices(table))
        return self.slices.table(table).scan(self.held_attempts(table, named))

    def held_attempts(self, table: str, pieces: Iterable[Slice], is_there: bool = True) -> dict[str, list[str]]:
        """The attempts of some slices of a table by run, for a scan of it; not `is_there` is one that has no log.

        Raises DamagedSlice where the table does not hold one of them though the ledger names it: a scan would be silent
        about its rows.
        """
        wanted = list(dict.fromkeys(pieces))
        lost = self.slices.not_held(table, wanted) if is_there else [piece for piece in wanted if piece.files]
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
        return attempts_by_run(wanted)


def open_store(root: str | Path, options: Mapping[str, str] | None = None, read_only: bool = False) -> Store:
    """Open the store at a directory or URL, making it where there is nothing yet.

    With `read_only` the store must be there, and nothing is ever written to it or made in it.
    Raises LayoutError where something else, or a store of another layout version, is there; nothing is then touched.
    """
    place = replace(open_root(str(root), options), read_only=read_only)
    with border("opening the store", place.address):
        _check_layout(place)
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


def _check_layout(root: Root) -> None:
    text = _read_format(root)
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


def _read_format(root: Root) -> bytes:
    """The text of the file that names the layout; where there is nothing yet, the first process makes it a store."""
    try:
        return root.read(FORMAT)
    except FileNotFoundError:
        if root.directory is not None and (outer := enclosing_store(root.directory.parent)):
            what, advice = f"this is inside the store {outer}", "name a place outside of it, or that store"
            raise LayoutError(what, root.address, "nothing was touched", advice) from None
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
