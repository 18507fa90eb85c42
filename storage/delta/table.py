"""One table of the store on Delta Lake; with the files of its log (`storage.delta.log`) all that knows the library.

Data files are written here, durably and with digests, before Delta's log names them: the log commit alone is left to
the library. A handle stays open and is moved forward, so that a commit costs the same after a year as on the first day.
"""

import hashlib
import random
import time
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from threading import RLock
from typing import Any, cast
from uuid import uuid4

import polars as pl
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from storage.delta.log import (
    CACHED_VERSIONS,
    CHECKPOINT_INTERVAL,
    PARTITION,
    PROPERTIES,
    ActiveFile,
    LogTexts,
    addition,
    last_number,
    new_paths,
    prune_log,
    removal,
    rename_torn_files,
)
from storage.delta.parquet import buffer_reader, decode, encode
from storage.errors import StoreError, StoreUnavailable, border
from storage.refs import File
from storage.roots import Root
from storage.schemas.contract import RowPlace, check_schema

# Often enough for a short log, seldom enough that listing it costs nothing beside the commits.
PRUNE_INTERVAL = 50
"""Versions from one pruning of the log to the next."""
ATTEMPTS_TO_COMMIT = 50


class CommitConflict(Exception):
    """Another writer committed under the same application id since the last refresh; for storage's own use."""


