"""Housekeeping: what keeps a store small and quick, and can be left out for long. One process does it at a time.

Nothing here removes rows that the ledger names: compaction copies verified rows, and the files they came from are
deleted only when the copies have been read back and compared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.fs as pafs

from storage.books import BOOKS
from storage.errors import border
from storage.logs import prune_log
from storage.refs import Slice
from storage.roots import Root
from storage.store import Store
from storage.tables import Active, Raced, StoredTable

RETENTION_HOURS = 168
TEMPORARY_HOURS = 24
MIN_FILES = 8
TARGET_BYTES = 100_000_000


@dataclass(frozen=True)
class Housekeeping:
    """What one round did: files merged, files deleted, and files kept although they are old: the only copy of rows."""

    merged: int = 0
    deleted: int = 0
    only_copies: tuple[str, ...] = ()


def maintain(store: Store, retention_hours: int = RETENTION_HOURS) -> Housekeeping:
    """Compact, delete what is no longer needed, prune logs, sweep temporary files; return what was done.

    `retention_hours` guards files that some reader or writer elsewhere may still be using; less than the default is
    for a store that nobody else has open.
    """
    merged = deleted = 0
    only_copies: list[str] = []
    for table in _tables(store):
        merged += compact(store, table)
        removed, kept = vacuum(store, table, retention_hours)
        deleted += removed + prune_log(store.root, table.place)
        only_copies += kept
    return Housekeeping(merged, deleted + sweep(store.root), tuple(only_copies))


def compact(store: Store, table: StoredTable) -> int:
    """Merge the small files of finished work, run by run; return how many files were merged.

    A stage table's file is merged when the ledger names it, rows of one key in one row group. A file of an attempt
    that is not in the ledger may be about to be, and is left alone.
    """
    table.refresh()
    merged = 0
    for run in sorted({each.run for each in table.active()}):
        if table in _books(store):
            merged += table.fold(run, MIN_FILES)
            continue
        files = [each for each in table.active() if each.run == run and each.size < TARGET_BYTES]
        for bundle in _slice_groups(store, table, files):
            try:
                table.replace([file for file, _, _ in bundle], _row_groups(bundle), run)
            except Raced:
                break  # someone else is at it
            merged += len(bundle)
    return merged


def vacuum(store: Store, table: StoredTable, retention_hours: int = RETENTION_HOURS) -> tuple[int, list[str]]:
    """Delete data files that the table no longer holds, or never did, and that are older than `retention_hours`.

    A file that the ledger names is deleted only if its rows can be read, verified, from where compaction put them.
    Returns how many were deleted, and the paths of those kept because they are the only copy.
    """
    table.refresh()
    active = {each.path for each in table.active()}
    named = {file.path: piece for piece in _finished(store, table.name) for file in piece.files}
    deleted, kept = 0, []
    for path in _older(store.root, table.place, retention_hours, ".parquet"):
        inside = path.removeprefix(f"{table.place}/")
        if inside.startswith("_delta_log/") or inside in active:
            continue
        if inside in named and not store.slices.moved(named[inside]):
            kept.append(store.root.child(path))
            continue
        _delete(store.root, path)
        deleted += 1
    return deleted, kept


def sweep(root: Root) -> int:
    """Delete what processes that died left half made, older than a day: log drafts and scratch directories."""
    drafts = [path for path in _older(root, "tables", TEMPORARY_HOURS) if "#" in path.rpartition("/")[2]]
    drafts += [path for path in _older(root, "", TEMPORARY_HOURS, deep=False) if path.startswith(".format.json.")]
    for path in drafts:
        _delete(root, path)
    scratches = _older(root, "policies/.scratch", TEMPORARY_HOURS, kind=pafs.FileType.Directory, deep=False)
    for path in scratches:
        with border("sweeping a scratch directory", root.child(path)):
            root.files.delete_dir(path)
    return len(drafts) + len(scratches)


Piece = tuple[Active, str, pa.Table]  # a file, the key of its rows, its rows


def _tables(store: Store) -> list[StoredTable]:
    books = {book.name for book in BOOKS}
    stage = [store.slices.table(name) for name in store.root.names("tables") if name not in books]
    return [*stage, *_books(store)]


def _books(store: Store) -> tuple[StoredTable, ...]:
    return store.ledger.table, store.runs.table, store.quarantines.table


def _finished(store: Store, table: str) -> list[Slice]:
    """Every slice of a table that the ledger names, in order of run, step and time."""
    return list(dict.fromkeys(piece for entry in store.ledger.entries() for piece in entry.slices(table)))


def _slice_groups(store: Store, table: StoredTable, files: Sequence[Active]) -> Iterator[list[Piece]]:
    """Bundles of the files of finished slices, in the order of the ledger, each as large as a file should be."""
    small = {file.path: file for file in files}
    slices = [each for each in _finished(store, table.name) if len(each.files) == 1 and each.files[0].path in small]
    if len(slices) < MIN_FILES:
        return
    bundle: list[Piece] = []
    size = 0
    for piece in slices:
        file = small[piece.files[0].path]
        if bundle and size + file.size > TARGET_BYTES:
            yield bundle
            bundle, size = [], 0
        rows = store.slices.stored(piece)
        bundle.append((file, rows["key"][0].as_py(), rows))
        size += file.size
    if len(bundle) > 1:
        yield bundle


def _row_groups(bundle: Sequence[Piece]) -> list[pa.Table]:
    """The rows of a bundle, those of one key together."""
    groups: dict[str, list[pa.Table]] = {}
    for _, key, rows in bundle:
        groups.setdefault(key, []).append(rows)
    return [pa.concat_tables(rows).combine_chunks() for rows in groups.values()]


def _older(
    root: Root, below: str, hours: int, ending: str = "", kind: pafs.FileType = pafs.FileType.File, deep: bool = True
) -> list[str]:
    """The paths of one kind below a directory that were last changed longer ago than so many hours."""
    oldest = datetime.now(UTC) - timedelta(hours=hours)
    selector = pafs.FileSelector(below, allow_not_found=True, recursive=deep)
    with border("listing files", root.child(below)):
        found = root.files.get_file_info(selector)
    wanted = [info for info in found if info.type == kind and info.path.endswith(ending)]
    return sorted(info.path for info in wanted if info.mtime is not None and info.mtime <= oldest)


def _delete(root: Root, path: str) -> None:
    with border("deleting a file that is no longer needed", root.child(path)):
        root.files.delete_file(path)
