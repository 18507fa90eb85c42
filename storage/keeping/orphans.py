"""Orphans: rows and weights of attempts that died before the ledger named them, when nobody can want them any more."""

from storage.keeping.activity import at_work
from storage.keeping.files import delete, older
from storage.keeping.sweeping import remove_weights
from storage.manifests import MANIFEST
from storage.store import Store
from storage.tables import Raced, StoredTable


def drop_orphans(store: Store, table: StoredTable, hours: float, dry_run: bool = False) -> list[str]:
    """Take files out of a stage table that only hold rows of attempts that no ledger row names; return their paths.

    Files younger than so many hours, and those of runs that may be at work, are left alone.
    """
    table.refresh()
    busy = at_work(store)
    old = {path.removeprefix(f"{table.place}/") for path in older(store.root, table.place, hours, ".parquet")}
    named = {(s.run, s.attempt) for entry in store.ledger.entries() for s in entry.slices(table.name)}
    found = [each for each in table.active() if each.path in old and each.run not in busy]
    alone = [each for each in found if each.first_attempt == each.last_attempt]
    orphans = [each for each in alone if (each.run, each.first_attempt) not in named]
    if not dry_run:
        for run in sorted({each.run for each in orphans}):
            try:
                table.replace([each for each in orphans if each.run == run], [], run)
            except Raced:
                return []  # someone else is at it
        for each in orphans:
            delete(store.root, f"{table.place}/{each.path}")
    return [each.path for each in orphans]


def orphaned_policies(store: Store, hours: float, dry_run: bool = False) -> list[str]:
    """Remove weights that were published for a ledger row that never came; return their keys.

    Those younger than so many hours are left alone, and all while any run may be at work.
    """
    if at_work(store):
        return []
    named = {entry.key for entry in store.ledger.entries()}
    old = set(older(store.root, "policies", hours, MANIFEST))
    keys = [key for key in store.policies.names() if key not in named and f"policies/{key}/{MANIFEST}" in old]
    for key in keys if not dry_run else ():
        remove_weights(store, key)
    return keys
