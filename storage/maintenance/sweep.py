"""Removes what a plan names, rows of dead attempts and expired rows, so that a crash at any point harms nothing."""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from storage import runs
from storage.delta.actions import Active
from storage.delta.table import Raced, StoredTable
from storage.errors import StoreError, StoreUnavailable, border
from storage.maintenance.activity import at_work
from storage.maintenance.files import delete, older
from storage.maintenance.plan import Plan
from storage.policies.manifest import MANIFEST
from storage.policies.store import SCRATCHES
from storage.refs import Slice
from storage.roots import Root, make_directory, synchronise
from storage.schemas.stage_tables import STAGE_TABLES
from storage.store import Store

RECORDS = "removals"
TRIES = 20


@dataclass
class Swept:
    """What went: rows of the ledger, slices, files and their bytes, policies and theirs."""

    rows: int = 0
    slices: int = 0
    files: int = 0
    bytes: int = 0
    policies: int = 0
    policy_bytes: int = 0


def sweep_plan(store: Store, plan: Plan) -> Swept:
    """Finish what an earlier call left, then carry out a plan; return what went.

    Raises StoreUnavailable where the store cannot be written; calling again goes on.
    """
    swept = finish(store)
    now = datetime.now(UTC)
    if not plan.empty:
        _write_down(store, plan)
        for run in plan.removed:
            swept.rows += _remove_run(store, run, plan, now)
        _thin(store, plan.thinned, swept)
        _finish_each(store, swept)
    return swept


def finish(store: Store) -> Swept:
    """Finish what calls that died have written down."""
    swept = Swept()
    _finish_each(store, swept)
    return swept


def drop(store: Store, pieces: Sequence[Slice]) -> tuple[int, int]:
    """Take slices that nobody may read any more out of their tables and off the disk; return files and bytes.

    Other rows of the files that compaction put them in are written anew, and the old files are left to `vacuum`.
    """
    files = size = 0
    for name in dict.fromkeys(piece.table for piece in pieces):
        table = store.slices.table(name)
        mine = [piece for piece in pieces if piece.table == name]
        whole = [path for run in sorted({p.run for p in mine}) for path in _take_out(table, run, mine)]
        table.refresh()
        active = {each.path for each in table.active()}
        for path in dict.fromkeys([*whole, *(file.path for piece in mine for file in piece.files)]):
            if path not in active:
                freed = delete(store.root, f"{table.place}/{path}")
                files, size = files + (freed > 0), size + freed
    return files, size


def remove_weights(store: Store, key: str, why: str = "") -> int:
    """Remove the directory of a policy, complete or not there at all; return its bytes.

    With `why`, a marker stays that says so to whoever asks for the weights, and against which weights made again under
    the same key are checked.
    """
    policy = store.policies.find(key)
    if policy is not None and why:
        store.policies.note_removed(key, policy.weights_sha256, why)
    with border(f"removing policy {key!r}", store.root.child(f"policies/{key}"), "every other policy"):
        _remove_directory(store.root, f"policies/{key}")
    return sum(file.size for file in policy.files) if policy else 0


def _write_down(store: Store, plan: Plan) -> None:
    record = {"slices": [piece.to_row() for piece in plan.slices], "policies": list(plan.policies)}
    store.root.write(f"{RECORDS}/{uuid4().hex}.json", json.dumps(record).encode())


def _remove_run(store: Store, run: str, plan: Plan, at: datetime) -> int:
    rows = {(entry.key, entry.part) for entry in plan.rows if entry.run == run}
    num_removed = store.ledger.remove(run, rows, at)
    if (last := store.runs.last(run)) and last.event != runs.REMOVED:
        staying = sum(entry.run == run for entry in plan.staying)
        message = f"removed by gc: {len(rows)} rows of the ledger; {staying} stay, because kept runs name them"
        store.runs.record(run=run, event=runs.REMOVED, message=message)
    return num_removed


def _thin(store: Store, keys: Iterable[str], swept: Swept) -> None:
    for key in keys:
        swept.policy_bytes += remove_weights(store, key, "`stagecoach gc --policies`")
        swept.policies += 1


def _finish_each(store: Store, swept: Swept) -> None:
    for name in store.root.names(RECORDS):
        path = f"{RECORDS}/{name}"
        record = json.loads(store.root.read(path))
        entries = store.ledger.entries()
        live = {piece for entry in entries for piece in entry.outputs}
        dead = [piece for row in record["slices"] if (piece := Slice.from_row(row)) not in live]
        files, size = drop(store, dead)
        swept.slices, swept.files, swept.bytes = swept.slices + len(dead), swept.files + files, swept.bytes + size
        keys = set(record["policies"]) - {entry.key for entry in entries}
        for key in sorted(key for key in keys if not _made_anew(store.root, key, path)):
            swept.policy_bytes += remove_weights(store, key)
            swept.policies += 1
        delete(store.root, path)


