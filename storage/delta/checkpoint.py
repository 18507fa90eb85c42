"""Checkpoints of a table's log: the last one with the commits since applied to it.

The library writes one only where this cannot: after another program altered the table, or where commits are gone. It
goes through every commit since the last several times, at a millisecond for each, and does not wait for the disk.
"""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.delta.log import Action, Log
from storage.delta.parquet import buffer_reader


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
