"""Snapshot: what a table holds at the version seen last; its checkpoints, and the pruning of its log.

A table is read through the library once, then moved forward by the actions of the log: the library goes through its
whole snapshot at every look and every commit. A checkpoint is the last one with the commits since applied to it. The
library writes one only where this cannot, after another program altered the table or where commits are gone: it goes
through every commit since the last several times, at a millisecond for each, and does not wait for the disk.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from storage.delta.log import CHECKPOINT, Action, ActiveFile, Log, numbers_of
from storage.delta.parquet import buffer_reader
from storage.errors import border
from storage.roots import Root

# A loss of power may tear the newest: the table then opens from the one before it.
RETAINED_CHECKPOINTS = 2
RETAINED_MINUTES = 1


class Snapshot:
    """The version, files and numbers of one table; for one thread at a time."""

    def __init__(self, delta: DeltaTable, log: Log, options: Mapping[str, str]) -> None:
        """`delta` was just opened, with `options` for its storage."""
        self.version = int(delta.version())
        self._delta, self._log, self._options = delta, log, dict(options) or None
        self._files: dict[str, ActiveFile] | None = None
        self._numbers: dict[str, int] = {}

    def catch_up(self) -> bool:
        """Move forward to the newest version; False where only opening the table again leads there.

        That is where the log was pruned past this version, or the table was altered.
        """
        while True:
            try:
                actions = self._log.actions(self.version + 1)
            except FileNotFoundError:
                return self._log.holds(self.version)
            if any("metaData" in action or "protocol" in action for action in actions):
                return False
            self.advance(actions)

    def advance(self, actions: Sequence[Action]) -> None:
        """Move forward by one version, which consists of these actions."""
        self.version += 1
        self._numbers.update(numbers_of(actions))
        if self._files is None:
            return
        for action in actions:
            if "add" in action:
                file = ActiveFile.from_addition(action["add"])
                self._files[file.path] = file
            elif "remove" in action:
                self._files.pop(action["remove"]["path"], None)

    def files(self) -> list[ActiveFile]:
        """The files of the version seen."""
        if self._files is None:
            # Where the library has seen more, moving forward adds and removes the same once more.
            rows = pa.table(self._library().get_add_actions(flatten=True)).to_pylist()
            self._files = {row["path"]: ActiveFile.from_row(row) for row in rows}
        return list(self._files.values())

    def number(self, application: str) -> int:
        """The number of the last commit under an application id; 0 before the first."""
        if application not in self._numbers:
            delta = self._delta
            # It must not tell what this snapshot has not seen, nor need what was pruned since it was opened.
            if delta.version() != self.version:
                delta = DeltaTable(delta.table_uri, version=self.version, storage_options=self._options)
            self._numbers[application] = int(delta.transaction_version(application) or 0)
        return self._numbers[application]

    def write_checkpoint(self) -> int:
        """Write a checkpoint of the newest version and return that."""
        delta = self._library()
        delta.create_checkpoint()
        return int(delta.version())

    def _library(self) -> DeltaTable:
        """The library's handle, at the version seen or a later one."""
        if self._delta.version() < self.version:
            try:
                self._delta.update_incremental()
            except DeltaError:  # the log moved on under a handle that was long idle
                self._delta = DeltaTable(self._delta.table_uri, storage_options=self._options)
        return self._delta


def _struct(**types: pa.DataType) -> pa.StructType:
    return pa.struct(list(types.items()))


STRINGS = pa.map_(pa.string(), pa.string())
SCHEMA = pa.schema(
    {
        "add": _struct(
            path=pa.string(),
            partitionValues=STRINGS,
            size=pa.int64(),
            modificationTime=pa.int64(),
            dataChange=pa.bool_(),
            stats=pa.string(),
        ),
        "metaData": _struct(
            id=pa.string(),
            name=pa.string(),
            description=pa.string(),
            format=_struct(provider=pa.string(), options=STRINGS),
            schemaString=pa.string(),
            partitionColumns=pa.list_(pa.field("element", pa.string())),
            createdTime=pa.int64(),
            configuration=STRINGS,
        ),
        "protocol": _struct(minReaderVersion=pa.int32(), minWriterVersion=pa.int32()),
        "txn": _struct(appId=pa.string(), version=pa.int64()),
    }
)
"""What our tables use of a checkpoint. Removed files are for programs that delete them, which is ours to do."""
COLUMNS = [f"{column.name}.{field.name}" for column in SCHEMA for field in column.type]


