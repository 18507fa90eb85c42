"""System tables held in memory: the rows of one table, kept up to date with the files that each commit added."""

from collections.abc import Mapping, Sequence
from datetime import UTC
from functools import cached_property
from threading import RLock
from typing import Any

import pyarrow as pa

from storage.delta.table import StoredTable
from storage.roots import Root
from storage.schemas.columns import Table


class CachedTable:
    """One system table; a subclass says in `_add_row` what a row is, and takes `_lock` while it reads its rows."""

    def __init__(self, root: Root, contract: Table) -> None:
        self._root = root
        self._contract = contract
        self._lock = RLock()
        self._version: int | None = None
        self._read_files: set[str] = set()

    @cached_property
    def table(self) -> StoredTable:
        """The stored table, made when it is first asked for: most stores never need every system table."""
        return StoredTable(self._root, self._contract.name, self._contract.arrow)

    def refresh(self) -> int:
        """Read what was committed since the last refresh; return a number that is another after every commit."""
        with self._lock:
            self._refresh()
            return self._version or 0

    def add_records(self, records: Sequence[Any]) -> None:
        """Add records of this or another store as they are, those of one run in one commit."""
        for run in dict.fromkeys(record.run for record in records):
            self._append([self._row(record) for record in records if record.run == run], run)

    def _append(self, rows: Sequence[Mapping[str, Any]], run: str) -> None:
        """Add rows of one run in one commit."""
        self.table.append(pa.Table.from_pylist(list(rows), self._contract.arrow).drop_columns(["run"]), run)

    def _refresh(self) -> None:
        """Read the files added since the last refresh; rows that were merged into another file may come once more."""
        if "table" not in vars(self) and not self._root.exists(f"tables/{self._contract.name}"):
            return  # no table is made only to be read
        paths, version = self.table.new_files(self._version)
        for path in paths:
            if path not in self._read_files:
                run = path.split("/")[0].removeprefix("run=")
                for row in self.table.read(path).to_pylist():
                    self._add_row({**row, "run": run, "at": row["at"].astimezone(UTC)})
                self._read_files.add(path)
        self._version = version

    def _row(self, record: Any) -> Mapping[str, Any]:
        """Return a record as a row of the table."""
        return dict(vars(record))

    def _add_row(self, row: dict[str, Any]) -> None:
        """Take one row into memory; a row may come more than once."""
        raise AssertionError("each system table has rows of its own kind")
