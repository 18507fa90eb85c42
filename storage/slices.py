"""Slices: the rows of one attempt, appended once and read back only if their digest is the recorded one."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.delta.log import ActiveFile
from storage.delta.parquet import buffer_reader, decode
from storage.delta.table import StoredTable
from storage.errors import DamagedSlice, SchemaError, StoreUnavailable
from storage.keys import sha256
from storage.records import ExpiredSlices
from storage.refs import File, Slice
from storage.roots import Root
from storage.schemas.contract import RowPlace, check_rows
from storage.schemas.stage_tables import TABLES
from storage.schemas.system_tables import SYSTEM_TABLES


def content_digest(rows: pa.Table) -> str:
    """Hash the values of a table: 64 hex characters of SHA-256.

    Covers column names and types, the number of rows, where nulls are, list lengths and the exact bits of every value;
    not what lies under a null, offsets into shared buffers, or chunk borders.
    """
    digest = hashlib.sha256()
    digest.update(f"{rows.num_rows}".encode())
    for field in rows.schema:
        digest.update(f"|{field.name}:{field.type}|".encode())
        _feed(digest, one_array(rows.column(field.name)))
    return digest.hexdigest()


def one_array(column: Any) -> Any:
    """Return a column as one array that begins at its first row: a field of a struct does not know of an offset."""
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _feed(digest: Any, values: Any) -> None:
    """Feed one array in a form that depends on its values alone: its own buffers may hold offsets and leftovers."""
    if values.null_count:
        digest.update(b"nulls")
        # What lies under a null is arbitrary: where the nulls are counts, and only the other values.
        digest.update(_bytes(values.is_valid()))
        values = values.drop_null()
    digest.update(f"{len(values)};".encode())
    if pa.types.is_struct(values.type):
        for child in values.flatten():
            _feed(digest, child)
    elif pa.types.is_list(values.type):
        digest.update(np.diff(_borders(values)))
        _feed(digest, values.flatten())
    elif pa.types.is_string(values.type) or pa.types.is_binary(values.type):
        borders = _borders(values)
        digest.update(np.diff(borders))
        data = values.buffers()[2]
        digest.update(memoryview(data)[borders[0] : borders[-1]] if data is not None else b"")
    else:
        digest.update(_bytes(values))


def _bytes(values: Any) -> Any:
    """The values of an array without nulls as contiguous bytes, one byte for a boolean."""
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    elif pa.types.is_timestamp(values.type):
        values = values.cast(pa.int64())
    return np.ascontiguousarray(values.to_numpy(zero_copy_only=False))


def _borders(values: Any) -> Any:
    """Where each list, string or binary of an array without nulls begins in what lies end to end, and the last ends."""
    if not len(values):
        return np.zeros(1, np.int32)
    return np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, values.offset * 4)


SAFE = "nothing was written; everything in the ledger stands"


DESCRIBED = ["step", "attempt"]
"""The columns of which a commit says the least and the greatest value."""


@dataclass(frozen=True)
class WrittenSlice:
    """A slice whose file is durable and not yet in a commit of its table, with the columns that a commit describes."""

    piece: Slice
    rows: pa.Table


class Slices:
    """Appends and reads slices of the stage tables; a table is opened when it is first used."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.expired_slices = ExpiredSlices(root)
        self._tables: dict[str, StoredTable] = {}
        self._attempts: dict[tuple[str, str], int] = {}
        self._lock = Lock()

    def table(self, name: str) -> StoredTable:
        """The open table of a name; SchemaError if the contract has none."""
        if name not in TABLES or TABLES[name] in SYSTEM_TABLES:
            raise SchemaError(
                f"there is no stage table {name!r}", self.root.address, SAFE, "see storage/schemas/stage_tables.sql"
            )
        with self._lock:
            if name not in self._tables:
                self._tables[name] = StoredTable(self.root, name, TABLES[name].stored)
            return self._tables[name]

    def write(self, table: str, rows: pa.Table, *, run: str, step: int, key: str, attempt: str) -> WrittenSlice:
        """Check rows and write them as one slice, durable, that its table does not hold until `commit`.

        `attempt` is an id never used before; where one attempt writes to a table more than once, the slices after the
        first carry `attempt.1` and so on. No file is made for no rows.
        Raises SchemaError, InvariantBreach, NoSpace, StoreUnavailable.
        """
        stored = self.table(table)
        check_rows(rows, TABLES[table], RowPlace(table, run, step, key))
        name = self._attempt_name(table, attempt)
        files: tuple[File, ...] = ()
        whole = _add_slice_columns(rows, stored.data_schema, step, key, name)
        if rows.num_rows:
            files = (stored.write(TABLES[table].row_groups(whole), run),)
        piece = Slice(table, run, name, rows.num_rows, content_digest(rows), files)
        return WrittenSlice(piece, whole.select(DESCRIBED))  # the others may be large, and a commit may wait

    def commit(self, table: str, slices: Sequence[WrittenSlice]) -> None:
        """Add the files of written slices of one run to their table, in one commit."""
        files = [(file, written.rows) for written in slices for file in written.piece.files]
        if files:
            self.table(table).commit_files(files, slices[0].piece.run)

    def read(self, slices: Sequence[Slice], columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of slices of one table, slice after slice in the order given, each in its own order.

        Listed files are checked by size and SHA-256, and where all columns are read also by the content digest. Where
        compaction has moved a slice, its rows are found by attempt and checked by the content digest. Raises
        DamagedSlice, SliceExpired, InvariantBreach, StoreUnavailable.
        """
        (name,) = {piece.table for piece in slices}
        arrow = TABLES[name].arrow
        schema = arrow if columns is None else pa.schema([arrow.field(column) for column in columns])
        # The files that the ledger lists come first: to read them the table's log is not needed.
        listed = {piece: self._read_listed(piece, columns) for piece in slices}
        try:
            compacted = self._read_compacted(name, [each for each, found in listed.items() if found is None])
        except DamagedSlice as error:
            # Asked only after a failure: nearly all reads are of slices that never expire.
            if expired := self.expired_slices.read_error(slices):
                raise expired from error
            raise
        stored = {piece: compacted[piece] if rows is None else rows for piece, rows in listed.items()}
        return pa.concat_tables([schema.empty_table(), *(stored[piece].select(schema.names) for piece in slices)])

    def read_stored(self, piece: Slice) -> pa.Table:
        """The verified rows of a slice as they are stored, out of its listed files; without the run column."""
        return _verify(self._listed_rows(piece), piece)

    def not_held(self, name: str, pieces: Sequence[Slice]) -> list[Slice]:
        """Those of some slices of a table, those without rows aside, that no file of it holds.

        A damaged file counts as holding what its bounds allow: whoever reads it gets the error of the damage.
        """
        table = self.table(name)
        absent = _not_held(table, pieces)
        if absent:  # or they were added since the table was last looked at
            table.refresh()
            absent = _not_held(table, absent)
        return absent

    def has_compacted_copy(self, piece: Slice) -> bool:
        """Say whether the slice can be read, whole and verified, from files that compaction wrote."""
        try:
            self._read_compacted(piece.table, [piece])
        except DamagedSlice:
            return False
        return True

    def _attempt_name(self, table: str, attempt: str) -> str:
        with self._lock:
            # A stage may append to a table more than once in an attempt; each slice needs a name of its own.
            count = self._attempts.get((table, attempt), 0)
            self._attempts[table, attempt] = count + 1
        return f"{attempt}.{count}" if count else attempt

    def _read_listed(self, piece: Slice, columns: Sequence[str] | None) -> pa.Table | None:
        """The rows out of the slice's own files; None where compaction has put them elsewhere."""
        try:
            rows = self._listed_rows(piece, columns)
        except DamagedSlice as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        if columns is None:
            return _verify(rows, piece)
        check_count(piece, rows.num_rows)
        return _in_order(rows)

    def _listed_rows(self, piece: Slice, columns: Sequence[str] | None = None) -> pa.Table:
        schema = self.table(piece.table).data_schema
        if columns is not None:
            schema = pa.schema([field for field in schema if field.name == "seq" or field.name in columns])
        rows = [schema.empty_table()]
        for file in piece.files:
            data, place = self.file_bytes(piece, file), self.root.child(file_place(piece, file))
            rows.append(decode(buffer_reader(data), schema, where=place))
        return pa.concat_tables(rows)

    def file_bytes(self, piece: Slice, file: File) -> bytes:
        """The bytes of a file of a slice, if size and SHA-256 are those that the ledger names; else DamagedSlice."""
        path = file_place(piece, file)
        try:
            data = self.root.read(path)
        except OSError as error:
            raise damage_error(piece, f"{path} cannot be read: {error}") from error
        # The size first: a file that was cut is distinguished from one of other content.
        if len(data) != file.size:
            raise damage_error(piece, f"{path} has {len(data)} bytes instead of {file.size}")
        if sha256(data) != file.sha256:
            raise damage_error(piece, f"{path} is not the file that was written: its SHA-256 differs")
        return data

    def _read_compacted(self, name: str, pieces: Sequence[Slice]) -> Mapping[Slice, pa.Table]:
        """The rows of slices whose files are gone, out of the files that took their place."""
        if not pieces:
            return {}
        table = self.table(name)
        table.refresh()
        found: dict[Slice, pa.Table] = {}
        for run in sorted({piece.run for piece in pieces}):
            mine = {piece.attempt: piece for piece in pieces if piece.run == run}
            rows = self._attempt_rows(table, run, mine)
            for attempt, piece in mine.items():
                found[piece] = _verify(rows.filter(pc.equal(rows["attempt"], pa.scalar(attempt))), piece)
        return found

    def _attempt_rows(self, table: StoredTable, run: str, pieces: Mapping[str, Slice]) -> pa.Table:
        files = [
            each
            for each in table.active_files(run)
            # The bounds are in the log, so that files without these attempts are not opened.
            if any(each.first_attempt <= attempt <= each.last_attempt for attempt in pieces)
        ]
        try:
            return pa.concat_tables([table.data_schema.empty_table(), *(table.read(f.path, pieces) for f in files)])
        except (StoreUnavailable, SchemaError) as error:
            raise damage_error(next(iter(pieces.values())), f"compacted files of run {run!r}: {error.what}") from error


def _not_held(table: StoredTable, pieces: Sequence[Slice]) -> list[Slice]:
    files = table.active_files()
    single = {(file.run, file.attempt) for file in files}
    merged = [file for file in files if not file.attempt]

    def is_held(piece: Slice) -> bool:
        return any(
            each.run == piece.run
            and each.first_attempt <= piece.attempt <= each.last_attempt
            and _holds(table, each, piece.attempt)
            for each in merged
        )

    # The files of one attempt first: their bounds say all there is to know.
    return [
        piece for piece in pieces if piece.files and (piece.run, piece.attempt) not in single and not is_held(piece)
    ]


def _holds(table: StoredTable, file: ActiveFile, attempt: str) -> bool:
    try:
        return attempt in table.attempts_in(file)
    except StoreUnavailable:
        return True


def file_place(piece: Slice, file: File) -> str:
    """Where a file of a slice lies below the root."""
    return f"tables/{piece.table}/{file.path}"


def damage_error(piece: Slice, what: str) -> DamagedSlice:
    """The error for a slice whose bytes are not those that were written."""
    where = f"table {piece.table!r}, run {piece.run!r}, attempt {piece.attempt!r}"
    safe = "every other slice; nothing was computed from this one"
    do = "put the file back from a copy; or change the stage's section, which computes it anew under another key"
    return DamagedSlice(what, where, safe, do)


def check_count(piece: Slice, num_rows: int) -> None:
    """Raise DamagedSlice unless a slice has as many rows as were found of it."""
    if num_rows != piece.rows:
        raise damage_error(piece, f"{num_rows} rows were found instead of {piece.rows}")


def check_digest(piece: Slice, digest: str, written: str) -> None:
    """Raise DamagedSlice unless the digest of rows of a slice is that of the rows that were written."""
    if digest != written:
        raise damage_error(piece, "the rows are not those that were written: their digest differs")


def _add_slice_columns(rows: pa.Table, schema: pa.Schema, step: int, key: str, attempt: str) -> pa.Table:
    number = rows.num_rows
    given = {
        "step": pa.array(np.full(number, step, np.int64)),
        "key": pa.repeat(pa.scalar(key), number),
        "attempt": pa.repeat(pa.scalar(attempt), number),
        "seq": pa.array(np.arange(number, dtype=np.int32)),
    }
    return pa.table([given[n] if n in given else rows[n] for n in schema.names], schema=schema)


def _verify(stored: pa.Table, piece: Slice) -> pa.Table:
    """The slice's rows as they are stored, in order, or DamagedSlice if they are not the rows written."""
    rows = _in_order(stored)
    values = rows.select(TABLES[piece.table].arrow.names)
    check_count(piece, rows.num_rows)
    check_digest(piece, content_digest(values), piece.digest)
    check_rows(values, TABLES[piece.table], RowPlace(piece.table, piece.run))
    return rows


def _in_order(stored: pa.Table) -> pa.Table:
    # Sorting copies every column, and the rows of a file that was never merged are in order.
    return stored if (stored["seq"].to_numpy() == np.arange(stored.num_rows)).all() else stored.sort_by("seq")
