"""Snapshot: what a table holds at the version seen last; its checkpoints, and the pruning of its log.

A snapshot is the newest checkpoint with the commits since applied to it, and a checkpoint is a snapshot that was
written down. The table library is not asked: it goes through its whole snapshot at every look and every commit.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Any, cast

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import Schema

from storage.delta.log import CHECKPOINT, Action, ActiveFile, Log
from storage.delta.parquet import buffer_reader
from storage.errors import SchemaError, border
from storage.roots import Root

# A loss of power may tear the newest: the table then opens from the one before it.
RETAINED_CHECKPOINTS = 2
RETAINED_MINUTES = 1


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
READER_VERSION = 1
"""The version of Delta's protocol that readers of our tables need."""


class Snapshot:
    """The version, schema, files and numbers of one table; for one thread at a time."""

    def __init__(self, log: Log, checkpoint: int) -> None:
        """Read a checkpoint (-1: none) and every version since.

        Raises FileNotFoundError where the log was pruned while it was read, SchemaError where another program altered
        the table.
        """
        self.version = checkpoint
        self._log = log
        rows = SCHEMA.empty_table() if checkpoint < 0 else _read_rows(log.read_checkpoint(checkpoint))
        self._adds: dict[str, Mapping[str, Any]] = {add["path"]: add for add in _values(rows, "add", "path")}
        self._files: dict[str, ActiveFile] = {}
        """What was read of `_adds`, by path."""
        self._numbers = {row["appId"]: int(row["version"]) for row in _values(rows, "txn", "appId")}
        self._definition: dict[str, Mapping[str, Any]] = {}
        """The actions that make the table what it is, by kind."""
        for kind, field in (("protocol", "minReaderVersion"), ("metaData", "id")):
            for content in _values(rows, kind, field):
                self._define(kind, content)
        if not self.catch_up() or "metaData" not in self._definition:
            raise FileNotFoundError(f"version {self.version} of the log")

    @property
    def schema(self) -> pa.Schema:
        """The columns of the table."""
        return pa.schema(cast(Any, Schema.from_json(self._definition["metaData"]["schemaString"]).to_arrow()))

    def catch_up(self) -> bool:
        """Move forward to the newest version; False where the log was pruned past the version seen."""
        with suppress(FileNotFoundError):
            while True:
                self.advance(self._log.actions(self.version + 1))
        return self._log.holds(self.version)

    def advance(self, actions: Sequence[Action]) -> None:
        """Move forward by one version, which consists of these actions."""
        for action in actions:
            ((kind, content),) = action.items()
            if kind == "add":
                self._adds[content["path"]] = content
            elif kind == "remove":
                self._adds.pop(content["path"], None)
                self._files.pop(content["path"], None)
            elif kind == "txn":
                self._numbers[content["appId"]] = int(content["version"])
            elif kind != "commitInfo":
                self._define(kind, content)
        self.version += 1

    def files(self) -> list[ActiveFile]:
        """The files of the version seen."""
        self._files |= {path: ActiveFile.from_addition(self._adds[path]) for path in self._adds.keys() - self._files}
        return list(self._files.values())

    def number(self, application: str) -> int:
        """The number of the last commit under an application id; 0 before the first."""
        return self._numbers.get(application, 0)

    def write_checkpoint(self) -> None:
        """Write the checkpoint of the version seen, durable."""
        actions: list[Any] = [{kind: content} for kind, content in self._definition.items()]
        actions += [{"txn": {"appId": name, "version": number}} for name, number in self._numbers.items()]
        for add in self._adds.values():
            actions.append({"add": {**add, "partitionValues": [*dict(add["partitionValues"]).items()]}})
        rows = pa.Table.from_pylist(actions, SCHEMA)
        sink = pa.BufferOutputStream()
        # Snappy, as the library does: not every reader of checkpoints knows more.
        encoding: dict[str, Any] = {"use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
        pq.write_table(rows, sink, compression="snappy", store_schema=False, **encoding)
        self._log.add_checkpoint(self.version, rows.num_rows, sink.getvalue().to_pybytes())

    def _define(self, kind: str, content: Mapping[str, Any]) -> None:
        fields = {field.name for field in SCHEMA.field(kind).type} if kind in SCHEMA.names else set()
        is_known = kind not in self._definition and content.keys() <= fields
        if not is_known or content.get("minReaderVersion", READER_VERSION) > READER_VERSION:
            what = f"another program altered the table: {kind} has {', '.join(map(str, content))}"
            raise SchemaError(what, self._log.address, "all files of the table", "put the log back from a copy")
        if kind == "metaData":
            form = {**content["format"], "options": [*dict(content["format"]["options"]).items()]}
            content = {**content, "format": form, "configuration": [*dict(content["configuration"]).items()]}
        self._definition[kind] = content


def _read_rows(checkpoint: bytes) -> pa.Table:
    with pq.ParquetFile(buffer_reader(checkpoint), page_checksum_verification=True) as file:
        return file.read(COLUMNS).select(SCHEMA.names).cast(SCHEMA)


def _values(rows: pa.Table, kind: str, required: str) -> Iterable[dict[str, Any]]:
    """The actions of one kind in a checkpoint, which has nulls in the place of others."""
    contents: list[Any] = rows[kind].drop_null().to_pylist()
    return [content for content in contents if content[required] is not None]


def prune_log(root: Root, place: str) -> int:
    """Delete log files that are older than the newest two checkpoints and than RETAINED_MINUTES; return how many.

    The minutes are for a process that has listed the log and is about to read it.
    """
    log = f"{place}/_delta_log"
    oldest = datetime.now(UTC) - timedelta(minutes=RETAINED_MINUTES)
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
        for name in old:
            with suppress(FileNotFoundError):  # another process prunes as well
                root.delete(f"{log}/{name}")
    return len(old)
