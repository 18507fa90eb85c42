"""Housekeeping: compact tables, delete what nobody needs, drop rows that are older than their table keeps rows."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from configs.run import RunConfig
from flows.views.printing import bytes_text, console, grid
from flows.views.readers import readers
from storage.errors import StoreError
from storage.frames import existing_store
from storage.keeping.activity import at_work
from storage.keeping.maintenance import RETENTION_HOURS, Housekeeping, maintain
from storage.keeping.retention import Expired, Retention, expire
from storage.store import Store


def main(
    store: str = "",
    retention_hours: float = RETENTION_HOURS,
    retain: Sequence[str] = (),
    force: bool = False,
    dry_run: bool = False,
    as_json: bool = False,
) -> int:
    """Keep the store in order and print what was done; return the exit status."""
    root = existing_store(store or RunConfig().store)
    expired, done = keep_house(root, retention_hours, retain, force, dry_run)
    if as_json:
        print(json.dumps(described(expired, done, dry_run), sort_keys=True))
    else:
        _print(expired, done, dry_run)
    return 0


def keep_house(
    store: Store, retention_hours: float, retain: Sequence[str], force: bool, dry_run: bool
) -> tuple[list[Expired], Housekeeping]:
    """Drop what is past its retention, then do the housekeeping; return what was done.

    Raises StoreError where a table that later stages read is to lose rows without `force`, or while a run may be at
    work.
    """
    retentions = [Retention.parse(text) for text in retain]
    for each in retentions:
        _check(store, each, force)
    expired = [expire(store, each, dry_run) for each in retentions]
    return expired, maintain(store, retention_hours, dry_run)


def described(expired: Sequence[Expired], done: Housekeeping, dry_run: bool) -> dict[str, Any]:
    """Return what was done as plain values."""
    totals = {"merged": done.merged, "deleted": done.deleted, "only_copies": list(done.only_copies)}
    return {**asdict(done), **totals, "expired": [asdict(each) for each in expired], "dry_run": dry_run}


def _check(store: Store, retention: Retention, force: bool) -> None:
    needed = readers(retention.table)
    if not needed:
        return
    safe = "nothing was dropped"
    what = f"rows of {retention.table!r} are read again by: {', '.join(needed)}"
    if not force:
        do = "a replay from there would end with SliceExpired; say --force if nobody will want one"
        raise StoreError(what, store.root.address, safe, do)
    if busy := at_work(store):
        raise StoreError(f"{what}; and {', '.join(busy)} may be at work", store.root.address, safe, "wait for them")


def _print(expired: Sequence[Expired], done: Housekeeping, dry_run: bool) -> None:
    out = console()
    for each in expired:
        told = f"{each.slices} slices, {each.files} files, {bytes_text(each.bytes)}"
        out.print(f"{each.table}: rows older than {each.hours} h {'would go' if dry_run else 'went'}: {told}")
    rows = [
        (each.table, each.merged, each.deleted, bytes_text(each.bytes_before), bytes_text(each.bytes_after))
        for each in done.tables
    ]
    before, after = (sum(getattr(each, name) for each in done.tables) for name in ("bytes_before", "bytes_after"))
    rows.append(("together", done.merged, done.deleted, bytes_text(before), bytes_text(after)))
    out.print(grid(("table", "files merged", "deleted", "before", "after"), rows))
    for path in done.only_copies:
        out.print(f"kept, although old: the only copy of its rows: {path}")
    if done.policies:
        told = "would be removed" if dry_run else "were removed"
        out.print(f"weights that no ledger row names {told}: {', '.join(done.policies)}")
    if dry_run:
        out.print("dry run: nothing was changed")
