"""The commands that keep a store in order: maintain, gc and repair."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any

from configs.store import default_store
from flows.cli.arguments import Count, DryRun, Json, Number, StoreOption, option
from flows.reporting.formats import console, grid, say, size
from flows.runtime.maintenance import (
    choose_removal,
    describe_maintenance,
    describe_removal,
    maintain_tables,
    remove_planned,
)
from storage.delta.log import LogDamage
from storage.errors import StoreError
from storage.maintenance.brake import contradictions, require_consistency, unnamed_majorities
from storage.maintenance.compact import RETENTION_HOURS, MaintenanceReport
from storage.maintenance.plan import Plan, at_work
from storage.maintenance.repair import (
    ForgetPlan,
    RepairedLog,
    inspect_logs,
    inspect_policies,
    inspect_slices,
    inspect_tables,
    plan_forget,
    repair_logs,
    repair_tables,
)
from storage.maintenance.repair import forget as forget_work
from storage.maintenance.sweep import ExpiryReport, RemovalReport, finish_removals
from storage.read.damage import SYSTEM, damaged_files
from storage.read.frames import existing_store
from storage.roots import open_root
from storage.store import FORMAT, Store, open_store
from tasks.stages import REPEATABLE

Runs = tuple[str, ...]
TrustLedger = Annotated[bool, option("delete also where runs or files contradict the ledger")]
MAX_DAMAGES = 20
"""Damaged slices that are printed."""
DRY_RUN = "dry run: nothing was changed"


def maintain(
    *,
    retention_hours: Annotated[Number, option("delete unused files that are older than this")] = float(RETENTION_HOURS),
    retain: Annotated[Runs, option("drop rows of a table that are older than this", "TABLE=30d")] = (),
    force: Annotated[bool, option("drop rows also from tables that later stages read")] = False,
    trust_ledger: TrustLedger = False,
    dry_run: DryRun = False,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Compact tables, delete unused files, and print both."""
    root = existing_store(store or default_store())
    expired, report = maintain_tables(root, retention_hours, retain, force, dry_run, trust_ledger)
    if as_json:
        print(json.dumps(describe_maintenance(expired, report, dry_run), sort_keys=True))
    else:
        _print_maintenance(expired, report, dry_run, retention_hours)
    return 0


def _print_maintenance(
    expired: Sequence[ExpiryReport], report: MaintenanceReport, dry_run: bool, retention_hours: float
) -> None:
    for expiry in expired:
        amount = f"{expiry.slices} slices, {expiry.files} files, {size(expiry.bytes)}"
        say(f"{expiry.table}: rows older than {expiry.hours} h {'would go' if dry_run else 'went'}: {amount}")
    before, after = (sum(getattr(table, name) for table in report.tables) for name in ("bytes_before", "bytes_after"))
    total = ("together", report.merged, report.deleted, size(before), size(after))
    rows = [
        (table.table, table.merged, table.deleted, size(table.bytes_before), size(table.bytes_after))
        for table in report.tables
    ]
    console().print(grid(("table", "files merged", "deleted", "before", "after"), [*rows, total]))
    if report.merged and retention_hours:
        say(f"merged files stay beside the new ones for {retention_hours:g} h; later calls delete them")
    for path in report.only_copies:
        say(f"kept, although old: the only copy of its rows: {path}")
    if report.policies:
        verb = "would be" if dry_run else "were"
        say(f"weights that no ledger row names {verb} removed: {', '.join(report.policies)}")
    if dry_run:
        say(DRY_RUN)


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
    if as_json or not sys.stdin.isatty():
        raise StoreError("there is no terminal to ask on", "", "nothing was removed", "say --yes, or --dry-run")
    return input("Remove this for good? [y/N] ").strip().lower() in ("y", "yes")