def write_checkpoint(log: Log, version: int) -> bool:
    """Write the checkpoint of a version, durable; False, with nothing written, where only the library can."""
    last = log.last_checkpoint()
    versions = log.actions_after(last.version if last else -1, version)
    if versions is None:
        return False
    try:
        rows = advance(log.read_checkpoint(last.version) if last else None, versions)
    except (FileNotFoundError, ValueError):
        return False
    sink = pa.BufferOutputStream()
    # Snappy, as the library does: not every reader of checkpoints knows more.
    encoding: dict[str, Any] = {"use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    pq.write_table(rows, sink, compression="snappy", store_schema=False, **encoding)
    log.add_checkpoint(version, rows.num_rows, sink.getvalue().to_pybytes())
    return True


def advance(checkpoint: bytes | None, versions: Sequence[Sequence[Action]]) -> pa.Table:
    """The rows of a checkpoint, or of nothing, after some versions.

    Raises ValueError where one of them, but the first of all, alters the table itself.
    """
    added: dict[str, dict[str, Any]] = {}
    numbers: dict[str, int] = {}
    gone: set[str] = set()
    made: list[dict[str, Any]] = []
    for action in (each for actions in versions for each in actions):
        if "add" in action:
            add = action["add"]
            added[add["path"]] = {**add, "partitionValues": list(add["partitionValues"].items())}
        elif "remove" in action:
            gone.add(action["remove"]["path"])
            added.pop(action["remove"]["path"], None)
        elif "txn" in action:
            numbers[action["txn"]["appId"]] = action["txn"]["version"]
        elif "commitInfo" not in action:
            made.append(_creation(action))
    if len(made) != (2 if checkpoint is None else 0):
        raise ValueError("the table was altered")
    before = SCHEMA.empty_table() if checkpoint is None else _rows(checkpoint)
    old = pc.or_(
        pc.is_in(pc.struct_field(before["add"], "path"), pa.array([*gone, *added], pa.string())),
        pc.is_in(pc.struct_field(before["txn"], "appId"), pa.array(list(numbers), pa.string())),
    )
    new: list[dict[str, Any]] = [*made, *({"add": add} for add in added.values())]
    new += [{"txn": {"appId": name, "version": number}} for name, number in numbers.items()]
    return pa.concat_tables([before.filter(pc.invert(old)), pa.Table.from_pylist(new, SCHEMA)]).combine_chunks()


def _rows(checkpoint: bytes) -> pa.Table:
    with pq.ParquetFile(buffer_reader(checkpoint), page_checksum_verification=True) as file:
        return file.read(COLUMNS).select(SCHEMA.names).cast(SCHEMA)


def _creation(action: Action) -> dict[str, Any]:
    """The row of an action that makes a table. Raises ValueError where a checkpoint of ours could not hold it."""
    ((kind, content),) = action.items()
    fields = {field.name for field in SCHEMA.field(kind).type} if kind in ("metaData", "protocol") else set()
    if not content.keys() <= fields:
        raise ValueError("the table was altered")
    if kind == "protocol":
        return {kind: content}
    form = {**content["format"], "options": list(content["format"]["options"].items())}
    return {kind: {**content, "format": form, "configuration": list(content["configuration"].items())}}


def prune_log(root: Root, place: str, minutes: int | None = None, dry_run: bool = False) -> int:
    """Delete log files that are older than the newest two checkpoints and than `minutes`; return how many.

    The minutes (RETAINED_MINUTES unless given) are for a process that has listed the log and is about to read it.
    """
    log = f"{place}/_delta_log"
    oldest = datetime.now(UTC) - timedelta(minutes=RETAINED_MINUTES if minutes is None else minutes)
    with border("pruning a log", root.child(log)):
        files = {info.base_name: info for info in root.files.get_file_info(pafs.FileSelector(log))}
        checkpoints = sorted(name for name in files if name.endswith(CHECKPOINT))
        if len(checkpoints) < RETAINED_CHECKPOINTS:
            return 0
        # Versions are padded with zeros, so that names compare as numbers do.
        first = checkpoints[-RETAINED_CHECKPOINTS].removesuffix(CHECKPOINT)
        old = [name for name in files if name.endswith((".json", CHECKPOINT)) and name.partition(".")[0] < first]
        # Oldest first and without a gap: whoever finds a version knows that those after it are there.
        old = list(takewhile(lambda name: (at := files[name].mtime) is not None and at <= oldest, sorted(old)))
        for name in old if not dry_run else ():
            with suppress(FileNotFoundError):  # another process prunes as well
                root.delete(f"{log}/{name}")
    return len(old)
