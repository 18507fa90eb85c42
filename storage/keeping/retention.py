"""Retention: dropping the rows of one table that are older than it keeps rows, while the ledger goes on naming them.

First a slice is said to be retired, then its rows go. Whoever reads it is told so (SliceExpired). Keys do not change:
what was computed stays found.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from storage.errors import StoreError
from storage.keeping.sweeping import drop
from storage.refs import Slice
from storage.schemas import STAGE_TABLES
from storage.store import Store

HOURS = {"h": 1, "d": 24}


@dataclass(frozen=True)
class Retention:
    """How long one table keeps its rows."""

    table: str
    hours: int

    @classmethod
    def parse(cls, text: str) -> "Retention":
        """Read `table=30d` or `table=12h`; StoreError for anything else, or a table that no stage writes."""
        found = re.fullmatch(r"([a-z_]+)=(\d+)([hd])", text)
        tables = [table.name for table in STAGE_TABLES]
        if found is None or found[1] not in tables:
            what = f"{text!r} is no retention"
            raise StoreError(what, "", "nothing was dropped", f"write TABLE=30d or TABLE=12h, of {', '.join(tables)}")
        return cls(found[1], int(found[2]) * HOURS[found[3]])


@dataclass(frozen=True)
class Expired:
    """What a retention dropped, or would drop."""

    table: str
    hours: int
    slices: int
    files: int
    bytes: int


def expire(store: Store, retention: Retention, dry_run: bool = False) -> Expired:
    """Drop the rows of a table that were made longer ago than its retention; return what went.

    A slice counts by the end of the work that made it, whoever shares it. What an earlier call said and did not get
    to do is done as well.
    """
    pieces = _older(store, retention)
    new = store.slices.retirements.without(pieces)
    size = sum(file.size for piece in new for file in piece.files)
    if dry_run:
        return Expired(retention.table, retention.hours, len(new), sum(len(piece.files) for piece in new), size)
    store.slices.retirements.record(new, retention.hours)
    files, size = drop(store, pieces)
    return Expired(retention.table, retention.hours, len(new), files, size)


def _older(store: Store, retention: Retention) -> list[Slice]:
    newest = datetime.now(UTC) - timedelta(hours=retention.hours)
    entries = [entry for entry in store.ledger.entries() if entry.finished_at <= newest]
    return list(dict.fromkeys(piece for entry in entries for piece in entry.slices(retention.table) if piece.rows))
