"""Compacts tables, removes what nobody needs, whole runs and weights: `stagecoach maintain` and `gc`."""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from configs.run import RunConfig
from flows.queries.step_history import StepHistory, step_history
from flows.reporting.formats import console, grid, size
from flows.views.readers import readers
from storage.errors import StoreError
from storage.maintenance.compact import RETENTION_HOURS, MaintenanceReport, maintain
from storage.maintenance.plan import Needs, Plan, PolicyRetention, at_work, plan_removal, present_runs
from storage.maintenance.sweep import ExpiryReport, RemovalReport, Retention, carry_out, expire, finish_removals
from storage.read.frames import existing_store
from storage.read.lineage import Graph
from storage.store import Store


def maintain_store(
    store: str = "",
    retention_hours: float = RETENTION_HOURS,
    retain: Sequence[str] = (),
    force: bool = False,
    dry_run: bool = False,
    as_json: bool = False,
) -> int:
    """Keep the store in order and print what was done; return the exit status."""
    root = existing_store(store or RunConfig().store)
    expired, done = expire_and_maintain(root, retention_hours, retain, force, dry_run)
    if as_json:
        print(json.dumps(describe_maintenance(expired, done, dry_run), sort_keys=True))
    else:
        _print(expired, done, dry_run)
    return 0


def expire_and_maintain(
    store: Store, retention_hours: float, retain: Sequence[str], force: bool, dry_run: bool
) -> tuple[list[ExpiryReport], MaintenanceReport]:
    """Drop what is past its retention, then do the housekeeping; return what was done.

    Raises StoreError where a table that later stages read is to lose rows without `force`, or while a run may be at
    work.
    """
    retentions = [Retention.parse(text) for text in retain]
    for each in retentions:
        _check(store, each, force)
    expired = [expire(store, each, dry_run) for each in retentions]
    return expired, maintain(store, retention_hours, dry_run)


def describe_maintenance(expired: Sequence[ExpiryReport], done: MaintenanceReport, dry_run: bool) -> dict[str, Any]:
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


def _print(expired: Sequence[ExpiryReport], done: MaintenanceReport, dry_run: bool) -> None:
    out = console()
    for each in expired:
        told = f"{each.slices} slices, {each.files} files, {size(each.bytes)}"
        out.print(f"{each.table}: rows older than {each.hours} h {'would go' if dry_run else 'went'}: {told}")
    rows = [
        (each.table, each.merged, each.deleted, size(each.bytes_before), size(each.bytes_after)) for each in done.tables
    ]
    before, after = (sum(getattr(each, name) for each in done.tables) for name in ("bytes_before", "bytes_after"))
    rows.append(("together", done.merged, done.deleted, size(before), size(after)))
    out.print(grid(("table", "files merged", "deleted", "before", "after"), rows))
    for path in done.only_copies:
        out.print(f"kept, although old: the only copy of its rows: {path}")
    if done.policies:
        told = "would be removed" if dry_run else "were removed"
        out.print(f"weights that no ledger row names {told}: {', '.join(done.policies)}")
    if dry_run:
        out.print("dry run: nothing was changed")


def collect_garbage(
    store: str = "",
    keep: Sequence[str] = (),
    keep_last: int = 0,
    remove: Sequence[str] = (),
    force: Sequence[str] = (),
    policies: str = "all",
    yes: bool = False,
    dry_run: bool = False,
    as_json: bool = False,
) -> int:
    """Print what would go, ask, and remove it; return the exit status: 1 where the answer was no."""
    root = existing_store(store or RunConfig().store)
    going = chosen(root, keep, keep_last, remove, force, policies)
    if not as_json:
        _print_removal(root, going)
    if going.empty or dry_run:
        left = RemovalReport() if dry_run else finish_removals(root)
        return _end(root, going, left, as_json, "dry run: nothing was changed" if dry_run else "nothing to remove")
    if not yes and not _agreed(as_json):
        return _end(root, going, RemovalReport(), as_json, "nothing was changed", status=1)
    return _end(root, going, remove_planned(root, going), as_json, "removed")


def chosen(
    store: Store, keep: Sequence[str], keep_last: int, remove: Sequence[str], force: Sequence[str], policies: str
) -> Plan:
    """Return the plan for what a person asked for. Without `keep`, `keep_last` and `remove` no run goes.

    Raises StoreError where runs to keep and runs to remove are named at once, or one to remove is protected.
    """
    if remove and (keep or keep_last):
        raise StoreError("runs to keep and runs to remove at once", "", "nothing was removed", "name one kind")
    runs = present_runs(store)
    kept = {*keep, *(runs[-keep_last:] if keep_last else ())}
    if not (keep or keep_last):
        unknown = sorted({*remove} - {*runs})
        if unknown:
            raise StoreError(f"there is no run {', '.join(unknown)}", store.root.address, "nothing was removed", "")
        kept = {*runs} - {*remove} - {*force}
    forced = [run for run in force if run not in kept]
    going = plan_removal(store, kept, forced, PolicyRetention.parse(policies), needs_of(store))
    if refused := [f"{run} ({why})" for run, why in going.protected if run in remove]:
        advice = "wait until they have ended, or name them with --force"
        raise StoreError(f"not removed: {', '.join(refused)}", store.root.address, "nothing was removed", advice)
    return going


