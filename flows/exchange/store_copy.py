"""Copies a run from one store into another, with all that it takes to show, replay and trace it there."""

from dataclasses import dataclass

from flows.exchange.export_rows import ExportRefused
from flows.runtime.maintenance import needs_of
from storage.maintenance.plan import Needs, is_unfinished, needed_rows
from storage.maintenance.run_copy import CopyReport, copy_work
from storage.read.frames import existing_store
from storage.store import Store, open_store


@dataclass(frozen=True)
class CopyRequest:
    """Which run is to be copied, and where to."""

    run: str
    target: str
    """Directory or URL of the other store, which is made where there is none."""
    store: str = ""
    with_policies: bool = False
    """Whether its weights are copied too; without them it can be shown and replayed, and not trained on from there."""


def copy_run(request: CopyRequest) -> CopyReport:
    """Copy a run with the ledger rows, slices and quarantines that it needs; what is there already is left as it is.

    Of other runs come the rows that went into its own, and of a replay that may go on the whole run that it goes
    through again. Raises RunUnknown, CopyConflict, ExportRefused for a copy of a store into itself, and what
    `copy_work` raises.
    """
    source = existing_store(request.store)
    source.runs.events(request.run)
    target = open_store(request.target)
    if target.root.address == source.root.address:
        raise ExportRefused(f"{request.target} is the store that run {request.run!r} is in. Nothing was written.")
    needs = needs_of(source)
    runs = _with_sources(source, request.run, needs)
    keys = {key for run in runs if run in needs for key in needs[run].keys}
    return copy_work(source, target, needed_rows(source, runs, keys), runs, request.with_policies)


def _with_sources(store: Store, run: str, needs: dict[str, Needs]) -> list[str]:
    """Return a run, behind the one that it goes through again if it is a replay that has not finished, and so on."""
    runs = [run]
    while is_unfinished(store, runs[0]) and runs[0] in needs:
        runs.insert(0, needs[runs[0]].run)
    return runs


def main(request: CopyRequest) -> int:
    """Copy a run and say what came of it; return the exit status."""
    done = copy_run(request)
    if done.nothing:
        print(f"{request.target}: run {request.run} is there already, nothing was copied")
        return 0
    weights = f", {done.policies} policies" if request.with_policies else ""
    print(f"{request.target}: run {request.run} with {done.rows} ledger rows, {done.slices} new slices{weights}")
    return 0