def _made_anew(root: Root, key: str, record: str) -> bool:
    """Whether a policy was published after the record that wants it gone: by a run that its ledger row will name."""
    made, written = root.files.get_file_info([f"policies/{key}/{MANIFEST}", record])
    return made.mtime is not None and written.mtime is not None and made.mtime > written.mtime


def _take_out(table: StoredTable, run: str, pieces: Collection[Slice]) -> list[str]:
    """Commit a table without the slices of one run; return the files that held nothing else."""
    attempts = pa.array(sorted({piece.attempt for piece in pieces if piece.run == run}), pa.string())
    for _ in range(TRIES):
        table.refresh()
        found = [(each, _rows(table, each, attempts)) for each in table.active() if each.run == run]
        old = [(each, rows) for each, rows in found if rows is not None]
        if not old:
            return []
        try:
            table.replace([each for each, _ in old], [g for _, rows in old for g in _row_groups(rows)], run)
        except Raced:
            continue  # a compactor at work
        return [each.path for each, rows in old if not rows.num_rows]
    what = f"table {table.name!r} is too busy: {TRIES} races lost"
    raise StoreUnavailable(what, f"run {run!r}", "everything that the ledger names", "run the same again")


def _rows(table: StoredTable, file: Active, attempts: "pa.Array[Any]") -> pa.Table | None:
    """The rows of a file without some attempts; None where it holds none of those, or cannot be read."""
    if file.first_attempt == file.last_attempt:
        mine = pc.is_in(pa.scalar(file.first_attempt), attempts).as_py()
        return table.data_schema.empty_table() if mine else None
    try:
        rows = table.read(file.path)
    except StoreUnavailable:
        return None  # what else it holds may still be read, row group by row group
    others = rows.filter(pc.invert(pc.is_in(rows["attempt"], attempts)))
    return None if others.num_rows == rows.num_rows else others


def _row_groups(rows: pa.Table) -> list[pa.Table]:
    return [rows.filter(pc.equal(rows["key"], key)).combine_chunks() for key in rows["key"].unique()]


def _remove_directory(root: Root, path: str) -> None:
    """On a local root in one step: moved among the scratch directories, which are swept when a process dies."""
    if root.directory is not None:
        if (root.directory / path).is_dir():
            make_directory(root.directory / SCRATCHES)
            gone = f"{SCRATCHES}/removed-{uuid4().hex}"
            root.files.move(path, gone)
            synchronise(root.directory / "policies")
            root.files.delete_dir(gone)
        return
    delete(root, f"{path}/{MANIFEST}")
    for info in root.files.get_file_info(pafs.FileSelector(path, allow_not_found=True, recursive=True)):
        if info.type == pafs.FileType.File:
            delete(root, info.path)


def drop_orphans(store: Store, table: StoredTable, hours: float, dry_run: bool = False) -> list[str]:
    """Take files out of a stage table that only hold rows of attempts that no ledger row names; return their paths.

    Files younger than so many hours, and those of runs that may be at work, are left alone.
    """
    table.refresh()
    busy = at_work(store)
    old = {path.removeprefix(f"{table.place}/") for path in older(store.root, table.place, hours, ".parquet")}
    named = {(s.run, s.attempt) for entry in store.ledger.entries() for s in entry.slices(table.name)}
    found = [each for each in table.active() if each.path in old and each.run not in busy]
    alone = [each for each in found if each.first_attempt == each.last_attempt]
    orphans = [each for each in alone if (each.run, each.first_attempt) not in named]
    if not dry_run:
        for run in sorted({each.run for each in orphans}):
            try:
                table.replace([each for each in orphans if each.run == run], [], run)
            except Raced:
                return []  # someone else is at it
        for each in orphans:
            delete(store.root, f"{table.place}/{each.path}")
    return [each.path for each in orphans]


def orphaned_policies(store: Store, hours: float, dry_run: bool = False) -> list[str]:
    """Remove weights that were published for a ledger row that never came; return their keys.

    Those younger than so many hours are left alone, and all while any run may be at work.
    """
    if at_work(store):
        return []
    named = {entry.key for entry in store.ledger.entries()}
    old = set(older(store.root, "policies", hours, MANIFEST))
    keys = [key for key in store.policies.names() if key not in named and f"policies/{key}/{MANIFEST}" in old]
    for key in keys if not dry_run else ():
        remove_weights(store, key)
    return keys


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