def needs_of(store: Store) -> dict[str, Needs]:
    """Return what the replays of a store need that their rows do not name.

    It is the run that each goes through again, and for steps that it did not train the policies from which they would
    be trained, with the work of that run by which they are found.
    """
    graph = Graph(store.ledger.entries())
    known = store.runs.names()
    found = {}
    for run in known:
        config = store.runs.config(run)
        if config.get("kind") == "replay":
            source = config["replay"]["run"]
            behind = step_history(store, source, graph) if source in known else None
            found[run] = Needs(source, frozenset(_would_start_from(step_history(store, run, graph), behind)))
    return found


def _would_start_from(history: StepHistory, source: StepHistory | None) -> set[str]:
    behind = source.steps if source else {}
    keys: set[str] = set()
    for step, past in history.steps.items():
        if past.policy is not None and "training" not in past.work:
            work = behind[step].work if step in behind else {}
            keys |= {past.policy.key, *[each.key for name, each in work.items() if name != "training"][-1:]}
    return keys


def remove_planned(store: Store, going: Plan) -> RemovalReport:
    """Carry out a plan, and remove the logs of the removed runs; return what went."""
    swept = carry_out(store, going)
    if store.root.directory is not None:
        for run in going.removed:
            shutil.rmtree(store.root.directory / "logs" / run, ignore_errors=True)
    return swept


def describe_removal(going: Plan, swept: RemovalReport) -> dict[str, Any]:
    """Return a plan and what came of it as plain values."""
    return {
        "kept": list(going.kept),
        "protected": dict(going.protected),
        "removed": list(going.removed),
        "rows": len(going.rows),
        "rows_staying": len(going.staying),
        "slices": len(going.slices),
        "slice_bytes": going.slice_bytes,
        "policies": list(going.policies),
        "thinned": list(going.pruned),
        "policy_bytes": going.policy_bytes,
        "done": vars(swept),
    }


def _agreed(as_json: bool) -> bool:
    if as_json or not sys.stdin.isatty():
        raise StoreError("nobody was there to be asked", "", "nothing was removed", "say --yes, or --dry-run")
    return input("Remove this for good? [y/N] ").strip().lower() in ("y", "yes")


def _end(store: Store, going: Plan, swept: RemovalReport, as_json: bool, told: str, status: int = 0) -> int:
    if as_json:
        print(json.dumps(describe_removal(going, swept), sort_keys=True))
        return status
    out = console()
    if swept.rows or swept.slices or swept.policies:
        out.print(
            f"removed {swept.rows} ledger rows, {swept.slices} slices in {swept.files} files "
            f"({size(swept.bytes)}) and the weights of {swept.policies} policies "
            f"({size(swept.policy_bytes)})"
        )
    else:
        out.print(told)
    return status


def _print_removal(store: Store, going: Plan) -> None:
    out = console()
    reasons = dict(going.protected)
    rows = []
    for run in (*going.removed, *going.kept, *reasons):
        entries = [entry for entry in going.rows if entry.run == run]
        staying = sum(entry.run == run for entry in going.staying)
        what = "remove" if run in going.removed else f"keep: {reasons[run]}" if run in reasons else "keep"
        rows.append((run, what, len(entries), staying))
    out.print(grid(("run", "", "ledger rows to go", "stay for other runs"), rows))
    out.print(f"slices that nobody names then: {len(going.slices)}, {size(going.slice_bytes)} as written")
    out.print(
        f"weights to go: {len(going.policies)} policies of removed runs, {len(going.pruned)} of kept runs, "
        f"{size(going.policy_bytes)} together"
    )
    for run in (*going.kept, *reasons):
        if versions := _versions(store, run, going.pruned):
            out.print(f"{run}: weights of versions {versions} go; their rows stay, nothing starts from them any more")


def _versions(store: Store, run: str, keys: Sequence[str]) -> str:
    """Return the versions of a run's policies as ranges: 1-4, 6."""
    made = [entry for entry in store.ledger.entries(run=run) if entry.key in keys and entry.slices("policies")]
    numbers = enumerate(sorted(entry.step + 1 for entry in made if "policy" in entry.inputs))
    grouped = groupby(numbers, key=lambda pair: pair[1] - pair[0])
    ranges = [[number for _, number in group] for _, group in grouped]
    return ", ".join(f"{each[0]}-{each[-1]}" if len(each) > 1 else str(each[0]) for each in ranges)
