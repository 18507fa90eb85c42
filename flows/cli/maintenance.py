"""Commands that keep a store in order: maintain, gc and repair."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Annotated, Any

from configs.store import default_store
from flows.cli.arguments import Count, DryRun, Json, Number, StoreOption, option
from flows.reporting.formats import console, grid, size
from flows.reporting.panel import printable
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
    Damage,
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
    expired, done = maintain_tables(root, retention_hours, retain, force, dry_run, trust_ledger)
    if as_json:
        print(json.dumps(describe_maintenance(expired, done, dry_run), sort_keys=True))
    else:
        _print_maintenance(expired, done, dry_run, retention_hours)
    return 0


def _print_maintenance(
    expired: Sequence[ExpiryReport], done: MaintenanceReport, dry_run: bool, retention_hours: float
) -> None:
    out = console()
    for each in expired:
        what = f"{each.slices} slices, {each.files} files, {size(each.bytes)}"
        out.print(f"{each.table}: rows older than {each.hours} h {'would go' if dry_run else 'went'}: {what}")
    rows = [
        (each.table, each.merged, each.deleted, size(each.bytes_before), size(each.bytes_after)) for each in done.tables
    ]
    before, after = (sum(getattr(each, name) for each in done.tables) for name in ("bytes_before", "bytes_after"))
    rows.append(("together", done.merged, done.deleted, size(before), size(after)))
    out.print(grid(("table", "files merged", "deleted", "before", "after"), rows))
    if done.merged and retention_hours:
        out.print(f"merged files stay beside the new ones for {retention_hours:g} h; later calls delete them")
    for path in done.only_copies:
        out.print(f"kept, although old: the only copy of its rows: {path}")
    if done.policies:
        verb = "would be" if dry_run else "were"
        out.print(f"weights that no ledger row names {verb} removed: {', '.join(done.policies)}")
    if dry_run:
        out.print("dry run: nothing was changed")


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
    going = choose_removal(root, keep, keep_last, remove, force, policies, trust_ledger)
    if not as_json:
        _print_removal(root, going)
    if dry_run:
        _print_end(going, RemovalReport(), as_json, "dry run: nothing was changed")
        return 0
    if going.empty:
        # A removal that was cut off took its ledger rows first: what they named is still there to be swept.
        _print_end(going, finish_removals(root), as_json, "nothing to remove")
        return 0
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise StoreError("there is no terminal to ask on", "", "nothing was removed", "say --yes, or --dry-run")
        if input("Remove this for good? [y/N] ").strip().lower() not in ("y", "yes"):
            _print_end(going, RemovalReport(), as_json, "nothing was changed")
            return 1
    _print_end(going, remove_planned(root, going), as_json, "removed")
    return 0


def _print_end(going: Plan, swept: RemovalReport, as_json: bool, otherwise: str) -> None:
    """Print what was removed, or `otherwise` where that is nothing."""
    if as_json:
        print(json.dumps(describe_removal(going, swept), sort_keys=True))
    elif swept.rows or swept.slices or swept.policies:
        weights = f"the weights of {swept.policies} policies ({size(swept.policy_bytes)})"
        slices = f"{swept.slices} slices in {swept.files} files ({size(swept.bytes)})"
        console().print(f"removed {swept.rows} ledger rows, {slices} and {weights}")
    else:
        console().print(otherwise)


def _print_removal(store: Store, going: Plan) -> None:
    out = console()
    # Runs that were asked for and stay all the same, each with the reason.
    reasons = dict(going.protected)
    rows = []
    for run in (*going.removed, *going.kept, *reasons):
        entries = [entry for entry in going.rows if entry.run == run]
        staying = sum(entry.run == run for entry in going.staying)
        what = "remove" if run in going.removed else f"keep: {reasons[run]}" if run in reasons else "keep"
        rows.append((run, what, len(entries), staying))
    out.print(grid(("run", "", "ledger rows to go", "stay for other runs"), rows))
    out.print(f"slices that nobody names then: {len(going.slices)}, {size(going.slice_bytes)} as written")
    weights = f"{len(going.policies)} policies of removed runs, {len(going.pruned)} of kept runs"
    out.print(f"weights to go: {weights}, {size(going.policy_bytes)} together")
    for run in (*going.kept, *reasons):
        if versions := _versions(store, run, going.pruned):
            out.print(f"{run}: weights of versions {versions} go; their rows stay, nothing starts from them any more")


def _versions(store: Store, run: str, keys: Sequence[str]) -> str:
    """Return the versions of a run's policies as ranges: 1-4, 6."""
    made = [entry for entry in store.ledger.entries(run=run) if entry.key in keys and entry.slices("policies")]
    # Version minus place is the same all along a run of consecutive versions: that is what groups them.
    numbers = enumerate(sorted(entry.step + 1 for entry in made if "policy" in entry.inputs))
    grouped = groupby(numbers, key=lambda pair: pair[1] - pair[0])
    ranges = [[number for _, number in group] for _, group in grouped]
    return ", ".join(f"{each[0]}-{each[-1]}" if len(each) > 1 else str(each[0]) for each in ranges)


