"""What a table holds at the version seen last: read through the library once, then moved forward by the log's actions.

The library goes through its whole snapshot at every look and every commit; what is new in the log says the same.
"""

from collections.abc import Mapping, Sequence

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from storage.delta.log import Action, ActiveFile, Log, numbers_of


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
