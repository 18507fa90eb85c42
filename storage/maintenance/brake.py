"""The brake of maintain, gc and repair: nothing is deleted where runs or files contradict the ledger.

A ledger that was lost and begins anew names nothing: to whatever deletes what the ledger does not name, every file of
the store is waste.
"""

from collections import Counter

from storage.errors import StoreError
from storage.maintenance.sweep import orphaned_files, orphaned_policies, removal_records
from storage.records import REMOVED
from storage.store import Store

MIN_FILES = 8
"""Files without a row of the ledger that one attempt which died may have left; fewer are no sign of a lost row."""


def contradictions(store: Store, hours: float | None = None) -> list[str]:
    """Return a line for each run whose events, or whose files, say that the ledger or the table runs lost rows.

    With `hours`, the age of what a maintenance would delete, also a line for each table, and for the policies, of which
    the ledger does not name more than half.
    """
    tables = [store.slices.table(name) for name in store.table_names(system=False)]
    num_rows = Counter(entry.run for entry in store.ledger.entries())
    num_files = Counter(file.run for table in tables for file in table.active_files())
    being_removed = {run for record in removal_records(store).values() for run in record.get("runs", ())}
    lines = []
    for run in sorted({*store.runs.names(), *num_rows, *num_files} - being_removed):
        last = store.runs.last_event(run)
        if num_rows[run] and not last:
            lines.append(f"the ledger has {num_rows[run]} rows of run {run!r}, the table runs has no event of it")
        elif not num_rows[run] and last != REMOVED and (last == "finished" or num_files[run] >= MIN_FILES):
            what = "finished" if last == "finished" else f"has {num_files[run]} files in the tables"
            lines.append(f"run {run!r} {what}, the ledger has no row of it")
    if hours is None:
        return lines
    counts = [
        (f"files of table {table.name!r}", len(orphaned_files(store, table, hours)), len(table.active_files()))
        for table in tables
    ]
    counts.append(("policies", len(orphaned_policies(store, hours)), len(store.policies.names())))
    return lines + [
        f"the ledger does not name {num_orphans} of {total} {what}"
        for what, num_orphans, total in counts
        if num_orphans >= MIN_FILES and num_orphans * 2 > total
    ]


def require_consistency(store: Store, hours: float | None = None) -> None:
    """Raise StoreError where runs or files contradict the ledger; see `contradictions`."""
    if lines := contradictions(store, hours):
        raise StoreError(
            "\n".join(["runs and files contradict the ledger:", *lines]),
            store.root.address,
            "nothing was deleted",
            "put tables/ledger, tables/runs and heads/ back from a copy, or run `stagecoach repair --deep`, which "
            "rebuilds rows of the ledger from the files; --trust-ledger deletes all the same",
        )