PRINTED = 20
"""Damaged slices that are printed one by one."""


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
    store_root = open_root(store or default_store())
    if not store_root.exists(FORMAT):
        raise StoreError(
            "there is no store here", store_root.address, "nothing was touched", "name the store to repair"
        )
    broken = inspect_logs(store_root)
    mended, left = ([], broken) if dry_run else (repair_logs(store_root, broken), [])
    damages: list[Damage] = []
    forgetting = ForgetPlan((), (), ())
    ledger = LedgerRepair()
    if not left:  # what the ledger names cannot be known while its log is broken
        root = open_store(store or default_store())
        if unreadable := damaged_files(root, SYSTEM):
            what = "\n".join(["files of system tables are damaged; no other file says what was in them:", *unreadable])
            safe = "everything else; nothing that these files may name is removed"
            raise StoreError(what, root.root.address, safe, "put each of them back from a copy, then repair again")
        lacking = inspect_tables(root)
        if dry_run:
            left = lacking
        else:
            mended = [*mended, *repair_tables(root, lacking)]
        ledger = _repair_ledger(root, deep and not dry_run)
        damages = [*inspect_slices(root, deep), *inspect_policies(root, deep)]
        forgetting = plan_forget(root, damages, REPEATABLE)
        if forget and not dry_run and forgetting.rows:
            if busy := at_work(root):
                what = f"{', '.join(busy)} may be at work on what would be forgotten"
                raise StoreError(what, root.root.address, "nothing was forgotten", "wait for the runs to end")
            if not trust_ledger:
                require_consistency(root)
            forget_work(root, forgetting)
    if as_json:
        print(json.dumps(describe_damage(mended, left, damages, forgetting, ledger), sort_keys=True))
    else:
        _print_repair(mended, left, damages, forgetting, ledger, forget and not dry_run)
    # What was forgotten is done again by the next resume; what is lost stays wrong.
    wrong = left or ledger.unmended or (damages if dry_run or not forget else forgetting.lost)
    return 1 if wrong else 0


@dataclass(frozen=True)
class LedgerRepair:
    """What contradicted the ledger, how many rows of it were rebuilt by run, and what is still wrong."""

    lost: Sequence[str] = ()
    rebuilt: Mapping[str, int] = field(default_factory=dict)
    unmended: Sequence[str] = ()


def _repair_ledger(store: Store, rebuild: bool) -> LedgerRepair:
    """Compare runs and files with the ledger; with `rebuild`, rebuild the rows that were lost."""
    lost = [*contradictions(store), *unnamed_majorities(store, 0.0)]
    if not (lost and rebuild):
        return LedgerRepair(lost, unmended=lost)
    from flows.replays.rebuild import rebuild_ledger  # imports what runs import

    rebuilt = rebuild_ledger(store)
    return LedgerRepair(lost, rebuilt.rows, [*contradictions(store), *rebuilt.unproved])


