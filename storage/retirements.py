"""Retirements: slices whose rows were dropped for their age. The ledger still names them; nobody can read them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from threading import RLock

import pyarrow as pa

from storage.books import RETIREMENTS
from storage.errors import SliceExpired
from storage.refs import Slice
from storage.roots import Root
from storage.tables import StoredTable


@dataclass(frozen=True)
class Retirement:
    """One slice that was given up; the columns of the retirements table."""

    run: str
    table: str
    attempt: str
    rows: int
    bytes: int
    at: datetime
    hours: int
    """The age in hours from which on the table's rows were dropped."""


class Retirements:
    """The retired slices of a store, held in memory and moved forward by what was added since."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._lock = RLock()
        self._version: int | None = None
        self._known: set[str] = set()
        self._found: dict[tuple[str, str, str], Retirement] = {}

    @cached_property
    def table(self) -> StoredTable:
        """The stored table, made when it is first asked for: most stores never need it."""
        return StoredTable(self._root, RETIREMENTS.name, RETIREMENTS.arrow)

    def record(self, pieces: Sequence[Slice], hours: int) -> None:
        """Write down that slices are given up, those of one run in one commit; those known before are left out."""
        now = datetime.now(UTC)
        for run in sorted({piece.run for piece in pieces}):
            new = [piece for piece in pieces if piece.run == run and not self.has(piece)]
            rows = [vars(_retirement(piece, now, hours)) for piece in new]
            if rows:
                self.table.append(pa.Table.from_pylist(rows, RETIREMENTS.arrow).drop_columns(["run"]), run)

    def has(self, piece: Slice) -> bool:
        """Whether a slice was given up."""
        return self._find(piece) is not None

    def of(self, table: str) -> list[Retirement]:
        """The retired slices of one table, in order of time."""
        with self._lock:
            self._refresh()
            return sorted((each for each in self._found.values() if each.table == table), key=lambda each: each.at)

    def explain(self, pieces: Sequence[Slice]) -> SliceExpired | None:
        """The error for whoever wants to read slices of which one was given up; None where none was."""
        found = next((each for piece in pieces if (each := self._find(piece))), None)
        if found is None:
            return None
        return SliceExpired(
            f"these {found.rows} rows were dropped on {found.at:%Y-%m-%d}: table {found.table!r} keeps rows for "
            f"{found.hours} hours",
            f"table {found.table!r}, run {found.run!r}, attempt {found.attempt!r}",
            "every other table of the run; the ledger still says that and how they were made",
            "go without them; to have them again, do the stage's work again in a run with another seed or section",
        )

    def _find(self, piece: Slice) -> Retirement | None:
        with self._lock:
            self._refresh()
            return self._found.get((piece.run, piece.table, piece.attempt))

    def _refresh(self) -> None:
        if "table" not in vars(self) and not self._root.exists(f"tables/{RETIREMENTS.name}"):
            return
        paths, version = self.table.added(self._version)
        for path in paths:
            if path not in self._known:
                self._index(path)
        self._version = version

    def _index(self, path: str) -> None:
        run = path.split("/")[0].removeprefix("run=")
        for row in self.table.read(path).to_pylist():
            each = Retirement(**{**row, "run": run, "at": row["at"].astimezone(UTC)})
            self._found.setdefault((each.run, each.table, each.attempt), each)
        self._known.add(path)


def _retirement(piece: Slice, at: datetime, hours: int) -> Retirement:
    size = sum(file.size for file in piece.files)
    return Retirement(piece.run, piece.table, piece.attempt, piece.rows, size, at, hours)
