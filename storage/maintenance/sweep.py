"""Removes from a store what a plan names, and expired rows, safely at any crash.

What is to go is first written to a file of `removals/`, then the ledger rows go, then slices and weights. A process
that dies on the way leaves the file, and the next call finishes what it names.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from storage.delta.log import ActiveFile
from storage.delta.table import CommitConflict, StoredTable
from storage.errors import StoreError, StoreUnavailable
from storage.maintenance.plan import Plan, at_work
from storage.maintenance.references import References
from storage.policies.manifest import MANIFEST
from storage.records import REMOVED
from storage.refs import Slice
from storage.schemas.stage_tables import STAGE_TABLES
from storage.store import Store

RECORDS = "removals"
"""Directory of the files that name what is being removed."""
MAX_RACES = 20
HOURS = {"h": 1, "d": 24}
"""Hours of the units of a retention."""


@dataclass
class RemovalReport:
    """How many ledger rows, slices and policies were removed."""

    rows: int = 0
    slices: int = 0
    policies: int = 0


@dataclass(frozen=True)
class Retention:
    """How long one table keeps its rows."""

    table: str
    hours: int

    @classmethod
    def parse(cls, text: str) -> "Retention":
        """Read `table=30d` or `table=12h`; StoreError for anything else, or a table that no stage writes."""
        parts = re.fullmatch(r"([a-z_]+)=([0-9]{1,5})([hd])", text)
        tables = [table.name for table in STAGE_TABLES]
        if parts is None or parts[1] not in tables:
            what = f"{text!r} is no retention"
            raise StoreError(what, "", "nothing was dropped", f"write TABLE=30d or TABLE=12h, of {', '.join(tables)}")
        return cls(parts[1], int(parts[2]) * HOURS[parts[3]])


@dataclass(frozen=True)
class ExpiryReport:
    """What was dropped of a table, with its bytes as first written; for a dry run, what would be."""

    table: str
    hours: int
    slices: int
    bytes: int


def carry_out(store: Store, plan: Plan) -> RemovalReport:
    """Finish what an earlier call left, then remove what a plan names; return what went.

    Raises StoreUnavailable where the store cannot be written; calling again continues.
    """
    report = finish_removals(store)
    if plan.empty:
        return report
    # Weights of kept runs are not written down: the next plan finds them again.
    record = {
        "slices": [piece.to_row() for piece in plan.slices],
        "policies": list(plan.policies),
        "runs": list(plan.removed),
    }
    store.root.write(f"{RECORDS}/{uuid4().hex}.json", json.dumps(record).encode())
    now = datetime.now(UTC)
    for run in plan.removed:
        rows = {(entry.key, entry.part) for entry in plan.rows if entry.run == run}
        report.rows += store.ledger.remove(run, rows, now)
        staying = sum(entry.run == run for entry in plan.staying)
        text = f"removed by gc: {len(rows)} rows of the ledger; {staying} stay, because kept runs name them"
        _record_removal(store, run, text)
    for key in plan.pruned:
        store.policies.remove(key, "`stagecoach gc --policies`")
        report.policies += 1
    return finish_removals(store, report)


def finish_removals(store: Store, report: RemovalReport | None = None) -> RemovalReport:
    """Finish the removals that this process, or one which died, recorded; return `report` with what went."""
    report = report or RemovalReport()
    for path, record in removal_records(store).items():
        # Read again: a run may have come to name some of it since the record was written.
        live = References(store)
        dead = [piece for row in record["slices"] if (piece := Slice.from_row(row)) not in live.slices]
        drop_slices(store, dead)
        report.slices += len(dead)
        for key in sorted(set(record["policies"]) - live.keys):
            if not _is_republished(store, key, path):
                store.policies.remove(key)
                report.policies += 1
        for run in sorted({*record.get("runs", ())} - {entry.run for entry in live.entries}):
            # The process died before it recorded the event.
            _record_removal(store, run, "removed by gc: all rows of the ledger")
        store.root.remove_unneeded(path)
    return report


def removal_records(store: Store) -> dict[str, dict[str, Any]]:
    """The removals that have not ended, by their file below the root: slices, keys of policies, runs."""
    paths = [f"{RECORDS}/{name}" for name in store.root.names(RECORDS)]
    return {path: json.loads(store.root.read(path)) for path in paths}


def _record_removal(store: Store, run: str, message: str) -> None:
    if store.runs.last_event(run) not in ("", REMOVED):
        store.runs.record(run=run, event=REMOVED, message=message)


def _is_republished(store: Store, key: str, record: str) -> bool:
    """Whether a policy was published after the record that names it: a new run made it and will commit it."""
    published, recorded = store.root.files.get_file_info([f"policies/{key}/{MANIFEST}", record])
    return published.mtime is not None and recorded.mtime is not None and published.mtime > recorded.mtime


def expire(store: Store, retention: Retention, dry_run: bool = False) -> ExpiryReport:
    """Drop the rows of a table that were made longer ago than its retention; return what went.

    The age of a slice is that of the work that made it, whichever runs use it. The expiry is recorded before the rows
    go: what an earlier call recorded and did not finish is finished here.
    """
    newest = datetime.now(UTC) - timedelta(hours=retention.hours)
    entries = [entry for entry in store.ledger.entries() if entry.finished_at <= newest]
    pieces = [piece for piece in References(store, entries, retention.table).slices if piece.rows]
    new = store.slices.expired_slices.exclude(pieces)
    if not dry_run:
        store.slices.expired_slices.record(new, retention.hours)
        drop_slices(store, pieces)
    return ExpiryReport(retention.table, retention.hours, len(new), sum(piece.bytes for piece in new))


def orphaned_files(store: Store, table: StoredTable, hours: float) -> list[ActiveFile]:
    """The files of a stage table that only hold rows of attempts that no ledger row names.

    Files younger than `hours`, and those of runs that may be at work, are left out.
    """
    table.refresh()
    busy = at_work(store)
    old = {path.removeprefix(f"{table.place}/") for path in store.root.paths_older(table.place, hours, ".parquet")}
    named = {(piece.run, piece.attempt) for piece in References(store, table=table.name).slices}
    files = [file for file in table.active_files() if file.path in old and file.run not in busy]
    # Compaction merges finished work alone: a file of several attempts holds no orphan.
    return [file for file in files if file.attempt and (file.run, file.attempt) not in named]


def orphaned_policies(store: Store, hours: float) -> list[str]:
    """The keys of policies that were published for a ledger row that never came.

    Those younger than `hours` are left out, and all while any run may be at work.
    """
    # A run publishes weights before it commits the row that names them.
    if at_work(store):
        return []
    named = {entry.key for entry in store.ledger.entries()}
    old = set(store.root.paths_older("policies", hours, MANIFEST))
    return [key for key in store.policies.names() if key not in named and f"policies/{key}/{MANIFEST}" in old]


def drop_slices(store: Store, pieces: Sequence[Slice]) -> None:
    """Remove slices that no reader may read any more from their tables and from the disk.

    Other rows of the files that compaction put them in are written anew, and the old files are left to `vacuum`.
    """
    for name in dict.fromkeys(piece.table for piece in pieces):
        table = store.slices.table(name)
        of_table = [piece for piece in pieces if piece.table == name]
        emptied = [path for run in sorted({p.run for p in of_table}) for path in _take_out(table, run, of_table)]
        table.refresh()
        active = {file.path for file in table.active_files()}
        for path in dict.fromkeys([*emptied, *(file.path for piece in of_table for file in piece.files)]):
            if path not in active:
                store.root.remove_unneeded(f"{table.place}/{path}")


def _take_out(table: StoredTable, run: str, pieces: Collection[Slice]) -> list[str]:
    """Commit a table without the slices of one run; return the files that held nothing else."""
    attempts = pa.array(sorted({piece.attempt for piece in pieces if piece.run == run}), pa.string())
    for _ in range(MAX_RACES):
        table.refresh()
        others = [(file, _other_rows(table, file, attempts)) for file in table.active_files(run)]
        old = [(file, rows) for file, rows in others if rows is not None]
        if not old:
            return []
        try:
            table.replace([file for file, _ in old], [group for _, rows in old for group in _row_groups(rows)], run)
        except CommitConflict:
            continue  # a compaction replaced files meanwhile
        return [file.path for file, rows in old if not rows.num_rows]
    what = f"table {table.name!r} is too busy: {MAX_RACES} races lost"
    raise StoreUnavailable(what, f"run {run!r}", "everything that the ledger names", "run the same again")


def _other_rows(table: StoredTable, file: ActiveFile, attempts: "pa.Array[Any]") -> pa.Table | None:
    """The rows of a file without some attempts; None where it holds none of those, or cannot be read."""
    if file.attempt:
        going = pc.is_in(pa.scalar(file.attempt), attempts).as_py()
        return table.data_schema.empty_table() if going else None
    try:
        rows = table.read(file.path)
    except StoreUnavailable:
        return None  # what else it holds may still be read, row group by row group
    others = rows.filter(pc.invert(pc.is_in(rows["attempt"], attempts)))
    return None if others.num_rows == rows.num_rows else others


def _row_groups(rows: pa.Table) -> list[pa.Table]:
    return [rows.filter(pc.equal(rows["key"], key)).combine_chunks() for key in rows["key"].unique()]
