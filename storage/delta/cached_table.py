"""Books held in memory: the rows of one table, moved forward by what was added since the last look."""

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
    """One book; who builds on it says in `_take` what a row is, and holds `_lock` while it looks."""

    def __init__(self, root: Root, book: Table) -> None:
        self._root = root
        self._book = book
        self._lock = RLock()
        self._version: int | None = None
        self._known: set[str] = set()

    @cached_property
    def table(self) -> StoredTable:
        """The stored table, made when it is first asked for: most stores never need every book."""
        return StoredTable(self._root, self._book.name, self._book.arrow)

    def look(self) -> int:
        """Take in what was written since the last look; return a number that is another after every commit."""
        with self._lock:
            self._refresh()
            return self._version or 0

    def write_down(self, records: Sequence[Any]) -> None:
        """Write down records of another store as they are, those of one run in one commit."""
        for run in dict.fromkeys(record.run for record in records):
            self._append([self._row(record) for record in records if record.run == run], run)

    def _append(self, rows: Sequence[Mapping[str, Any]], run: str) -> None:
        """Write down rows of one run in one commit."""
        self.table.append(pa.Table.from_pylist(list(rows), self._book.arrow).drop_columns(["run"]), run)

    def _refresh(self) -> None:
        """Take what came since the last look; rows that were merged into another file may come once more."""
        if "table" not in vars(self) and not self._root.exists(f"tables/{self._book.name}"):
            return  # no table is made only to be read
        paths, version = self.table.added(self._version)
        for path in paths:
            if path not in self._known:
                run = path.split("/")[0].removeprefix("run=")
                for row in self.table.read(path).to_pylist():
                    self._take({**row, "run": run, "at": row["at"].astimezone(UTC)})
                self._known.add(path)
        self._version = version

    def _row(self, record: Any) -> Mapping[str, Any]:
        """Return a record as a row of the table."""
        return dict(vars(record))

    def _take(self, row: dict[str, Any]) -> None:
        """Take one row into memory."""
        raise AssertionError("each book has its own rows")
