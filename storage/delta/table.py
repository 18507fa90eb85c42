"""One table of the store on Delta Lake.

Data files are written here, durably and with digests, before Delta's log names them. The table's snapshot stays in
memory and is moved forward, so that a commit costs the same after a year as on the first day.
"""

import random
import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import attrgetter
from threading import RLock
from types import MappingProxyType
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa

from storage.delta.log import (
    PARTITION,
    Action,
    ActiveFile,
    Log,
    VersionTaken,
    addition,
    commit_actions,
    creation_actions,
    has_witness,
    new_paths,
    numbers_of,
    removal,
)
from storage.delta.parquet import attempts_in, buffer_reader, decode, encode
from storage.delta.snapshot import Snapshot, prune_log
from storage.errors import StoreError, StoreUnavailable, border
from storage.refs import File, check_run_name
from storage.roots import Root
from storage.schemas.contract import RowPlace, check_schema

if TYPE_CHECKING:
    import polars as pl
    import pyarrow.dataset as ds

# Often enough for a short log, seldom enough that listing it costs nothing beside the commits.
PRUNE_INTERVAL = 50
"""Versions from one pruning of the log to the next."""
ATTEMPTS_TO_COMMIT = 50
NO_NUMBERS: Mapping[str, int] = MappingProxyType({})


class CommitConflict(Exception):
    """Another writer committed under the same application id since the last refresh; for storage's own use."""


