"""Rows to Parquet bytes and back, with checksums on every page.

Written here and not by the table library, because that one can neither write page checksums (a flipped bit then reads
as data) nor encode list columns by themselves.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.errors import StoreUnavailable, memory_refusal
from storage.schemas.contract import RowPlace, check_schema

STATISTICS = ("step", "attempt", "seq")
ATTEMPTS = "attempts"
"""Metadata of a file: first and last attempt of each row group. Arrow aborts the process over damaged statistics."""

SMALL_BYTES = 4 * 2**20
"""A file of so many bytes or fewer is decoded by one thread."""


DAMAGE = (pa.ArrowException, OSError, ValueError)
"""What Arrow raises over a damaged file; damaged names in a footer are a UnicodeDecodeError."""


def encode(groups: Sequence[pa.Table]) -> bytes:
    """Write tables of one schema as Parquet, each a row group of its own, so that one can be read without the others.

    Zstd level 1, floats as split byte streams, no dictionaries: the fastest of the small ones, measured on rollouts.
    Integers as split byte streams are 1 % smaller still, and readers older than Parquet 2.11 do not know them.
    Minima and maxima are kept for the slice columns alone, so that no text of a prompt lands in a footer.
    """
    sink = pa.BufferOutputStream()
    schema = groups[0].schema
    with pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        column_encoding=_float_columns(schema),
        write_statistics=[name for name in STATISTICS if name in schema.names],
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        for group in groups:
            # Without a size Arrow would cut large groups where it likes.
            writer.write_table(group, row_group_size=group.num_rows)
        if "attempt" in schema.names:
            bounds = [(pc.min(group["attempt"]).as_py(), pc.max(group["attempt"]).as_py()) for group in groups]
            writer.add_key_value_metadata({ATTEMPTS: json.dumps(bounds)})
    return sink.getvalue().to_pybytes()


@lru_cache(maxsize=64)
def _float_columns(schema: pa.Schema) -> dict[str, str]:
    """The encoding of every column of floats, and of lists of them, by its path."""
    found = {}
    for field in schema:
        in_list = pa.types.is_list(field.type)
        kind = field.type.value_type if in_list else field.type
        if pa.types.is_floating(kind):
            found[f"{field.name}.list.element" if in_list else field.name] = "BYTE_STREAM_SPLIT"
    return found


def buffer_reader(data: bytes) -> pa.BufferReader:
    """A reader of a file's bytes, over a copy that Arrow owns.

    A reading thread may drop its reference after the read has returned. Memory that Python owns takes Python's lock
    then, and where the interpreter is about to end that aborts the process: a finished run would look failed.
    """
    copy = pa.allocate_buffer(len(data))
    pa.FixedSizeBufferWriter(copy).write(data)
    return pa.BufferReader(copy)


def decode(
    source: pa.NativeFile, schema: pa.Schema, attempts: Collection[str] | None = None, where: str = ""
) -> pa.Table:
    """Read the columns of a schema, in its order, checking page checksums; with `attempts`, their rows alone.

    Only row groups that may hold those attempts are read. Raises StoreUnavailable, which names the file by `where`,
    where the bytes are no such file or a checksum fails, SchemaError where types or nullability are others: nothing is
    cast.
    """
    with _border(where), pq.ParquetFile(source, page_checksum_verification=True) as file:
        groups = range(file.num_row_groups) if attempts is None else _groups_of(file, attempts)
        # To start threads takes more of the processor than they save at a small file.
        threads = source.size() > SMALL_BYTES
        rows = _sound_rows(file, groups, schema, threads)
    check_schema(rows.schema, schema, RowPlace("a Parquet file"))
    if attempts is None:
        return rows
    return rows.filter(pc.is_in(rows["attempt"], pa.array(sorted(attempts), pa.string())))


def _sound_rows(file: pq.ParquetFile, groups: Iterable[int], schema: pa.Schema, threads: bool) -> pa.Table:
    rows = file.read_row_groups(list(groups), schema.names, use_threads=threads).replace_schema_metadata(None)
    # Damaged offsets would be followed out of their buffer by whoever uses the rows.
    rows.validate(full=True)
    return rows


class RowGroups:
    """The row groups of one file, each read by itself, with the checks and the errors of `decode`."""

    def __init__(self, source: pa.NativeFile, schema: pa.Schema, where: str) -> None:
        self._schema, self._where = schema, where
        with _border(where):
            # The columns of a row group are adjacent: one request to an object store, not one for each.
            self._file = pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=True)

    def __len__(self) -> int:
        return int(self._file.num_row_groups)

    def read(self, number: int) -> pa.Table:
        """Read the rows of one group."""
        with _border(self._where):
            rows = _sound_rows(self._file, [number], self._schema, threads=False)
        check_schema(rows.schema, self._schema, RowPlace("a Parquet file"))
        return rows


def attempts_in(source: pa.NativeFile, where: str = "") -> frozenset[str]:
    """The attempts that a file holds rows of: as its footer says, or the column where a row group is of several.

    Raises StoreUnavailable, which names the file by `where`, where the bytes are no such file.
    """
    with _border(where), pq.ParquetFile(source, page_checksum_verification=True) as file:
        bounds = _attempt_bounds(file) or [("", None)] * file.num_row_groups
        mixed = [group for group, (first, last) in enumerate(bounds) if first != last]
        rows = file.read_row_groups(mixed, ["attempt"])
    return frozenset({*(first for first, last in bounds if first == last), *map(str, rows["attempt"].to_pylist())})


@contextmanager
def _border(where: str) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        if memory_refusal(error):  # says nothing of the file
            raise
        safe = "every other file of the store"
        do = "put the file back from a copy, or run `stagecoach repair --deep`: it says what can be done again"
        raise StoreUnavailable(f"a Parquet file is damaged: {error}", where, safe, do) from error


def _attempt_bounds(file: pq.ParquetFile) -> list[Any]:
    text = (file.metadata.metadata or {}).get(ATTEMPTS.encode())
    return list(json.loads(text)) if text else []


def _groups_of(file: pq.ParquetFile, attempts: Collection[str]) -> Sequence[int]:
    """The row groups that may hold the attempts; all of them in a file that does not say."""
    bounds = _attempt_bounds(file)
    if not bounds:
        return range(file.num_row_groups)
    return [
        group for group, (first, last) in enumerate(bounds) if any(first <= attempt <= last for attempt in attempts)
    ]
