"""Says what is damaged in a store, mends what can be mended, and forgets what is then done again."""

import json
from collections.abc import Sequence
from typing import Any

from configs.run import RunConfig
from flows.reporting.formats import console
from flows.reporting.panel import printable
from storage.errors import StoreError
from storage.maintenance.plan import at_work
from storage.maintenance.repair import (
    Damage,
    ForgetPlan,
    LogDamage,
    RepairedLog,
    forget,
    inspect_logs,
    inspect_policies,
    inspect_slices,
    plan_forget,
    repair_logs,
)
from storage.roots import open_root
from storage.store import FORMAT, Store, open_store
from tasks.stages import REPEATABLE

PRINTED = 20
"""Damaged slices that are printed one by one."""


def main(
    store: str = "", deep: bool = False, forget_damaged: bool = False, dry_run: bool = False, as_json: bool = False
) -> int:
    """Mend a store and print what was wrong; return the exit status: 0 where nothing is wrong any more, else 1.

    Raises StoreError where there is no store, or where work is to be forgotten while a run may be at work.
    """
    address = store or RunConfig().store
    mended, left = _logs(address, dry_run)
    damages: list[Damage] = []
    forgetting = ForgetPlan((), (), ())
    if not left:
        root = open_store(address)
        damages = [*inspect_slices(root, deep), *inspect_policies(root, deep)]
        forgetting = plan_forget(root, damages, REPEATABLE)
        if forget_damaged and not dry_run and forgetting.rows:
            _forget(root, forgetting)
    if as_json:
        print(json.dumps(described(mended, left, damages, forgetting), sort_keys=True))
    else:
        _print(mended, left, damages, forgetting, forget_damaged and not dry_run)
    return 1 if left or (damages if dry_run or not forget_damaged else forgetting.lost) else 0


def described(
    mended: Sequence[RepairedLog], left: Sequence[LogDamage], damages: Sequence[Damage], forgetting: ForgetPlan
) -> dict[str, Any]:
    """Return what was found and done as plain values."""
    return {
        "logs": [{**vars(each.damage), "quarantine": each.quarantine, "restored": each.restored} for each in mended],
        "logs_left": [vars(each) for each in left],
        "damaged": [_row(each, forgetting) for each in damages],
    }


def _logs(address: str, dry_run: bool) -> tuple[list[RepairedLog], list[LogDamage]]:
    """Mend the logs; in a dry run, say only what is wrong with them."""
    root = open_root(address)
    if not root.exists(FORMAT):
        raise StoreError("there is no store here", root.address, "nothing was touched", "name the store to repair")
    found = inspect_logs(root)
    return ([], found) if dry_run else (repair_logs(root, found), [])


def _forget(store: Store, forgetting: ForgetPlan) -> None:
    if busy := at_work(store):
        what = f"{', '.join(busy)} may be at work on what would be forgotten"
        raise StoreError(what, store.root.address, "nothing was forgotten", "wait for the runs to end")
    forget(store, forgetting)


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


def _print(
    mended: Sequence[RepairedLog],
    left: Sequence[LogDamage],
    damages: Sequence[Damage],
    forgetting: ForgetPlan,
    forgotten: bool,
) -> None:
    out = console()
    for each in mended:
        _print_log(each.damage)
        if each.removed_again:
            out.print(f"  removed again: {each.removed_again} rows of runs that gc had removed with their files")
        out.print(f"  moved aside, not deleted: {len(each.damage.files)} files, to {each.quarantine}")
        if each.damage.lost_versions:
            out.print(
                f"  the table is at version {each.damage.lost_versions[0] - 1}; put back: {len(each.restored)} files"
            )
    for damage in left:
        _print_log(damage)
    rows = [_row(damage, forgetting) for damage in damages]
    for row in rows[:PRINTED]:
        where = f"{', '.join(row['runs'])}, step {row['step']}, {row['stage']}, {row['table']}"
        out.print(printable(f"{where}: {row['what']}"))
        out.print(f"  {_advice(row, forgotten)}")
    if len(rows) > PRINTED:
        out.print(f"and {len(rows) - PRINTED} more; --json lists all")
    if not (mended or left or rows):
        out.print("nothing is wrong")
    if left:
        out.print("dry run: nothing was changed; what the ledger names is looked at when the logs are whole")


def _print_log(damage: LogDamage) -> None:
    console().print(f"log of table {damage.table!r}: {'; '.join(damage.what)}")


def _advice(row: dict[str, Any], forgotten: bool) -> str:
    if row["lost"]:
        return (
            "lost: other work was made of it, and doing it again would give other rows; put the file back from a copy"
        )
    if forgotten:
        return "forgotten: resume the run, and it is done again"
    return "can be done again: `stagecoach repair --forget`, then resume the run"
