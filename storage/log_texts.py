"""The texts of a table's log, one of each version. They never change, so those read last are kept in memory."""

from storage.errors import StoreUnavailable, border
from storage.roots import Root

KEPT_LOGS = 64
"""Versions of the log that are kept in memory once read."""


class LogTexts:
    """The log of one table as texts by version; for one thread at a time, as the table's lock sees to."""

    def __init__(self, root: Root, name: str, place: str) -> None:
        """`place` is the table's directory below `root`; `name` is for errors."""
        self._root, self._name, self._place = root, name, place
        self._kept: dict[int, str] = {}

    def of(self, version: int) -> str:
        """Return the text of one version. Raises FileNotFoundError where it was pruned."""
        if version not in self._kept:
            self._kept[version] = self._root.read(f"{self._place}/_delta_log/{version:020d}.json").decode()
            for old in sorted(self._kept)[:-KEPT_LOGS]:
                del self._kept[old]
        return self._kept[version]

    def after(self, seen: int, newest: int) -> list[str] | None:
        """Return the texts of the versions after `seen` up to `newest`, oldest first; None where one was pruned."""
        try:
            with border(f"reading the log of table {self._name!r}", self._root.child(self._place)):
                return [self.of(version) for version in range(seen + 1, newest + 1)]
        except StoreUnavailable as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            return None
