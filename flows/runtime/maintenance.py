"""Compacts tables, removes what nobody needs, whole runs and weights."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from flows.queries.step_history import StepHistory, step_history
from flows.queries.store_reader import flat
from storage.errors import StoreError
from storage.maintenance.brake import require_consistency
from storage.maintenance.compact import check_hours, maintain
from storage.maintenance.plan import Needs, Plan, PolicyRetention, at_work, plan_removal, present_runs
from storage.maintenance.sweep import RemovalReport, Retention, carry_out, expire
from storage.read.lineage import Graph
from storage.refs import check_run_name
from storage.store import Store

MEASUREMENTS = ("token_policies", "intake_loads", "token_statistics", "token_masks")
"""Tables whose rows no later stage, command or page misses."""


def maintain_tables(
    store: Store,
    retention_hours: float,
    retain: Sequence[str],
    force: bool,
    dry_run: bool,
    trust_ledger: bool = False,
) -> dict[str, Any]:
    """Drop what is past its retention, then do the housekeeping; return what was done as plain values.

    Raises StoreError where a table that later stages read is to lose rows without `force`, or while a run may be at
    work, and, unless `trust_ledger`, where runs or files contradict the ledger.
    """
    check_hours(retention_hours)
    if not trust_ledger:
        require_consistency(store, retention_hours)
    retentions = [Retention.parse(text) for text in retain]
    for each in retentions:
        _check(store, each, force)
    expired = [asdict(expire(store, each, dry_run)) for each in retentions]
    done = maintain(store, retention_hours, dry_run)
    totals = {"merged": done.merged, "only_copies": done.only_copies}
    return {**asdict(done), **totals, "expired": expired, "dry_run": dry_run}


def _check(store: Store, retention: Retention, force: bool) -> None:
    if retention.table in MEASUREMENTS:
        return
    safe, what = "nothing was dropped", f"rows of {retention.table!r} are read again by later stages or commands"
    if not force:
        do = "a replay from there would end with SliceExpired; say --force if nobody will want one"
        raise StoreError(what, store.root.address, safe, do)
    # Even with force: a run at work has read the ledger and would miss the rows in its next stage.
    if busy := at_work(store):
        raise StoreError(f"{what}; and {', '.join(busy)} may be at work", store.root.address, safe, "wait for them")


def choose_removal(
    store: Store,
    keep: Sequence[str],
    keep_last: int,
    remove: Sequence[str],
    force: Sequence[str],
    policies: str,
    trust_ledger: bool = False,
) -> Plan:
    """Return the plan for what a person asked for. Without `keep`, `keep_last` and `remove` no run goes.

    Raises StoreError where runs to keep and runs to remove are named at once, or one to remove is protected, and,
    unless `trust_ledger`, where runs or files contradict the ledger.
    """
    place, safe = store.root.address, "nothing was removed"
    if remove and (keep or keep_last):
        raise StoreError("runs to keep and runs to remove at once", place, safe, "name one kind")
    if keep_last < 0:
        raise StoreError(f"{keep_last} runs cannot be kept", place, safe, "say how many, from 1 on")
    if not trust_ledger:
        require_consistency(store)
    runs = present_runs(store)
    # `runs` is in order of their beginning; -0 would mean all of them.
    kept = {*keep, *(runs[-keep_last:] if keep_last else ())}
    if not (keep or keep_last):
        if unknown := sorted({*remove} - {*runs}):
            raise StoreError(f"there is no run {', '.join(unknown)}", place, safe, "")
        kept = {*runs} - {*remove} - {*force}
    forced = [run for run in force if run not in kept]
    going = plan_removal(store, kept, forced, PolicyRetention.parse(policies), needs_of(store))
    if refused := [f"{run} ({why})" for run, why in going.protected if run in remove]:
        advice = "wait until they have ended, or name them with --force"
        raise StoreError(f"not removed: {', '.join(refused)}", place, safe, advice)
    return going


def needs_of(store: Store) -> dict[str, Needs]:
    """Return what runs of a store need that their rows do not name.

    Every run needs the policies of the store that its config names as weights, and a fork the run that it goes on from,
    by whose name it finds its first policy. A replay needs the run that it goes through again, and for steps that it
    did not train the policies from which they would be trained, with the work of that run by which they are found.
    """
    graph, runs, needs = Graph(store.counted_entries()), store.runs.names(), {}
    for run in runs:
        config = store.runs.config(run)
        source, keys = config.get("fork", "").partition(":")[0], _named_policies(graph, config)
        if config.get("kind") == "replay":
            source = config["replay"]["run"]
            source_history = step_history(store, source, graph) if source in runs else None
            keys |= _would_start_from(step_history(store, run, graph), source_history)
        needs[run] = Needs(source, frozenset(keys))
    return needs


def _named_policies(graph: Graph, config: Mapping[str, Any]) -> set[str]:
    """Return the keys of work that paths of a config end with: the directory of a policy is named by its key."""
    return {name for _, value in flat(config) if (name := str(value).rstrip("/").rpartition("/")[2]) in graph.works}


def _would_start_from(history: StepHistory, source: StepHistory | None) -> set[str]:
    source_steps = source.steps if source else {}
    keys: set[str] = set()
    for step, past in history.steps.items():
        if past.policy is not None and "training" not in past.work:
            work = source_steps[step].work if step in source_steps else {}
            keys |= {past.policy.key, *[entry.key for name, entry in work.items() if name != "training"][-1:]}
    return keys


def remove_planned(store: Store, going: Plan) -> RemovalReport:
    """Carry out a plan, and remove the logs of the removed runs; return what went."""
    for run in going.removed:
        check_run_name(run)  # it becomes the name of a directory
        store.root.child(f"logs/{run}")
    swept = carry_out(store, going)
    if store.root.directory is not None:
        for run in going.removed:
            with suppress(StoreError):  # logs are for people: one that cannot be removed must not stop the rest
                store.root.remove_directory(f"logs/{run}")
    return swept


def describe_removal(going: Plan, swept: RemovalReport) -> dict[str, Any]:
    """Return a plan and its result as plain values."""
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
