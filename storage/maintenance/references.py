"""References: the slices and policies that rows of the ledger name, gathered once for what maintenance decides."""

from collections.abc import Iterable

from storage.refs import Entry, Slice
from storage.store import Store


class References:
    """What some rows of the ledger, or all of them, name: of one table if `table` is given, else of all."""

    def __init__(self, store: Store, entries: Iterable[Entry] | None = None, table: str = "") -> None:
        self.entries = list(store.ledger.entries() if entries is None else entries)
        self.keys = {entry.key for entry in self.entries}
        self.slices: dict[Slice, list[Entry]] = {}
        """The rows that name each slice, in the order of the ledger."""
        self.policies: dict[str, list[Entry]] = {}
        """The rows of the work that made each policy, by its key."""
        for entry in self.entries:
            for piece in entry.slices(table) if table else entry.outputs:
                self.slices.setdefault(piece, []).append(entry)
            if entry.slices("policies"):
                self.policies.setdefault(entry.key, []).append(entry)
        self._expired = store.slices.expired_slices

    def tables(self) -> list[str]:
        """The tables of which slices are named, sorted."""
        return sorted({piece.table for piece in self.slices})

    def live_slices(self, table: str = "") -> list[Slice]:
        """The slices that are named and did not expire, of one table where it is named."""
        return self._expired.exclude(piece for piece in self.slices if table in ("", piece.table))