class StoredTable:
    """An append-only table, partitioned by run, with one open handle; safe to share between threads."""

    def __init__(self, root: Root, name: str, schema: pa.Schema) -> None:
        self.name = name
        self.place = f"tables/{name}"
        self.schema = schema
        self.data_schema = pa.schema([field for field in schema if field.name != PARTITION])
        self._root = root
        self.lock = RLock()
        self._stats = [name for name in ("step", "attempt") if name in schema.names]
        with border(f"opening table {name!r}", root.child(self.place)):
            self._delta = self._open()
        self._active: tuple[int, list[ActiveFile]] = (-1, [])
        self._numbers: dict[str, tuple[int, int]] = {}
        self._texts = LogTexts(root, name, self.place)

    @property
    def version(self) -> int:
        """The version at the last refresh; -1 of a table that is only read and not there yet."""
        return -1 if self._delta is None else int(self._delta.version())

    def append(self, rows: pa.Table, run: str, transaction: tuple[str, int] | None = None) -> File:
        """Add rows of one run, at least one row, as one durable file, then one durable commit.

        With a `transaction` (application id, number) the commit fails with CommitConflict if any other commit
        under that id came since the last refresh. An error after which the commit turns out to be there is no error.
        """
        file = self.write([rows], run)
        try:
            self.commit_files([(file, rows)], run, transaction)
        except CommitConflict:
            self._root.delete(f"{self.place}/{file.path}")
            raise
        return file

    def write(self, groups: Sequence[pa.Table], run: str) -> File:
        """Write rows of one run, at least one row, as one durable file that the table does not hold yet."""
        check_schema(groups[0].schema, self.data_schema, RowPlace(self.name, run))
        path = f"{PARTITION}={run}/{uuid4().hex}.parquet"
        written = self._root.write(f"{self.place}/{path}", encode(groups))
        return File(path, written.size, written.sha256)

    def write_at(self, path: str, rows: pa.Table) -> File:
        """Write rows as one durable file of that path; a file that a dead copy left there is reused or replaced."""
        place, data = f"{self.place}/{path}", encode([rows])
        with border(f"copying a file of table {self.name!r}", self._root.child(place)):
            if self._root.exists(place):
                self.refresh()
                if any(each.path == path for each in self.active_files()):
                    found = self._root.read(place)
                    return File(path, len(found), hashlib.sha256(found).hexdigest())
                self._root.delete(place)
        written = self._root.write(place, data)
        return File(path, written.size, written.sha256)

    def commit_files(
        self, files: Sequence[tuple[File, pa.Table]], run: str, transaction: tuple[str, int] | None = None
    ) -> None:
        """Add files that `write` made, each with its rows, in one durable commit; see `append`."""
        additions = [self._addition(file, rows, run, new=True) for file, rows in files]
        self._commit(additions, files[0][0].path, dict([transaction] if transaction else []))

    def replace(
        self, old: Sequence[ActiveFile], groups: Sequence[pa.Table], run: str, marks: Mapping[str, int] | None = None
    ) -> None:
        """Swap files for one that holds the same rows, a row group for each of `groups`, in one commit.

        Where rows are removed, `groups` are those that stay, perhaps none, and `marks` (numbers by application id,
        committed with the swap) let every other reader notice. Raises CommitConflict, with nothing changed, where
        another swap, or another commit with one of the marks, came since the last refresh.
        """
        file = self.write(groups, run) if groups else None
        swap: list[AddAction | RemoveAction] = [removal(each, {PARTITION: run}) for each in old]
        if file is not None:
            swap.append(self._addition(file, pa.concat_tables(groups), run, new=False))
        numbers = {"compaction": self.transaction_version("compaction") + 1, **(marks or {})}
        try:
            self._commit(swap, file.path if file else uuid4().hex, numbers)
        except CommitConflict:
            if file is not None:
                self._root.delete(f"{self.place}/{file.path}")
            raise

    def merge_files(self, run: str, min_files: int) -> int:
        """Merge all files of a run into one if there are so many; return how many were merged.

        For tables whose every row counts as soon as it is committed. Nothing is done where another process merges them.
        """
        with self.lock:
            self.refresh()
            files = [each for each in self.active_files() if each.run == run]
            if len(files) < min_files:
                return 0
            try:
                self.replace(files, [pa.concat_tables([self.read(each.path) for each in files])], run)
            except CommitConflict:
                return 0
            return len(files)

    def refresh(self) -> int:
        """Move the handle to the newest version and return it."""
        with self.lock, border(f"looking at table {self.name!r}", self._root.child(self.place)):
            try:
                if self._delta is not None:
                    self._delta.update_incremental()
                else:
                    self._delta = self._open()
            except DeltaError:
                self._delta = self._open()  # the log moved on under a handle that was long idle
            return self.version

    def new_files(self, since: int | None) -> tuple[list[str], int]:
        """The paths of files with new rows after version `since` (None: all files now), and the version seen.

        Costs the number of new commits, not the length of history. Files that merely repeat rows do not count.
        """
        with self.lock:
            version = self.refresh()
            logs = None if since is None else self._texts.texts_after(since, self.version)
            if logs is None:
                return [each.path for each in self.active_files()], version
            return [path for log in logs for path in new_paths(log)], version

    def transaction_version(self, application: str) -> int:
        """The number of the last commit under an application id at the version seen; 0 before the first.

        The library reads all of the log since its last checkpoint for this; what came since the last call is enough.
        """
        with self.lock:
            seen, number = self._numbers.get(application, (-1, 0))
            if seen != self.version:
                number = self._number(application, seen, number)
                self._numbers[application] = (self.version, number)
            return number

    def active_files(self) -> list[ActiveFile]:
        """The files of the version seen."""
        with self.lock:
            if self._delta is not None and self._active[0] != self.version:
                found = pa.table(self._delta.get_add_actions(flatten=True)).to_pylist()
                self._active = (self.version, [ActiveFile.from_row(row) for row in found])
            return self._active[1]

    def files_of(self, attempts: Mapping[str, Collection[str]]) -> list[ActiveFile]:
        """The files, at the newest version, that may hold rows of some attempts, given by run."""
        self.refresh()
        wanted = {run: sorted(of_run) for run, of_run in attempts.items()}
        return [each for each in self.active_files() if _may_hold(each, wanted.get(each.run, ()))]

    def scan(self, attempts: Mapping[str, Collection[str]]) -> pl.LazyFrame:
        """The rows of some attempts, given by run, without digest; filters and columns are pushed into the files.

        Polars opens a file in a quarter of the time that Arrow takes for it. That is what reading costs where a run has
        left a thousand files: see benchmarks/viewing.md.
        """
        by_run: dict[str, list[ActiveFile]] = {}
        for file in self.files_of(attempts):
            by_run.setdefault(file.run, []).append(file)
        parts = [pl.LazyFrame(pl.DataFrame(self.schema.empty_table()))]
        for run, files in by_run.items():
            places = [self._root.child(f"{self.place}/{each.path}") for each in files]
            options = dict(self._root.options) or None
            rows = pl.scan_parquet(places, glob=False, hive_partitioning=False, storage_options=options)
            # A file of one attempt is wanted as a whole: `files_of` has looked at its bounds.
            if any(each.first_attempt != each.last_attempt for each in files):
                rows = rows.filter(pl.col("attempt").is_in(sorted(set(attempts[run]))))
            parts.append(rows.with_columns(pl.lit(run).alias(PARTITION)).select(self.schema.names))
        return pl.concat(parts[1:] or parts)

    def read(self, path: str, attempts: Collection[str] | None = None) -> pa.Table:
        """Rows of a file that the table holds, by page checksums but without digest; without the run column."""
        inside = f"{self.place}/{path}"
        with border("reading a file", self._root.child(inside)):
            if attempts is None and self._root.directory is None:
                return decode(buffer_reader(self._root.read(inside)), self.data_schema)  # one request
            with self._root.files.open_input_file(inside) as source:
                return decode(source, self.data_schema, attempts)

    def _open(self) -> DeltaTable | None:
        """Open the table, made where it is not there; a store that is only read has then none."""
        address, options = self._root.child(self.place), dict(self._root.commits) or None
        try:
            delta = DeltaTable(address, storage_options=options)
        except TableNotFoundError:
            if self._root.read_only:
                return None
            delta = self._create(address, options)
        except DeltaError:
            if not self._root.read_only:
                rename_torn_files(self._root, self.place)  # or the log was pruned while it was read
            delta = DeltaTable(address, storage_options=options)
        found = pa.schema(cast(Any, delta.schema().to_arrow()))
        check_schema(found, self.schema, RowPlace(self.name))
        return delta

    def _create(self, address: str, options: dict[str, str] | None) -> DeltaTable:
        with suppress(CommitFailedError):  # another process was first; what it made is checked like any other
            DeltaTable.create(
                address,
                self.schema,
                mode="ignore",
                partition_by=[PARTITION],
                configuration=PROPERTIES,
                storage_options=options,
            )
        delta = DeltaTable(address, storage_options=options)
        self._root.make_durable(f"{self.place}/_delta_log/{0:020d}.json", self.place)
        return delta

    def _addition(self, file: File, rows: pa.Table, run: str, new: bool) -> AddAction:
        return addition(file, rows, {PARTITION: run}, self._stats, new)

    def _commit(self, actions: list[Any], witness: str, numbers: Mapping[str, int]) -> None:
        """Commit; after any error, look in the log whether the commit is there: `witness` is a name that only it has.

        `numbers` by application id are committed as well; where there are any, a commit of another writer with one of
        them since the last refresh wins, and this one raises CommitConflict.
        """
        transactions = [Transaction(*number) for number in numbers.items()]
        properties = CommitProperties(
            {"witness": witness, "actions": len(actions) + len(transactions)}, app_transactions=transactions or None
        )
        with self.lock, border(f"committing to table {self.name!r}", self._root.child(self.place)):
            for attempt in range(ATTEMPTS_TO_COMMIT):
                if not numbers:
                    self.refresh()  # the log may have been pruned past a handle that was long idle
                before = self.version
                try:
                    self._write_commit(actions, properties)
                # A lost answer, or an interrupt, may come after the commit was done: only the log can tell.
                except BaseException as error:
                    if self._confirm(before, witness):
                        return
                    if not isinstance(error, CommitFailedError):
                        raise
                    if numbers:
                        # The numbers were chosen for the version seen before: whoever chose them has to look again.
                        raise CommitConflict(self.name) from error
                    # A random pause, so that writers who met once do not meet again at the next attempt.
                    time.sleep(random.uniform(0, 0.02 * (attempt + 1)))
                else:
                    if self._root.directory is not None:
                        self._confirm(before, witness)
                    else:
                        self._prune(before + 1)  # an answered put is durable; the next refresh moves the handle
                    return
        what = f"table {self.name!r} is too busy: {ATTEMPTS_TO_COMMIT} commits lost their race"
        raise StoreUnavailable(what, self._root.child(self.place), "everything in the ledger", "run the same again")

    def _write_commit(self, actions: list[Any], properties: CommitProperties) -> None:
        assert self._delta is not None and not self._root.read_only, f"a commit to {self.name!r}, which is only read"
        self._delta.create_write_transaction(
            actions, "append", self.schema, partition_by=[PARTITION], commit_properties=properties
        )

    def _confirm(self, before: int, witness: str) -> bool:
        """Refresh; if one of the new versions has `witness`, force its log to the disk and return True."""
        self.refresh()
        for version in range(self.version, before, -1):  # newest first: old ones may have been pruned
            try:
                found = witness in self._texts.text(version)
            except FileNotFoundError:
                return False
            if found:
                self._make_durable(version)
                return True
        return False

    def _make_durable(self, version: int) -> None:
        log = f"{self.place}/_delta_log"
        written = [f"{log}/{version:020d}.json"]
        # The library writes a checkpoint with these versions, and does not force it to the disk.
        if (version + 1) % CHECKPOINT_INTERVAL == 0:
            written += [f"{log}/{version:020d}.checkpoint.parquet", f"{log}/_last_checkpoint"]
        self._root.make_durable(*written)
        self._prune(version)

    def _prune(self, version: int) -> None:
        if (version + 1) % PRUNE_INTERVAL == 0:
            with suppress(StoreError):  # the commit is safe; pruning can wait
                prune_log(self._root, self.place)

    def _number(self, application: str, seen: int, number: int) -> int:
        """The number of an application id now, where it was `number` at version `seen` (-1: not known)."""
        known = 0 <= seen <= self.version < seen + CACHED_VERSIONS
        logs = self._texts.texts_after(seen, self.version) if known else None
        if logs is None:
            return int(self._delta.transaction_version(application) or 0) if self._delta else 0
        return last_number(logs, application, number)


def _may_hold(file: ActiveFile, attempts: Sequence[str]) -> bool:
    """Say whether a file may hold rows of some attempts, which are sorted."""
    place = bisect_left(attempts, file.first_attempt)
    return place < len(attempts) and attempts[place] <= file.last_attempt
