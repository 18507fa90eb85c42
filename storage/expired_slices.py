"""Retirements: slices whose rows were dropped for their age. The ledger still names them; nobody can read them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from storage.delta.cached_table import CachedTable
from storage.errors import SliceExpired
from storage.refs import Slice
from storage.roots import Root
from storage.schemas.system_tables import RETIREMENTS


@dataclass(frozen=True)
class ExpiredSlice:
    """One slice that was given up; the columns of the retirements table."""

    run: str
    table: str
    attempt: str
    rows: int
    bytes: int
    at: datetime
    hours: int
    """The age in hours from which on the table's rows were dropped."""


class ExpiredSlices(CachedTable):
    """The retired slices of a store, held in memory and moved forward by what was added since."""

    def __init__(self, root: Root) -> None:
        super().__init__(root, RETIREMENTS)
        self._found: dict[tuple[str, str, str], ExpiredSlice] = {}

    def record(self, pieces: Sequence[Slice], hours: int) -> None:
        """Write down that slices are given up, those of one run in one commit; those known before are left out."""
        now = datetime.now(UTC)
        new = self.without(pieces)
        for run in sorted({piece.run for piece in new}):
            self._append([vars(_retirement(piece, now, hours)) for piece in new if piece.run == run], run)

    def without(self, pieces: Iterable[Slice]) -> list[Slice]:
        """Those of some slices that were not given up, in their order."""
        with self._lock:
            self._refresh()
            return [piece for piece in pieces if _id(piece) not in self._found]

    def of(self, pieces: Iterable[Slice]) -> list[ExpiredSlice]:
        """What is known of those of some slices that were given up, in their order."""
        with self._lock:
            self._refresh()
            return [self._found[_id(piece)] for piece in pieces if _id(piece) in self._found]

    def explain(self, pieces: Sequence[Slice]) -> SliceExpired | None:
        """The error for whoever wants to read slices of which one was given up; None where none was."""
        with self._lock:
            self._refresh()
            found = next((self._found[_id(piece)] for piece in pieces if _id(piece) in self._found), None)
        if found is None:
            return None
        return SliceExpired(
            f"these {found.rows} rows were dropped on {found.at:%Y-%m-%d}: table {found.table!r} keeps rows for "
            f"{found.hours} hours",
            f"table {found.table!r}, run {found.run!r}, attempt {found.attempt!r}",
            "every other table of the run; the ledger still says that and how they were made",
            "go without them; to have them again, do the stage's work again in a run with another seed or section",
        )

    def _take(self, row: dict[str, Any]) -> None:
        found = ExpiredSlice(**row)
        self._found.setdefault(_id(found), found)


def _id(piece: Slice | ExpiredSlice) -> tuple[str, str, str]:
    return piece.run, piece.table, piece.attempt


def _retirement(piece: Slice, at: datetime, hours: int) -> ExpiredSlice:
    size = sum(file.size for file in piece.files)
    return ExpiredSlice(piece.run, piece.table, piece.attempt, piece.rows, size, at, hours)