class StoredTable:
    """An append-only table, partitioned by run, with its snapshot in memory; safe to share between threads."""

    def __init__(self, root: Root, name: str, schema: pa.Schema, has_head: bool = False) -> None:
        """With `has_head` a missing newest commit is noticed: for tables whose rows no other table names."""
        self.name = name
        self.place = f"tables/{name}"
        self.schema = schema
        self.data_schema = pa.schema([field for field in schema if field.name != PARTITION])
        self._root = root
        self.lock = RLock()
        self._stats = [name for name in ("step", "attempt") if name in schema.names]
        self._attempts: dict[str, frozenset[str]] = {}
        """What files of several attempts hold, by their paths, as far as somebody has asked."""
        self._log = Log(root, self.place, has_head)
        with border(f"opening table {name!r}", root.child(self.place)):
            self._snapshot = self._open()

    @property
    def version(self) -> int:
        """The version at the last refresh; -1 of a table that is not there yet."""
        return -1 if self._snapshot is None else self._snapshot.version

    def append(self, rows: pa.Table, run: str, numbers: Mapping[str, int] = NO_NUMBERS) -> File:
        """Add rows of one run, at least one row, as one durable file, then one durable commit.

        With `numbers` by application id the commit fails with CommitConflict if any other commit with one of these ids
        came since the last refresh. An error after which the commit turns out to be there is no error.
        """
        file = self.write([rows], run)
        self._commit([self._addition(file, rows, run, new=True)], numbers, file)
        return file

    def write(self, groups: Sequence[pa.Table], run: str) -> File:
        """Write rows of one run, at least one row, as one durable file that the table does not hold yet.

        The first write makes the table: data without a log is damage.
        """
        check_run_name(run)
        check_schema(groups[0].schema, self.data_schema, RowPlace(self.name, run))
        if self._snapshot is None:  # and stays so: what others commit from here on came since the last refresh
            with self.lock, self._border("making"), suppress(VersionTaken):  # another process was first
                if self._log.check() is None:
                    self._log.create(0, creation_actions(self.schema))
        path = f"{PARTITION}={run}/{uuid4().hex}.parquet"
        written = self._root.write(f"{self.place}/{path}", encode(groups))
        return File(path, written.size, written.sha256)

    def commit_files(self, files: Sequence[tuple[File, pa.Table]], run: str) -> None:
        """Add files that `write` made, each with its rows, in one durable commit; see `append`."""
        self._commit([self._addition(file, rows, run, new=True) for file, rows in files])

    def replace(
        self,
        old: Sequence[ActiveFile],
        groups: Sequence[pa.Table],
        run: str,
        numbers: Mapping[str, int] = NO_NUMBERS,
    ) -> None:
        """Swap files for one that holds the same rows, a row group for each of `groups`, in one commit.

        Where rows are removed, `groups` are those that stay, perhaps none, and `numbers` (by application id, committed
        with the swap) let every other reader notice. Raises CommitConflict, with nothing changed, where another swap,
        or another commit with one of the ids, came since the last refresh.
        """
        swap = [removal(file, {PARTITION: run}) for file in old]
        file = self.write(groups, run) if groups else None
        if file is not None:
            swap.append(self._addition(file, pa.concat_tables(groups), run, new=False))
        self._commit(swap, {"compaction": self.transaction_version("compaction") + 1, **numbers}, file)

    def merge_files(self, run: str, min_files: int, small: bool = False) -> int:
        """Merge all files of a run into one if there are so many; return how many were merged.

        With `small`, only the smallest files, those larger than all before them left alone: a row is then copied as
        often as the logarithm of their number says, and not again with each merge.
        For tables whose every row counts as soon as it is committed. Nothing is done where another process merges them.
        """
        with self.lock:
            self.refresh()
            files = self.active_files(run)
            files = _smallest(files) if small else files
            if len(files) < min_files:
                return 0
            try:
                self.replace(files, [pa.concat_tables([self.read(file.path) for file in files])], run)
            except CommitConflict:
                return 0
            return len(files)

    def refresh(self) -> int:
        """Move the snapshot to the newest version and return it."""
        with self.lock, self._border("looking at"):
            self._catch_up()
            return self.version

    def new_files(self, since: int | None) -> tuple[list[str], int]:
        """The paths of files with new rows after version `since` (None: all files now), and the version seen.

        Costs the number of new commits, not the length of history. Files that merely repeat rows do not count.
        """
        with self.lock:
            version = self.refresh()
            with self._border("reading the log of"):
                versions = None if since is None else self._log.actions_after(since, version)
            if versions is None:
                return [file.path for file in self.active_files()], version
            return [path for actions in versions for path in new_paths(actions)], version

    def transaction_version(self, application: str) -> int:
        """The number of the last commit under an application id at the version seen; 0 before the first."""
        with self.lock, self._border("looking at"):
            return 0 if self._snapshot is None else self._snapshot.number(application)

    def active_files(self, run: str | None = None) -> list[ActiveFile]:
        """The files of the version seen, of one run where it is named, newest first."""
        with self.lock, self._border("looking at"):
            files = [] if self._snapshot is None else self._snapshot.files()
        # File order differs between a snapshot that followed the log and one just opened.
        files = [file for file in files if run in (None, file.run)]
        return sorted(files, key=attrgetter("added_at", "path"), reverse=True)

    def files_of(self, attempts: Mapping[str, Collection[str]]) -> list[ActiveFile]:
        """The files, at the newest version, that may hold rows of some attempts, given by run."""
        self.refresh()
        ordered = {run: sorted(of_run) for run, of_run in attempts.items()}
        return [file for file in self.active_files() if _may_hold(file, ordered.get(file.run, ()))]

    def scan(self, attempts: Mapping[str, Collection[str]]) -> "pl.LazyFrame":
        """The rows of some attempts, given by run, without digest; filters and columns are pushed into the files.

        Polars opens a file in a quarter of the time that Arrow takes for it. That is what reading costs where a run has
        left a thousand files: see benchmarks/viewing.md.
        """
        import polars as pl

        by_run: dict[str, list[ActiveFile]] = {}
        for file in self.files_of(attempts):
            by_run.setdefault(file.run, []).append(file)
        parts = [pl.LazyFrame(pl.DataFrame(self.schema.empty_table()))]
        for run, files in by_run.items():
            places = [self._root.child(f"{self.place}/{file.path}") for file in files]
            options = dict(self._root.options) or None
            rows = pl.scan_parquet(places, glob=False, hive_partitioning=False, storage_options=options)
            # All rows of a file of one attempt are wanted: `files_of` has compared its bounds.
            if not all(file.attempt for file in files):
                rows = rows.filter(pl.col("attempt").is_in(sorted(set(attempts[run]))))
            parts.append(rows.with_columns(pl.lit(run).alias(PARTITION)).select(self.schema.names))
        return pl.concat(parts[1:] or parts)

    def dataset(self, files: Iterable[ActiveFile]) -> "ds.Dataset":
        """All rows of some files as an Arrow dataset, with the run of each file as a column."""
        import pyarrow.dataset as ds

        form = ds.ParquetFileFormat()
        # The files have no column for the run: the dataset gets the run of each by an expression.
        fragments = [
            form.make_fragment(
                f"{self.place}/{file.path}", self._root.files, partition_expression=ds.field(PARTITION) == file.run
            )
            for file in files
        ]
        return ds.FileSystemDataset(fragments, self.schema, form, self._root.files)

    def file_address(self, path: str) -> str:
        """The address of a file that the table holds."""
        return self._root.child(f"{self.place}/{path}")

    def read(self, path: str, attempts: Collection[str] | None = None) -> pa.Table:
        """Rows of a file that the table holds, by page checksums but without digest; without the run column."""
        if attempts is None:
            with border("reading a file", self.file_address(path)):
                data = self._root.read(f"{self.place}/{path}")
            return decode(buffer_reader(data), self.data_schema, where=self.file_address(path))
        with self._open_file(path) as source:
            return decode(source, self.data_schema, attempts, self.file_address(path))

    def attempts_in(self, file: ActiveFile) -> frozenset[str]:
        """The attempts that a file of the table holds; asked for once, for no file ever changes."""
        if file.attempt:
            return frozenset((file.attempt,))
        if file.path not in self._attempts:
            with self._open_file(file.path) as source:
                self._attempts[file.path] = attempts_in(source, self.file_address(file.path))
        return self._attempts[file.path]

    def _border(self, action: str) -> AbstractContextManager[None]:
        return border(f"{action} table {self.name!r}", self._root.child(self.place))

    @contextmanager
    def _open_file(self, path: str) -> "Iterator[pa.NativeFile]":
        reading = border("reading a file", self.file_address(path))
        with reading, self._root.files.open_input_file(f"{self.place}/{path}") as source:
            yield source

    def _catch_up(self) -> None:
        if self._snapshot is None or not self._snapshot.catch_up():
            self._snapshot = self._open()

    def _open(self) -> Snapshot | None:
        """Read the log; None where there is no table yet."""
        checkpoint = self._log.check()
        if checkpoint is None:
            return None
        try:
            snapshot = Snapshot(self._log, checkpoint)
        except FileNotFoundError:  # the log was pruned while it was read
            newest = self._log.check()
            snapshot = Snapshot(self._log, -1 if newest is None else newest)
        check_schema(snapshot.schema, self.schema, RowPlace(self.name))
        return snapshot

    def _addition(self, file: File, rows: pa.Table, run: str, new: bool) -> Action:
        return addition(file, rows, {PARTITION: run}, self._stats, new)

    def _commit(
        self, actions: Sequence[Action], numbers: Mapping[str, int] = NO_NUMBERS, file: File | None = None
    ) -> None:
        """Commit; after any error, look in the log whether the commit is there, by a name that only it has.

        `numbers` by application id are committed as well; where there are any, a commit of another writer with one of
        them since the last refresh wins: this one deletes `file`, whose rows it adds, and raises CommitConflict.
        """
        witness = uuid4().hex
        whole = commit_actions(actions, numbers, witness)
        with self.lock, self._border("committing to"):
            if self.version < 0:  # others may have committed since the table was made
                self._catch_up()
                if self.version < 0:  # a log that began with this commit would have no schema
                    what = f"the log of table {self.name!r} is gone"
                    do = "put it back from a copy, or run `stagecoach repair --deep`"
                    raise StoreUnavailable(what, self._root.child(self.place), "every other table", do)
                self._refuse_conflict(-1, numbers, file)
            for attempt in range(ATTEMPTS_TO_COMMIT):
                before = self.version
                try:
                    self._write_commit(before + 1, whole)
                # A lost answer, or an interrupt, may come after the commit was done: only the log can tell.
                except BaseException as error:
                    if self._confirm(before, witness) and isinstance(error, Exception):
                        return
                    if not isinstance(error, VersionTaken):
                        raise
                    self._refuse_conflict(before, numbers, file)
                    if attempt:
                        # A random pause, so that writers who met once do not meet again at the next attempt.
                        time.sleep(random.uniform(0, 0.02 * attempt))
                else:
                    assert self._snapshot is not None
                    self._snapshot.advance(whole)
                    self._maintain_log(before + 1)
                    return
        what = f"table {self.name!r} is too busy: {ATTEMPTS_TO_COMMIT} commits lost their race"
        raise StoreUnavailable(what, self._root.child(self.place), "everything in the ledger", "run the same again")

    def _write_commit(self, version: int, actions: Sequence[Action]) -> None:
        assert not self._root.read_only, f"a commit to {self.name!r}, which is only read"
        self._log.create(version, actions)

    def _confirm(self, before: int, witness: str) -> bool:
        """Catch up; if one of the new versions has `witness`, force it to the disk and return True."""
        self._catch_up()
        for version in range(self.version, before, -1):  # newest first: old ones may have been pruned
            try:
                found = has_witness(self._log.actions(version), witness)
            except FileNotFoundError:
                return False
            if found:
                self._log.make_durable(version)
                self._maintain_log(version)
                return True
        return False

    def _refuse_conflict(self, before: int, numbers: Mapping[str, int], file: File | None) -> None:
        """Raise CommitConflict, and delete `file`, where a version after `before` may have one of the same numbers."""
        versions = self._log.actions_after(before, self.version) if numbers else []
        if versions is None or any(numbers.keys() & numbers_of(actions).keys() for actions in versions):
            # The numbers were chosen for the version seen before: whoever chose them has to look again.
            if file is not None:
                self._root.delete(f"{self.place}/{file.path}")
            raise CommitConflict(self.name)

    def _maintain_log(self, version: int) -> None:
        """After a commit: write a checkpoint and prune the log, each where it is time for it."""
        with suppress(StoreError):  # the commit is safe; both can wait
            if self._log.needs_checkpoint(version):
                with self._border("writing a checkpoint of"):
                    assert self._snapshot is not None
                    self._snapshot.write_checkpoint()
            if (version + 1) % PRUNE_INTERVAL == 0:
                prune_log(self._root, self.place)


def _smallest(files: Sequence[ActiveFile]) -> list[ActiveFile]:
    """The smallest of some files, up to the first that is larger than all before it."""
    ordered = sorted(files, key=lambda file: file.size)
    total = 0
    for number, file in enumerate(ordered):
        # Of files alike each is a little larger than the one before: the second one is always taken.
        if number > 1 and file.size > total:
            return ordered[:number]
        total += file.size
    return ordered


def _may_hold(file: ActiveFile, attempts: Sequence[str]) -> bool:
    """Say whether a file may hold rows of some attempts, which are sorted."""
    place = bisect_left(attempts, file.first_attempt)
    return place < len(attempts) and attempts[place] <= file.last_attempt
