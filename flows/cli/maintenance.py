"""The commands that keep a store small and whole: maintain, gc and repair."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from configs.store import default_store
from flows.cli.arguments import Count, DryRun, Json, Number, StoreOption, option
from flows.cli.output import print_report
from flows.reporting.formats import say

if TYPE_CHECKING:
    from storage.maintenance.repair import ForgetPlan
    from storage.store import Store

Runs = tuple[str, ...]
TrustLedger = Annotated[bool, option("delete also where runs or files contradict the ledger")]
REPORT = ("repaired_logs", "damaged_logs", "lost_rows", "rebuilt", "not_rebuilt", "damaged")
"""The lists that `repair` reports."""
LEDGER_ADVICE = (
    "put tables/ledger, tables/runs and heads/ back from a copy, or run `stagecoach repair --deep`, which rebuilds "
    "rows of the ledger from the files of the tables"
)
DAMAGE_ADVICE = (
    "damaged work that is not lost is computed again: `stagecoach repair --forget`, then resume the run; of lost work "
    "other work was made, so put its file back from a copy"
)


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
    from flows.runtime.maintenance import maintain_tables
    from storage.read.frames import existing_store

    root = existing_store(store or default_store())
    report = maintain_tables(root, retention_hours, retain, force, dry_run, trust_ledger)
    print_report(report, as_json)
    if report["merged"] and retention_hours and not as_json:
        say(f"merged files stay beside the new ones for {retention_hours:g} h; later calls delete them")
    return 0


def gc(
    *,
    keep: Annotated[Runs, option("keep this run, remove all others", "RUN")] = (),
    keep_last: Annotated[Count, option("keep the N newest runs as well", "N")] = 0,
    remove: Annotated[Runs, option("remove this run, keep all others", "RUN")] = (),
    force: Annotated[Runs, option("remove this run even if it is not finished", "RUN")] = (),
    policies: Annotated[str, option("weights that kept runs keep: all, last:N, or every:N and the last")] = "all",
    trust_ledger: TrustLedger = False,
    yes: Annotated[bool, option("remove them; without it, only print what would be removed")] = False,
    dry_run: DryRun = False,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print the runs and files to remove; with `yes`, remove them. Without it nothing is removed."""
    from flows.runtime.maintenance import choose_removal, describe_removal, remove_planned
    from storage.maintenance.sweep import RemovalReport, removal_records
    from storage.read.frames import existing_store

    root = existing_store(store or default_store())
    plan = choose_removal(root, keep, keep_last, remove, force, policies, trust_ledger)
    # An interrupted removal deleted its ledger rows first; the next one removes the files that they named.
    unfinished = len(removal_records(root))
    removed = remove_planned(root, plan) if yes and not dry_run else RemovalReport()
    print_report(describe_removal(plan, removed) | {"unfinished_removals": unfinished}, as_json)
    if not as_json and (dry_run or not yes):
        say(f"nothing was removed{'' if plan.empty and not unfinished else '; --yes removes it for good'}")
    return 0


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
    forget = forget and not dry_run
    report = _repair(store or default_store(), deep, forget, trust_ledger, dry_run)
    left = any(damage["lost"] or not forget for damage in report["damaged"])  # a resumed run computes forgotten work
    print_report(report, as_json)
    if not as_json:
        if report["not_rebuilt"] == report["lost_rows"] != []:
            say(LEDGER_ADVICE)
        if left:
            say(DAMAGE_ADVICE)
        if report["damaged_logs"]:
            say("nothing was changed; damaged work is read when the logs are repaired")
        if not any(report.values()):
            say("nothing is wrong")
    return 1 if report["damaged_logs"] or report["not_rebuilt"] or left else 0


def _repair(address: str, deep: bool, forget: bool, trust_ledger: bool, dry_run: bool) -> dict[str, list[Any]]:
    """Return what was repaired and what is damaged, each as a list of plain values."""
    from storage.errors import StoreError
    from storage.maintenance.repair import inspect_logs, inspect_tables, repair_logs, repair_tables
    from storage.read.damage import SYSTEM, damaged_files
    from storage.roots import open_root
    from storage.store import FORMAT, open_store

    root = open_root(address)
    if not root.exists(FORMAT):
        raise StoreError("there is no store here", root.address, "nothing was touched", "name the store to repair")
    logs = inspect_logs(root)
    if logs and dry_run:  # a broken log hides what the ledger names
        return {key: list[Any]() for key in REPORT} | {"damaged_logs": list(map(vars, logs))}
    repaired = repair_logs(root, logs)
    store = open_store(address)
    if unreadable := damaged_files(store, SYSTEM):
        problem = "\n".join(["files of system tables are damaged; no other file says what was in them:", *unreadable])
        safe = "everything else; nothing that these files may name is removed"
        raise StoreError(problem, root.address, safe, "put each of them back from a copy, then repair again")
    tables = inspect_tables(store)
    if not dry_run:
        repaired, tables = [*repaired, *repair_tables(store, tables)], []
    lost, rebuilt, not_rebuilt = _repair_ledger(store, deep and not dry_run)
    return {
        "repaired_logs": list(map(asdict, repaired)),
        "damaged_logs": list(map(vars, tables)),
        "lost_rows": lost,
        "rebuilt": rebuilt,
        "not_rebuilt": not_rebuilt,
        "damaged": _damage_rows(store, deep, forget, trust_ledger),
    }


def _repair_ledger(store: "Store", rebuild: bool) -> tuple[list[str], list[str], list[str]]:
    """Return contradictions between the ledger and runs or files, the rows that were rebuilt, and what was not."""
    from storage.maintenance.brake import contradictions

    lost = contradictions(store, hours=0.0)
    if not lost or not rebuild:
        return lost, [], lost
    from flows.replays.rebuild import rebuild_ledger  # imports what runs import

    rebuilt = rebuild_ledger(store)
    rows = [f"{num_rows} rows of the ledger of run {run!r}" for run, num_rows in rebuilt.rows.items()]
    return lost, rows, [*contradictions(store), *rebuilt.unproved]


def _damage_rows(store: "Store", deep: bool, forget: bool, trust_ledger: bool) -> list[dict[str, Any]]:
    """Return damaged work, and whether it is lost; with `forget`, work that can be computed again is forgotten."""
    from storage.maintenance.repair import inspect_policies, inspect_slices, plan_forget
    from tasks.stages import REPEATABLE

    damages = [*inspect_slices(store, deep), *inspect_policies(store, deep)]
    plan = plan_forget(store, damages, REPEATABLE)
    if forget and plan.rows:
        _forget(store, plan, trust_ledger)
    return [
        {
            "runs": sorted({entry.run for entry in damage.entries}),
            "step": damage.entries[0].step,
            "stage": damage.stage,
            "table": damage.table if damage.piece else "weights",
            "key": damage.key,
            "lost": damage in plan.lost,
            "what": damage.what,
        }
        for damage in damages
    ]


def _forget(store: "Store", plan: "ForgetPlan", trust_ledger: bool) -> None:
    from storage.errors import StoreError
    from storage.maintenance.brake import require_consistency
    from storage.maintenance.plan import at_work
    from storage.maintenance.repair import forget

    if busy := at_work(store):
        problem = f"{', '.join(busy)} may be at work on what would be forgotten"
        raise StoreError(problem, store.root.address, "nothing was forgotten", "wait for the runs to end")
    if not trust_ledger:
        require_consistency(store)
    forget(store, plan)