def describe_damage(
    mended: Sequence[RepairedLog],
    left: Sequence[LogDamage],
    damages: Sequence[Damage],
    forgetting: ForgetPlan,
    ledger: LedgerRepair,
) -> dict[str, Any]:
    """Return what was found and done as plain values."""
    return {
        "ledger": asdict(ledger),
        "logs": [{**vars(each.damage), "quarantine": each.quarantine, "restored": each.restored} for each in mended],
        "logs_left": [vars(each) for each in left],
        "damaged": [_row(each, forgetting) for each in damages],
    }


def _row(damage: Damage, forgetting: ForgetPlan) -> dict[str, Any]:
    return {
        "runs": sorted({entry.run for entry in damage.entries}),
        "step": damage.entries[0].step,
        "stage": damage.stage,
        "table": damage.table if damage.piece else "weights",
        "key": damage.key,
        "what": damage.what,
        "lost": damage in forgetting.lost,
    }


def _print_repair(
    mended: Sequence[RepairedLog],
    left: Sequence[LogDamage],
    damages: Sequence[Damage],
    forgetting: ForgetPlan,
    ledger: LedgerRepair,
    forgotten: bool,
) -> None:
    out = console()
    for each in mended:
        out.print(_log_line(each.damage))
        if each.removed_again:
            out.print(f"  removed again: {each.removed_again} rows of runs that gc had removed with their files")
        if each.quarantine:
            out.print(f"  moved aside, not deleted: {len(each.damage.files)} files, to {each.quarantine}")
        else:
            out.print(f"  put back: {len(each.restored)} files")
        if each.damage.lost_versions:
            version = each.damage.lost_versions[0] - 1
            out.print(f"  the table is at version {version}; put back: {len(each.restored)} files")
    for damage in left:
        out.print(_log_line(damage))
    _print_ledger(ledger)
    rows = [_row(damage, forgetting) for damage in damages]
    for row in rows[:PRINTED]:
        where = f"{', '.join(row['runs'])}, step {row['step']}, {row['stage']}, {row['table']}"
        out.print(printable(f"{where}: {row['what']}"))
        out.print(f"  {_advice(row, forgotten)}")
    if len(rows) > PRINTED:
        out.print(f"and {len(rows) - PRINTED} more; --json lists all")
    if not (mended or left or rows or ledger.lost):
        out.print("nothing is wrong")
    if left:
        out.print("dry run: nothing was changed; damaged work is looked for when all logs can be read")


def _print_ledger(ledger: LedgerRepair) -> None:
    out = console()
    for line in ledger.lost:
        out.print(printable(f"lost rows: {line}"))
    for run, num_rows in ledger.rebuilt.items():
        out.print(printable(f"  rebuilt from the files of the tables: {num_rows} rows of the ledger of run {run!r}"))
    if ledger.lost and ledger.unmended == ledger.lost:
        out.print(
            "  put tables/ledger, tables/runs and heads/ back from a copy, or run `stagecoach repair --deep`, which "
            "rebuilds rows of the ledger from the files of the tables"
        )
        return
    for line in ledger.unmended:
        out.print(printable(f"not rebuilt: {line}"))


def _log_line(damage: LogDamage) -> str:
    return f"log of table {damage.table!r}: {'; '.join(damage.what)}"


def _advice(row: dict[str, Any], forgotten: bool) -> str:
    if row["lost"]:
        return (
            "lost: other work was made of it, and doing it again would give other rows; put the file back from a copy"
        )
    if forgotten:
        return "forgotten: resume the run, and it is done again"
    return "can be done again: `stagecoach repair --forget`, then resume the run"
