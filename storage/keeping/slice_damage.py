"""Damage to what the ledger names: data files and weights that are missing, of another size, or of other content."""

from collections.abc import Iterable
from dataclasses import dataclass

from storage.errors import DamagedSlice, PolicyAbsent, StoreError
from storage.keeping.files import sizes
from storage.refs import Entry, Slice
from storage.store import Store


@dataclass(frozen=True)
class Damage:
    """One output of finished work that cannot be read, and every row of the ledger that names it."""

    entries: tuple[Entry, ...]
    table: str
    what: str
    piece: Slice | None = None
    """The slice; None where it is the weights of a policy."""

    @property
    def key(self) -> str:
        """The key of the work."""
        return self.entries[0].key

    @property
    def stage(self) -> str:
        """The stage of the work."""
        return self.entries[0].stage


def inspect_slices(store: Store, deep: bool = False) -> list[Damage]:
    """Look at every slice that the ledger names, by size, with `deep` by digest; those retired are left out.

    A slice whose files compaction has replaced is read from where its rows are now, in either case.
    """
    naming: dict[Slice, list[Entry]] = {}
    for entry in store.ledger.entries():
        for piece in entry.outputs:
            naming.setdefault(piece, []).append(entry)
    there = {name: sizes(store.root, f"tables/{name}") for name in {piece.table for piece in naming}}
    damages = []
    for piece in store.slices.retirements.without(naming):
        if what := _wrong(store, piece, there[piece.table], deep):
            damages.append(Damage(tuple(naming[piece]), piece.table, what, piece))
    return damages


def inspect_policies(store: Store, deep: bool = False) -> list[Damage]:
    """Look at the weights of every policy that the ledger names, by size, with `deep` by digest.

    Weights that were removed on purpose are not missing.
    """
    making: dict[str, list[Entry]] = {}
    for entry in store.ledger.entries():
        if entry.slices("policies"):
            making.setdefault(entry.key, []).append(entry)
    damages = []
    for key, entries in making.items():
        try:
            store.policies.directory(key, verify=deep)
        except (DamagedSlice, PolicyAbsent) as error:
            if isinstance(error, PolicyAbsent) and store.policies.removed(key):
                continue
            damages.append(Damage(tuple(entries), "policies", error.what))
    return damages


def descendants(store: Store, keys: Iterable[str]) -> list[Entry]:
    """The finished work that any of some keys went into, directly, in the order of the ledger."""
    wanted = {*keys}
    return [entry for entry in store.ledger.entries() if wanted & {*entry.inputs.values()}]


def _wrong(store: Store, piece: Slice, there: dict[str, int], deep: bool) -> str:
    paths = [(f"tables/{piece.table}/{file.path}", file.size) for file in piece.files]
    missing = [path for path, _ in paths if path not in there]
    for path, size in paths:
        if not missing and there[path] != size:
            return f"{path} has {there[path]} bytes instead of {size}"
    if not (missing or deep):
        return ""
    try:
        store.read([piece])
    except StoreError as error:
        return f"{missing[0]} is missing, and no compacted file holds its rows" if missing else error.what
    return ""
