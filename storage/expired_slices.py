"""Expired slices: their rows were dropped for their age. The ledger still names them; nobody can read them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from storage.delta.cached_table import CachedTable
from storage.errors import SliceExpired
from storage.refs import Slice
from storage.roots import Root
from storage.schemas.system_tables import EXPIRED_SLICES


@dataclass(frozen=True)
class ExpiredSlice:
    """One slice whose rows were dropped; the columns of the table `retirements`."""

    run: str
    table: str
    attempt: str
    rows: int
    bytes: int
    at: datetime
    hours: int
    """The age in hours from which on the table's rows were dropped."""


class ExpiredSlices(CachedTable):
    """The expired slices of a store, in memory and kept up to date."""

    def __init__(self, root: Root) -> None:
        super().__init__(root, EXPIRED_SLICES)
        self._expired: dict[tuple[str, str, str], ExpiredSlice] = {}

    def record(self, pieces: Sequence[Slice], hours: int) -> None:
        """Record that slices expire, those of one run in one commit; those recorded before are left out."""
        now = datetime.now(UTC)
        new = self.exclude(pieces)
        for run in sorted({piece.run for piece in new}):
            self._append([vars(_record(piece, now, hours)) for piece in new if piece.run == run], run)

    def exclude(self, pieces: Iterable[Slice]) -> list[Slice]:
        """The slices given without those that expired, in order."""
        with self._lock:
            self._refresh()
            return [piece for piece in pieces if _id(piece) not in self._expired]

    def find(self, pieces: Iterable[Slice]) -> list[ExpiredSlice]:
        """The records of those of the slices given that expired, in order."""
        with self._lock:
            self._refresh()
            return [self._expired[_id(piece)] for piece in pieces if _id(piece) in self._expired]

    def read_error(self, pieces: Sequence[Slice]) -> SliceExpired | None:
        """The error for reading slices of which one expired; None where none did."""
        with self._lock:
            self._refresh()
            found = next((self._expired[_id(piece)] for piece in pieces if _id(piece) in self._expired), None)
        if found is None:
            return None
        return SliceExpired(
            f"these {found.rows} rows were dropped on {found.at:%Y-%m-%d}: table {found.table!r} keeps rows for "
            f"{found.hours} hours",
            f"table {found.table!r}, run {found.run!r}, attempt {found.attempt!r}",
            "every other table of the run; the ledger still says that and how they were made",
            "go without them; to have them again, do the stage's work again in a run with another seed or section",
        )

    def _add_row(self, row: dict[str, Any]) -> None:
        expired = ExpiredSlice(**row)
        self._expired.setdefault(_id(expired), expired)


def _id(piece: Slice | ExpiredSlice) -> tuple[str, str, str]:
    return piece.run, piece.table, piece.attempt


def _record(piece: Slice, at: datetime, hours: int) -> ExpiredSlice:
    size = sum(file.size for file in piece.files)
    return ExpiredSlice(piece.run, piece.table, piece.attempt, piece.rows, size, at, hours)
