"""The command repair: damage of a store, what was repaired, and what can be computed again."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from configs.store import default_store
from flows.cli.arguments import DryRun, Json, StoreOption, option
from flows.cli.maintenance import TrustLedger
from flows.reporting.formats import say

if TYPE_CHECKING:
    from storage.maintenance.repair import ForgetPlan
    from storage.store import Store

Report = dict[str, Any]
MAX_DAMAGES = 20
"""Damaged slices that are printed."""


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
    if as_json:
        print(json.dumps(report, sort_keys=True))
    else:
        for line in _lines(report, forget):
            say(line)
    # The next resume computes forgotten work again; lost work stays lost.
    damaged = any(damage["lost"] or not forget for damage in report["damaged"])
    return 1 if report["logs_left"] or report["ledger"]["unmended"] or damaged else 0


def _repair(address: str, deep: bool, forget: bool, trust_ledger: bool, dry_run: bool) -> Report:
    """Return the repaired `logs`, `logs_left`, contradictions of the `ledger` and `damaged` work, as plain values."""
    from storage.errors import StoreError
    from storage.maintenance.repair import inspect_logs, inspect_tables, repair_logs, repair_tables
    from storage.read.damage import SYSTEM, damaged_files
    from storage.roots import open_root
    from storage.store import FORMAT, open_store

    root = open_root(address)
    if not root.exists(FORMAT):
        raise StoreError("there is no store here", root.address, "nothing was touched", "name the store to repair")
    left = inspect_logs(root)
    ledger: Report = {"lost": [], "rebuilt": {}, "unmended": []}
    logs, damaged = [], list[Report]()
    if not dry_run:
        logs, left = repair_logs(root, left), []
    if not left:  # a broken log hides what the ledger names
        store = open_store(address)
        if unreadable := damaged_files(store, SYSTEM):
            problem = "\n".join(
                ["files of system tables are damaged; no other file says what was in them:", *unreadable]
            )
            safe = "everything else; nothing that these files may name is removed"
            raise StoreError(problem, root.address, safe, "put each of them back from a copy, then repair again")
        left = inspect_tables(store)
        if not dry_run:
            logs, left = [*logs, *repair_tables(store, left)], []
        ledger = _repair_ledger(store, deep and not dry_run)
        damaged = _damage_rows(store, deep, forget, trust_ledger)
    repaired = [asdict(log) for log in logs]
    mended = [{**log.pop("damage"), **log} for log in repaired]
    return {"logs": mended, "logs_left": [asdict(log) for log in left], "ledger": ledger, "damaged": damaged}


def _repair_ledger(store: "Store", rebuild: bool) -> Report:
    """Return contradictions between the ledger and runs or files: `lost`, `rebuilt` rows by run, `unmended`."""
    from storage.maintenance.brake import contradictions

    lost = contradictions(store, hours=0.0)
    if not lost or not rebuild:
        return {"lost": lost, "rebuilt": {}, "unmended": lost}
    from flows.replays.rebuild import rebuild_ledger  # imports what runs import

    rebuilt = rebuild_ledger(store)
    return {"lost": lost, "rebuilt": rebuilt.rows, "unmended": [*contradictions(store), *rebuilt.unproved]}


def _damage_rows(store: "Store", deep: bool, forget: bool, trust_ledger: bool) -> list[Report]:
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
            "what": damage.what,
            "lost": damage in plan.lost,
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


def _lines(report: Report, forgotten: bool) -> Iterator[str]:
    ledger, damaged = report["ledger"], report["damaged"]
    for log in report["logs"]:
        yield _log_line(log)
        if log["removed_again"]:
            yield f"  removed again: {log['removed_again']} rows of runs that gc had removed with their files"
        if log["quarantine"]:
            yield f"  moved aside, not deleted: {len(log['files'])} files, to {log['quarantine']}"
        version = f"the table is at version {log['lost_versions'][0] - 1}; " if log["lost_versions"] else ""
        if version or not log["quarantine"]:
            yield f"  {version}put back: {len(log['restored'])} files"
    yield from map(_log_line, report["logs_left"])
    yield from (f"lost rows: {line}" for line in ledger["lost"])
    for run, num_rows in ledger["rebuilt"].items():
        yield f"  rebuilt from the files of the tables: {num_rows} rows of the ledger of run {run!r}"
    if ledger["lost"] and ledger["unmended"] == ledger["lost"]:
        yield (
            "  put tables/ledger, tables/runs and heads/ back from a copy, or run `stagecoach repair --deep`, which "
            "rebuilds rows of the ledger from the files of the tables"
        )
    else:
        yield from (f"not rebuilt: {line}" for line in ledger["unmended"])
    for damage in damaged[:MAX_DAMAGES]:
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
    if len(damaged) > MAX_DAMAGES:
        yield f"and {len(damaged) - MAX_DAMAGES} more; --json lists all"
    if not (report["logs"] or report["logs_left"] or damaged or ledger["lost"]):
        yield "nothing is wrong"
    if report["logs_left"]:
        yield "dry run: nothing was changed; damaged work is looked for when all logs can be read"


def _log_line(log: Mapping[str, Any]) -> str:
    return f"log of table {log['table']!r}: {'; '.join(log['what'])}"
