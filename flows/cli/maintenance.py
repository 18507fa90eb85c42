"""The commands that keep a store small: maintain and gc."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from configs.store import default_store
from flows.cli.arguments import Count, DryRun, Json, Number, StoreOption, option
from flows.reporting.formats import console, grid, say, size

if TYPE_CHECKING:
    from storage.maintenance.compact import MaintenanceReport
    from storage.maintenance.plan import Plan
    from storage.maintenance.sweep import ExpiryReport
    from storage.store import Store

Runs = tuple[str, ...]
TrustLedger = Annotated[bool, option("delete also where runs or files contradict the ledger")]
DRY_RUN = "dry run: nothing was changed"


def maintain(
    *,
    retention_hours: Annotated[Number, option("delete unused files that are older than this")] = 168.0,
    retain: Annotated[Runs, option("drop rows of a table that are older than this", "TABLE=30d")] = (),
    force: Annotated[bool, option("drop rows also from tables that later stages read")] = False,
    trust_ledger: TrustLedger = False,
    dry_run: DryRun = False,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Compact tables, delete unused files, and print both."""
    from flows.runtime.maintenance import describe_maintenance, maintain_tables
    from storage.read.frames import existing_store

    root = existing_store(store or default_store())
    expired, report = maintain_tables(root, retention_hours, retain, force, dry_run, trust_ledger)
    if as_json:
        print(json.dumps(describe_maintenance(expired, report, dry_run), sort_keys=True))
        return 0
    _print_maintenance(expired, report, dry_run)
    if report.merged and retention_hours:
        say(f"merged files stay beside the new ones for {retention_hours:g} h; later calls delete them")
    if dry_run:
        say(DRY_RUN)
    return 0


def _print_maintenance(expired: "Sequence[ExpiryReport]", report: "MaintenanceReport", dry_run: bool) -> None:
    for expiry in expired:
        amount = f"{expiry.slices} slices, {expiry.files} files, {size(expiry.bytes)}"
        say(f"{expiry.table}: rows older than {expiry.hours} h {'would go' if dry_run else 'went'}: {amount}")
    before, after = (sum(getattr(table, name) for table in report.tables) for name in ("bytes_before", "bytes_after"))
    rows = [(row.table, row.merged, row.deleted, row.bytes_before, row.bytes_after) for row in report.tables]
    rows.append(("together", report.merged, report.deleted, before, after))
    cells = [(name, merged, deleted, size(before), size(after)) for name, merged, deleted, before, after in rows]
    console().print(grid(("table", "files merged", "deleted", "before", "after"), cells))
    for path in report.only_copies:
        say(f"kept, although old: the only copy of its rows: {path}")
    if report.policies:
        verb = "would be" if dry_run else "were"
        say(f"weights that no ledger row names {verb} removed: {', '.join(report.policies)}")


def gc(
    *,
    keep: Annotated[Runs, option("keep this run, remove all others", "RUN")] = (),
    keep_last: Annotated[Count, option("keep the N newest runs as well", "N")] = 0,
    remove: Annotated[Runs, option("remove this run, keep all others", "RUN")] = (),
    force: Annotated[Runs, option("remove this run even if it is not finished", "RUN")] = (),
    policies: Annotated[str, option("weights that kept runs keep: all, last:N, or every:N and the last")] = "all",
    trust_ledger: TrustLedger = False,
    yes: Annotated[bool, option("do not ask")] = False,
    dry_run: DryRun = False,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print the runs and files to remove, ask, and remove them; return 1 if the answer was no, else 0."""
    from flows.runtime.maintenance import choose_removal, describe_removal, remove_planned
    from storage.maintenance.sweep import RemovalReport, finish_removals
    from storage.read.frames import existing_store

    root = existing_store(store or default_store())
    plan = choose_removal(root, keep, keep_last, remove, force, policies, trust_ledger)
    if not as_json:
        _print_removal(root, plan)
    removed, message, status = RemovalReport(), DRY_RUN, 0
    if not dry_run:
        if plan.empty:
            # An interrupted removal deleted its ledger rows first: the files that they named are swept now.
            removed, message = finish_removals(root), "nothing to remove"
        elif yes or _confirm(as_json):
            removed, message = remove_planned(root, plan), "removed"
        else:
            message, status = "nothing was changed", 1
    if as_json:
        print(json.dumps(describe_removal(plan, removed), sort_keys=True))
    elif removed.rows or removed.slices or removed.policies:
        weights = f"the weights of {removed.policies} policies ({size(removed.policy_bytes)})"
        slices = f"{removed.slices} slices in {removed.files} files ({size(removed.bytes)})"
        say(f"removed {removed.rows} ledger rows, {slices} and {weights}")
    else:
        say(message)
    return status


def _confirm(as_json: bool) -> bool:
    from storage.errors import StoreError

    if as_json or not sys.stdin.isatty():
        raise StoreError("there is no terminal to ask on", "", "nothing was removed", "say --yes, or --dry-run")
    return input("Remove this for good? [y/N] ").strip().lower() in ("y", "yes")


def _print_removal(store: "Store", plan: "Plan") -> None:
    from flows.queries.compare_summary import ranges

    actions = dict.fromkeys(plan.removed, "remove") | dict.fromkeys(plan.kept, "keep")
    actions |= {run: f"keep: {reason}" for run, reason in plan.protected}
    rows = [
        (run, action, *(sum(entry.run == run for entry in entries) for entries in (plan.rows, plan.staying)))
        for run, action in actions.items()
    ]
    console().print(grid(("run", "", "ledger rows to go", "stay for other runs"), rows))
    say(f"slices that nobody names then: {len(plan.slices)}, {size(plan.slice_bytes)} as written")
    weights = f"{len(plan.policies)} policies of removed runs, {len(plan.pruned)} of kept runs"
    say(f"weights to go: {weights}, {size(plan.policy_bytes)} together")
    for run in actions:
        entries = (entry for entry in store.ledger.entries(run=run) if entry.key in plan.pruned)
        # A policy that starts from another one is of the version after its step.
        versions = sorted(entry.step + 1 for entry in entries if entry.slices("policies") and "policy" in entry.inputs)
        if versions and run not in plan.removed:
            say(f"{run}: weights of versions {ranges(versions)} go; their rows stay, nothing starts from them any more")
