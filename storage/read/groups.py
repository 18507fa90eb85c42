"""Reads the rows of slices a group at a time: whoever needs some rows of a batch never holds the others.

A file is verified once, as a whole, by size and SHA-256; what is noted of its groups then vouches for each of them,
also to processes that read that group alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from storage.delta.log import PARTITION
from storage.delta.parquet import RowGroups, buffer_reader
from storage.errors import DamagedSlice, StoreError, border
from storage.refs import Slice
from storage.roots import open_root
from storage.schemas.contract import RowPlace, check_rows
from storage.schemas.stage_tables import TABLES
from storage.slices import Slices, check_count, check_digest, content_digest, damage_error, file_place


@dataclass(frozen=True)
class Group:
    """Some consecutive rows of a slice, which were verified."""

    piece: Slice
    number: int
    """The row group of its file; -1 is all rows of the slice, wherever compaction has put them."""
    digest: str
    """The digest of their values."""


class GroupReader:
    """Reads groups of rows of slices; what it holds is one group of each table, and a file while that is verified."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._open: dict[str, tuple[str, RowGroups]] = {}
        self._held: dict[str, tuple[Group, pa.Table]] = {}
        """What was read last, by table."""

    def verify(self, piece: Slice) -> Iterator[tuple[Group, pa.Table]]:
        """Yield the groups of a slice with their rows, in order, once its files are known to be what was written.

        Raises what `Slices.read` raises, in the same words.
        """
        found = 0
        if (data := self._bytes(piece)) is None:
            rows = self._slices.read([piece])
            yield Group(piece, -1, piece.digest), rows
            return
        if data:
            groups = RowGroups(buffer_reader(data), _schema(piece), self._where(piece))
            del data
            for number in range(len(groups)):
                rows = _stage_rows(piece, groups.read(number))
                found += rows.num_rows
                yield Group(piece, number, content_digest(rows)), rows
        check_count(piece, found)

    def read(self, group: Group) -> pa.Table:
        """Return the rows of a group that was verified, by this process or another. Raises DamagedSlice."""
        table = group.piece.table
        if table not in self._held or self._held[table][0] != group:
            self._held.pop(table, None)  # never two
            self._held[table] = group, self._read(group)
        return self._held[table][1]

    def _read(self, group: Group) -> pa.Table:
        if group.number < 0:
            return self._slices.read([group.piece])
        try:
            rows = _stage_rows(group.piece, self._groups(group.piece).read(group.number))
        except StoreError as error:
            raise damage_error(group.piece, error.what) from error
        check_digest(group.piece, content_digest(rows), group.digest)
        return rows

    def _bytes(self, piece: Slice) -> bytes | None:
        """The bytes of the one file of a slice, none of one without rows; None where compaction has moved them."""
        try:
            return self._slices.file_bytes(piece, piece.files[0]) if piece.files else b""
        except DamagedSlice as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def _groups(self, piece: Slice) -> RowGroups:
        place = file_place(piece, piece.files[0])
        if piece.table not in self._open or self._open[piece.table][0] != place:
            with border("reading a file", self._where(piece)):
                source = self._slices.root.files.open_input_file(place)
            self._open[piece.table] = place, RowGroups(source, _schema(piece), self._where(piece))
        return self._open[piece.table][1]

    def _where(self, piece: Slice) -> str:
        return self._slices.root.child(file_place(piece, piece.files[0]))


def open_groups(address: str) -> GroupReader:
    """Open a store to read groups of its rows; in an object store with the credentials of the environment."""
    return GroupReader(Slices(replace(open_root(address), read_only=True)))


def _schema(piece: Slice) -> pa.Schema:
    return pa.schema([field for field in TABLES[piece.table].stored if field.name != PARTITION])


def _stage_rows(piece: Slice, stored: pa.Table) -> pa.Table:
    contract = TABLES[piece.table]
    rows = stored.select(contract.arrow.names)
    check_rows(rows, contract, RowPlace(piece.table, piece.run))
    return rows
