"""The digest of rows: over values in order, so that it does not depend on chunks, encodings or compaction."""

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def content_digest(rows: pa.Table) -> str:
    """Hash the values of a table: 64 hex characters of SHA-256.

    Covers column names and types, the number of rows, where nulls are, list lengths and the exact bits of every value;
    not what lies under a null, offsets into shared buffers, or chunk borders.
    """
    digest = hashlib.sha256()
    digest.update(f"{rows.num_rows}".encode())
    for field in rows.schema:
        digest.update(f"|{field.name}:{field.type}|".encode())
        _feed(digest, _whole(rows.column(field.name)))
    return digest.hexdigest()


def _whole(column: Any) -> Any:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _feed(digest: Any, values: Any) -> None:
    """Feed one array, whose own buffers may hold offsets and leftovers, in a form that depends on its values alone."""
    if values.null_count:
        digest.update(b"nulls")
        digest.update(_bytes(values.is_valid()))
        values = values.drop_null()
    digest.update(f"{len(values)};".encode())
    if pa.types.is_struct(values.type):
        for child in values.flatten():
            _feed(digest, child)
    elif pa.types.is_list(values.type):
        digest.update(_bytes(values.value_lengths()))
        _feed(digest, values.flatten())
    elif pa.types.is_string(values.type) or pa.types.is_binary(values.type):
        digest.update(_bytes(pc.binary_length(values.cast(pa.binary()))))
        digest.update(_text(values))
    else:
        digest.update(_bytes(values))


def _bytes(values: Any) -> bytes:
    """The values of an array without nulls as contiguous bytes, one byte for a boolean."""
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    elif pa.types.is_timestamp(values.type):
        values = values.cast(pa.int64())
    return np.ascontiguousarray(values.to_numpy(zero_copy_only=False)).tobytes()


def _text(values: Any) -> memoryview:
    """The characters of a string array without nulls, or the bytes of a binary one, end to end."""
    if not len(values):
        return memoryview(b"")
    _, offsets, data = values.buffers()
    borders = np.frombuffer(offsets, np.int32, len(values) + 1, values.offset * 4)
    return memoryview(data)[borders[0] : borders[-1]] if data is not None else memoryview(b"")
