"""Maintenance of a store: compacts small files, deletes files that nothing needs, prunes logs.

It keeps a store small and quick and may be left out for long; one process does it at a time. No rows that the ledger
names are removed: compaction copies verified rows, and the files they came from are deleted only when the copies have
been read back and compared.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa

from storage.delta.log import ActiveFile
from storage.delta.snapshot import prune_log
from storage.delta.table import CommitConflict, StoredTable
from storage.errors import StoreError
from storage.maintenance.plan import at_work
from storage.maintenance.references import References
from storage.maintenance.sweep import orphaned_files, orphaned_policies
from storage.refs import Slice
from storage.roots import Root
from storage.schemas.stage_tables import TABLES
from storage.schemas.system_tables import SYSTEM_TABLES
from storage.store import Store

MOST_HOURS = 876_000
"""A hundred years: what is older than that is older than any store."""
RETENTION_HOURS = 168
TEMPORARY_HOURS = 24
"""Temporary files younger than this may belong to a process that is at work."""
MIN_FILES = 8
"""Fewer small files are not worth a commit."""
# Large enough that a table has few files, small enough for the rows of one to be held in memory.
TARGET_BYTES = 100_000_000

SmallFile = tuple[ActiveFile, str, pa.Table]  # a file, the key of its rows, its rows


@dataclass(frozen=True)
class TableMaintenance:
    """What was done to one table: files merged and deleted.

    `only_copies` are files kept although they are old: the only copy of rows that the ledger names.
    """

    table: str
    merged: int
    deleted: int
    only_copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class MaintenanceReport:
    """What one call of `maintain` did: by table, over all of them, and keys of removed policies without a row."""

    tables: tuple[TableMaintenance, ...]
    deleted: int
    """Files deleted, temporary ones included."""
    policies: tuple[str, ...]

    @property
    def merged(self) -> int:
        """Files merged over all tables."""
        return sum(table.merged for table in self.tables)

    @property
    def only_copies(self) -> tuple[str, ...]:
        """Files of all tables that were kept as the only copy of rows."""
        return tuple(path for table in self.tables for path in table.only_copies)


def maintain(store: Store, retention_hours: float = RETENTION_HOURS, dry_run: bool = False) -> MaintenanceReport:
    """Compact, delete what is no longer needed, prune logs, delete temporary files; return what was done.

    `retention_hours` guards files that a reader or writer elsewhere may still be using; less than a day is for a store
    that no other process has open, and refused with StoreError while a run may be at work. A dry run changes nothing
    and returns the data files and policies to delete now.
    """
    check_hours(retention_hours)
    busy = at_work(store)
    # What a run at work has written and not yet committed looks like what a dead one left, but for its age.
    if busy and retention_hours < TEMPORARY_HOURS and not dry_run:
        what = f"files younger than {TEMPORARY_HOURS} h may be in use: {', '.join(busy)} may be at work"
        advice = "wait for the runs to end, or keep at least a day"
        raise StoreError(what, store.root.address, "nothing was changed", advice)
    # System tables last; no table is made only to be maintained.
    names = [*store.table_names(system=False), *store.table_names(system=True)]
    tables = tuple(_maintain_table(store, store.table(name), retention_hours, dry_run) for name in names)
    policies, num_temporary = tuple(orphaned_policies(store, retention_hours)), 0
    if not dry_run:
        for key in policies:
            store.policies.remove(key)
        num_temporary = remove_temporary(store.root) + store.policies.remove_unfinished(TEMPORARY_HOURS)
    return MaintenanceReport(tables, sum(table.deleted for table in tables) + num_temporary, policies)


def check_hours(hours: float) -> None:
    """Raise StoreError for an age that no file can have: negative, NaN, above MOST_HOURS."""
    if not 0 <= hours <= MOST_HOURS:
        what = f"{hours:g} hours are no age of a file"
        raise StoreError(what, "", "nothing was changed", f"say how old, from 0 to {MOST_HOURS} hours")


def _maintain_table(store: Store, table: StoredTable, hours: float, dry_run: bool) -> TableMaintenance:
    merged = 0 if dry_run else compact(store, table)
    orphans = [] if TABLES[table.name] in SYSTEM_TABLES else orphaned_files(store, table, hours)
    if not dry_run:
        for run in sorted({file.run for file in orphans}):
            with suppress(CommitConflict):  # another process is at it
                table.replace([file for file in orphans if file.run == run], [], run)
        orphans = []  # they are old files that the table does not hold now
    deleted, only_copies = vacuum(store, table, hours, dry_run)
    deleted += len(orphans) + (0 if dry_run else prune_log(store.root, table.place))
    return TableMaintenance(table.name, merged, deleted, tuple(only_copies))


def compact(store: Store, table: StoredTable) -> int:
    """Merge the small files of finished work, run by run; return how many files were merged.

    A stage table's file is merged when the ledger names it, rows of one key in one row group. A file of an attempt
    that is not in the ledger may be about to be, and is left alone.
    """
    table.refresh()
    runs = sorted({file.run for file in table.active_files()})
    if TABLES[table.name] in SYSTEM_TABLES:
        return sum(table.merge_files(run, MIN_FILES) for run in runs)
    finished, merged = References(store, table=table.name).live_slices(), 0
    for run in runs:
        files = [file for file in table.active_files(run) if file.size < TARGET_BYTES]
        for bundle in _slice_groups(store, finished, files):
            try:
                table.replace([file for file, _, _ in bundle], _row_groups(bundle, table.name), run)
            except CommitConflict:
                break  # another process is at it
            merged += len(bundle)
    return merged


def vacuum(
    store: Store, table: StoredTable, retention_hours: float = RETENTION_HOURS, dry_run: bool = False
) -> tuple[int, list[str]]:
    """Delete data files that the table no longer holds, or never did, and that are older than `retention_hours`.

    A file that the ledger names is deleted only if its rows can be read, verified, from where compaction put them.
    Returns how many were deleted, and the paths of those kept because they are the only copy.
    """
    table.refresh()
    active = {file.path for file in table.active_files()}
    references = References(store, table=table.name)
    named = {file.path: piece for piece in references.live_slices() for file in piece.files}
    deleted, only_copies = 0, []
    for path in store.root.paths_older(table.place, retention_hours, ".parquet"):
        inside = path.removeprefix(f"{table.place}/")
        if inside.startswith("_delta_log/") or inside in active:
            continue
        # To read the copies back is slow and is the point: nothing else proves that this file can go.
        if inside in named and not store.slices.has_compacted_copy(named[inside]):
            only_copies.append(store.root.child(path))
            continue
        if not dry_run:
            store.root.remove_unneeded(path)
        deleted += 1
    return deleted, only_copies


def remove_temporary(root: Root) -> int:
    """Delete drafts of log files that processes which died left, older than a day; return how many."""
    paths = root.paths_older("tables", TEMPORARY_HOURS)
    drafts = [path for path in paths if path.rpartition("/")[2].startswith(".")]
    for path in drafts:
        root.remove_unneeded(path)
    return len(drafts)


def _slice_groups(store: Store, finished: Sequence[Slice], files: Sequence[ActiveFile]) -> Iterator[list[SmallFile]]:
    """Bundles of the files of finished slices, in the order of the ledger, each as large as a file should be."""
    small = {file.path: file for file in files}
    slices = [piece for piece in finished if len(piece.files) == 1 and piece.files[0].path in small]
    if len(slices) < MIN_FILES:
        return
    bundle: list[SmallFile] = []
    size = 0
    for piece in slices:
        file = small[piece.files[0].path]
        if bundle and size + file.size > TARGET_BYTES:
            yield bundle
            bundle, size = [], 0
        rows = store.slices.read_stored(piece)
        bundle.append((file, rows["key"][0].as_py(), rows))
        size += file.size
    if len(bundle) > 1:
        yield bundle


def _row_groups(bundle: Sequence[SmallFile], table: str) -> list[pa.Table]:
    """The rows of a bundle, those of one key together, but for tables of large rows, whose slices are read apart."""
    groups: dict[str, list[pa.Table]] = {}
    for file, key, rows in bundle:
        groups.setdefault(file.path if TABLES[table].row_by_row else key, []).append(rows)
    return [pa.concat_tables(rows).combine_chunks() for rows in groups.values()]