def _print_removal(store: Store, plan: Plan) -> None:
    reasons = dict(plan.protected)
    actions = {run: "remove" for run in plan.removed} | dict.fromkeys(plan.kept, "keep")
    actions |= {run: f"keep: {reason}" for run, reason in reasons.items()}
    rows = [
        (run, action, *(sum(entry.run == run for entry in entries) for entries in (plan.rows, plan.staying)))
        for run, action in actions.items()
    ]
    console().print(grid(("run", "", "ledger rows to go", "stay for other runs"), rows))
    say(f"slices that nobody names then: {len(plan.slices)}, {size(plan.slice_bytes)} as written")
    weights = f"{len(plan.policies)} policies of removed runs, {len(plan.pruned)} of kept runs"
    say(f"weights to go: {weights}, {size(plan.policy_bytes)} together")
    for run in (*plan.kept, *reasons):
        if versions := _versions(store, run, plan.pruned):
            say(f"{run}: weights of versions {versions} go; their rows stay, nothing starts from them any more")


def _versions(store: Store, run: str, keys: Sequence[str]) -> str:
    """Return the versions of a run's policies as ranges: 1-4, 6."""
    entries = [entry for entry in store.ledger.entries(run=run) if entry.key in keys and entry.slices("policies")]
    # Version minus index is constant along consecutive versions.
    versions = enumerate(sorted(entry.step + 1 for entry in entries if "policy" in entry.inputs))
    ranges = [[version for _, version in group] for _, group in groupby(versions, key=lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{first}-{rest[-1]}" if rest else str(first) for first, *rest in ranges)


@dataclass
class RepairReport:
    """Damage of a store, and the repairs."""

    mended: list[RepairedLog] = field(default_factory=list)
    left: list[LogDamage] = field(default_factory=list)
    """Logs that are still damaged; the ledger cannot be read then."""
    lost: Sequence[str] = ()
    """Contradictions between the ledger and runs or files."""
    rebuilt: Mapping[str, int] = field(default_factory=dict)
    """Rows of the ledger that were rebuilt, by run."""
    unmended: Sequence[str] = ()
    """Contradictions that are left."""
    damages: list[dict[str, Any]] = field(default_factory=list)
    """Damaged outputs: runs, step, stage, table, key, problem, and whether they are lost."""

    def describe(self) -> dict[str, Any]:
        """Return the report as plain values."""
        logs = [{**vars(log.damage), "quarantine": log.quarantine, "restored": log.restored} for log in self.mended]
        ledger = {"lost": self.lost, "rebuilt": self.rebuilt, "unmended": self.unmended}
        return {"ledger": ledger, "logs": logs, "logs_left": [vars(log) for log in self.left], "damaged": self.damages}


def repair(
    *,
    deep: Annotated[bool, option("read every file and compare its digest")] = False,
    forget: Annotated[bool, option("forget damaged work that can be computed again")] = False,
    trust_ledger: TrustLedger = False,
    dry_run: DryRun = False,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Repair a store and print its damage; return 1 if damage is left, else 0.

    With `deep`, lost rows of the ledger are rebuilt. Raises StoreError without a store; with `forget`, while a run may
    be running or, without `trust_ledger`, if runs or files contradict the ledger.
    """
    address = store or default_store()
    root = open_root(address)
    if not root.exists(FORMAT):
        raise StoreError("there is no store here", root.address, "nothing was touched", "name the store to repair")
    forget = forget and not dry_run
    broken = inspect_logs(root)
    report = RepairReport(left=broken) if dry_run else RepairReport(repair_logs(root, broken))
    if not report.left:  # a broken log hides what the ledger names
        _repair_store(open_store(address), report, deep, forget, trust_ledger, dry_run)
    if as_json:
        print(json.dumps(report.describe(), sort_keys=True))
    else:
        for line in _repair_lines(report, forget):
            say(line)
    # The next resume computes forgotten work again; lost work stays lost.
    damaged = [damage for damage in report.damages if damage["lost"] or not forget]
    return 1 if report.left or report.unmended or damaged else 0


def _repair_store(
    store: Store, report: RepairReport, deep: bool, forget: bool, trust_ledger: bool, dry_run: bool
) -> None:
    if unreadable := damaged_files(store, SYSTEM):
        problem = "\n".join(["files of system tables are damaged; no other file says what was in them:", *unreadable])
        safe = "everything else; nothing that these files may name is removed"
        raise StoreError(problem, store.root.address, safe, "put each of them back from a copy, then repair again")
    incomplete = inspect_tables(store)
    if dry_run:
        report.left = incomplete
    else:
        report.mended += repair_tables(store, incomplete)
    report.lost = report.unmended = [*contradictions(store), *unnamed_majorities(store, 0.0)]
    if report.lost and deep and not dry_run:
        from flows.replays.rebuild import rebuild_ledger  # imports what runs import

        rebuilt = rebuild_ledger(store)
        report.rebuilt, report.unmended = rebuilt.rows, [*contradictions(store), *rebuilt.unproved]
    damages = [*inspect_slices(store, deep), *inspect_policies(store, deep)]
    plan = plan_forget(store, damages, REPEATABLE)
    report.damages = [
        {
            "runs": sorted({entry.run for entry in damage.entries}),
            "step": damage.entries[0].step,
            "stage": damage.stage,
            "table": damage.table if damage.piece else "weights",
            "key": damage.key,
            "what": damage.what,
            "lost": damage in plan.lost,
        }
        for damage in damages
    ]
    if forget and plan.rows:
        _forget(store, plan, trust_ledger)


def _forget(store: Store, plan: ForgetPlan, trust_ledger: bool) -> None:
    if busy := at_work(store):
        problem = f"{', '.join(busy)} may be at work on what would be forgotten"
        raise StoreError(problem, store.root.address, "nothing was forgotten", "wait for the runs to end")
    if not trust_ledger:
        require_consistency(store)
    forget_work(store, plan)


def _repair_lines(report: RepairReport, forgotten: bool) -> Iterator[str]:
    for log in report.mended:
        yield _log_line(log.damage)
        if log.removed_again:
            yield f"  removed again: {log.removed_again} rows of runs that gc had removed with their files"
        if log.quarantine:
            yield f"  moved aside, not deleted: {len(log.damage.files)} files, to {log.quarantine}"
        if log.damage.lost_versions:
            yield f"  the table is at version {log.damage.lost_versions[0] - 1}; put back: {len(log.restored)} files"
        elif not log.quarantine:
            yield f"  put back: {len(log.restored)} files"
    yield from map(_log_line, report.left)
    yield from (f"lost rows: {line}" for line in report.lost)
    for run, num_rows in report.rebuilt.items():
        yield f"  rebuilt from the files of the tables: {num_rows} rows of the ledger of run {run!r}"
    if report.lost and report.unmended == report.lost:
        yield (
            "  put tables/ledger, tables/runs and heads/ back from a copy, or run `stagecoach repair --deep`, which "
            "rebuilds rows of the ledger from the files of the tables"
        )
    else:
        yield from (f"not rebuilt: {line}" for line in report.unmended)
    for damage in report.damages[:MAX_DAMAGES]:
        where = f"{', '.join(damage['runs'])}, step {damage['step']}, {damage['stage']}, {damage['table']}"
        yield f"{where}: {damage['what']}"
        if damage["lost"]:
            yield (
                "  lost: other work was made of it, and doing it again would give other rows; put the file back from "
                "a copy"
            )
        elif forgotten:
            yield "  forgotten: resume the run, and it is done again"
        else:
            yield "  can be done again: `stagecoach repair --forget`, then resume the run"
    if len(report.damages) > MAX_DAMAGES:
        yield f"and {len(report.damages) - MAX_DAMAGES} more; --json lists all"
    if not (report.mended or report.left or report.damages or report.lost):
        yield "nothing is wrong"
    if report.left:
        yield "dry run: nothing was changed; damaged work is looked for when all logs can be read"


def _log_line(damage: LogDamage) -> str:
    return f"log of table {damage.table!r}: {'; '.join(damage.what)}"
