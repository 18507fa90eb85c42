"""Plans what a store can do without: the work of removed runs, and weights of the policies of runs that stay.

Nothing is removed here: `storage.maintenance.sweep` carries a plan out.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

from storage.errors import RunUnknown, StoreError
from storage.maintenance.references import References
from storage.records import REMOVED
from storage.refs import Entry, Slice
from storage.store import Store

CLOSING = ("finished", "failed", "interrupted", "evicted", "refused", "cancelled", "crashed", REMOVED)
"""Events after which a run is not at work until it says `resumed`."""
QUIET_HOURS = 168
"""A run without an event or a ledger row for so long is taken for dead."""
RECENT_HOURS = 1.0
"""A run that finished less long ago is not removed unless it is named: someone may be about to branch off it."""


@dataclass(frozen=True)
class PolicyRetention:
    """Which versions keep their weights: the `last` ones, and with `every` above 0 each n-th; 1 is all."""

    every: int = 0
    last: int = 1

    @classmethod
    def parse(cls, text: str) -> "PolicyRetention":
        """Read `all`, or `last`, `last:N` and `every:N` with a comma between; StoreError for anything else."""
        numbers: dict[str, int] = {}
        for part in ("every:1" if text == "all" else text).split(","):
            parts = re.fullmatch("(last|every):0*([1-9][0-9]{0,8})", "last:1" if part == "last" else part)
            if parts is None or parts[1] in numbers:
                what = f"{text!r} does not say which policies to keep"
                raise StoreError(what, "", "nothing was removed", "say all, last:N, every:N or last:N,every:N")
            numbers[parts[1]] = int(parts[2])
        return cls(**numbers)

    def keeps(self, version: int) -> bool:
        """Whether a version is kept for its number."""
        return self.every > 0 and version % self.every == 0


KEEP_ALL = PolicyRetention(every=1)


@dataclass(frozen=True)
class Needs:
    """What a run needs of other runs though none of its rows names it."""

    run: str
    """The run that a replay replays or a fork goes on from: all of it stays until these have finished. Else empty."""
    keys: frozenset[str]
    """Work of other runs: policies that its config names as weights, and those a replay may be continued from."""


NO_NEEDS: Mapping[str, Needs] = MappingProxyType({})


@dataclass(frozen=True)
class Plan:
    """What would be removed, and what stays. Nothing of it is done yet."""

    kept: tuple[str, ...]
    removed: tuple[str, ...]
    protected: tuple[tuple[str, str], ...] = ()
    """Runs that nobody asked to keep and that stay nevertheless, and why."""
    rows: tuple[Entry, ...] = ()
    """Ledger rows of removed runs."""
    staying: tuple[Entry, ...] = ()
    """Ledger rows of removed runs that stay, because rows of kept runs name their keys."""
    slices: tuple[Slice, ...] = ()
    """Slices that no row names any more."""
    policies: tuple[str, ...] = ()
    """Keys of policies that no row names any more."""
    pruned: tuple[str, ...] = ()
    """Keys of policies of kept runs whose weights go; their rows in the tables stay."""
    policy_bytes: int = 0

    @property
    def slice_bytes(self) -> int:
        """Bytes of the files of `slices` as first written."""
        return sum(piece.bytes for piece in self.slices)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.removed or self.pruned)


def plan_removal(
    store: Store,
    keep: Collection[str],
    force: Collection[str] = (),
    retention: PolicyRetention = KEEP_ALL,
    needs: Mapping[str, Needs] = NO_NEEDS,
) -> Plan:
    """Return what goes when only the runs `keep` stay, with the weights of those policies that `retention` keeps.

    Runs without a finished event, or that finished just now, stay unless `force` names them, and so does the run that
    an unfinished replay or fork needs; nor are the policies of any of these pruned then. `needs`, by run, is what runs
    need that their rows do not name. Raises RunUnknown for a name that is no run of the store.
    """
    runs = present_runs(store)
    if unknown := sorted({*keep, *force} - {*runs}):
        known = f"the runs are: {', '.join(runs) or 'none'}"
        raise RunUnknown(f"there is no run {', '.join(unknown)}", known, "nothing was removed", "check the names")
    reasons = {run: why_protected(store, run) for run in runs if run not in force}
    spared = {run: why for run, why in reasons.items() if why and run not in keep}
    open_runs = {run for run in runs if run not in force and is_unfinished(store, run)}
    replayed = _needed_runs(needs, {run for run in open_runs if run in keep or run in spared})
    spared |= {run: why for run, why in replayed.items() if run in runs and run not in {*keep, *force, *spared}}
    removed = [run for run in runs if run not in keep and run not in spared]
    # Work that a replay may be continued from stays, although no row of the replay names it.
    needed = {key for run, need in needs.items() if run in runs and run not in removed for key in need.keys}
    rows, staying, left = _rows(store, removed, needed)
    # A slice goes when no row that stays names it, whichever run computed it.
    live, dead = References(store, left), References(store, rows)
    slices = [piece for piece in dead.slices if piece not in live.slices]
    policies = [key for key in dead.policies if key not in live.keys and store.policies.find(key)]
    # Runs that may go on keep all weights; what is left of a removed run is there because others need it.
    spare = (
        open_runs
        | {*replayed} - {*force}
        | {run for run in runs if run in removed or store.runs.last_event(run) == REMOVED}
    )
    pruned = policies_to_prune(store, left, retention, spare, needed)
    return Plan(
        kept=tuple(run for run in runs if run in keep),
        removed=tuple(removed),
        protected=tuple(spared.items()),
        rows=tuple(rows),
        staying=tuple(staying),
        slices=tuple(slices),
        policies=tuple(policies),
        pruned=tuple(pruned),
        policy_bytes=sum(found.bytes for key in (*policies, *pruned) if (found := store.policies.find(key))),
    )


def at_work(store: Store) -> list[str]:
    """The runs that a process began and has not ended, and that were active within QUIET_HOURS; in order of name."""
    oldest = datetime.now(UTC) - timedelta(hours=QUIET_HOURS)
    busy = []
    for run in store.runs.names():
        last = {(event.host, event.pid): event.event for event in store.runs.events(run)}
        if not {*last.values()} <= {*CLOSING} and max(_moments(store, run)) > oldest:
            busy.append(run)
    return sorted(busy)


def is_unfinished(store: Store, run: str) -> bool:
    """Whether a run may go on: its last event says neither that it finished nor that it was removed."""
    return store.runs.last_event(run) not in ("", "finished", REMOVED)


def why_protected(store: Store, run: str) -> str | None:
    """Why a run is removed only when it is named: it did not finish, or just did; None where there is no reason."""
    last = store.runs.last(run)
    if last is None:
        return None
    if is_unfinished(store, run):
        return f"its last event is {last.event!r}"
    # After an event of a clock that was ahead all events of the store lie in the future; rows of the ledger do not.
    now, recent = datetime.now(UTC), timedelta(hours=RECENT_HOURS)
    if last.event == "finished" and any(timedelta() <= now - moment < recent for moment in _moments(store, run)):
        return f"it finished less than {RECENT_HOURS:g} h ago"
    return None


def _moments(store: Store, run: str) -> list[datetime]:
    """When a run was last active by its events, and when its rows in the ledger were finished."""
    return [store.runs.events(run)[-1].at, *(entry.finished_at for entry in store.ledger.entries(run=run))]


def present_runs(store: Store) -> list[str]:
    """All runs with an event or a row, newest last, but those removed before of which no row is left."""
    names, with_rows = store.runs.names(), {entry.run for entry in store.ledger.entries()}
    present = [run for run in names if run in with_rows or store.runs.last_event(run) != REMOVED]
    return [*sorted(with_rows - {*names}), *present]


def policies_to_prune(
    store: Store,
    entries: Iterable[Entry],
    retention: PolicyRetention,
    spare: Collection[str] = (),
    needed: Collection[str] = (),
) -> list[str]:
    """The keys of policies whose weights go, sorted; none of the runs `spare`, and none of the keys `needed`.

    Besides what `retention` keeps, a run keeps its first policy (it starts from it), those from the last back to the
    nearest with optimizer state (it is continued from there), and every policy that a run used without having made or
    adopted it itself (it was asked for by name). A policy goes only if no run keeps it and no adapter that stays is
    laid over it.
    """
    if retention == KEEP_ALL:
        return []
    by_run: dict[str, dict[str, Mapping[str, Any]]] = {}
    used: dict[str, set[str]] = {}
    for entry in entries:
        used.setdefault(entry.run, set()).update(key for name, key in entry.inputs.items() if name == "policy")
        if entry.slices("policies"):
            by_run.setdefault(entry.run, {})[entry.key] = _row(store, entry)
    # A policy that a run used and did not make was asked for by its name.
    kept = {key for run, keys in used.items() for key in keys - set(by_run.get(run, {}))} | {*needed}
    for run, made in by_run.items():
        kept |= set(made) if run in spare else _policies_to_keep(made, retention)
    kept |= store.policies.adapter_bases(kept)
    return sorted(key for made in by_run.values() for key in made if key not in kept and store.policies.find(key))


def recovery_keys(store: Store, keys: Iterable[str]) -> set[str]:
    """The keys of the work by which the optimizer states of policies are recovered: earlier policies and batches.

    Where the state of a policy was not saved, training goes back to the nearest policy that has one, and trains the
    recorded batches since then again.
    """
    found: set[str] = set()
    waiting = [*keys]
    while waiting:
        entry = store.ledger.find(waiting.pop())
        if entry is None or not entry.slices("policies") or _row(store, entry)["has_optimizer"]:
            continue
        new = {*entry.inputs.values()} - found
        found |= new
        waiting += new
    return found


def _row(store: Store, entry: Entry) -> Mapping[str, Any]:
    columns = ["version", "parent_key", "has_optimizer"]
    return store.read(entry.slices("policies"), columns).to_pylist()[0]


def _policies_to_keep(made: Mapping[str, Mapping[str, Any]], retention: PolicyRetention) -> set[str]:
    order = sorted(made, key=lambda key: made[key]["version"])
    kept = {order[0], *order[-retention.last :], *(key for key in order if retention.keeps(made[key]["version"]))}
    last = made[order[-1]]
    # Whoever continues the run trains the recorded batches again from the last saved state.
    while not last["has_optimizer"] and last["parent_key"] in made:
        kept.add(last["parent_key"])
        last = made[last["parent_key"]]
    return kept


def _needed_runs(needs: Mapping[str, Needs], runs: Iterable[str]) -> dict[str, str]:
    """The runs that unfinished replays and forks need, and the runs that those need in turn, with why they stay."""
    found: dict[str, str] = {}
    for run in sorted(runs):
        source = run
        while source in needs and needs[source].run not in ("", *found):
            source = needs[source].run
            found[source] = f"run {run!r}, which may go on, needs it"
    return found


def _rows(
    store: Store, removed: Collection[str], needed: Collection[str]
) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """The rows of removed runs that go, those that stay because they are needed, and all rows that will be left."""
    every = store.ledger.entries()
    kept = [entry for entry in every if entry.run not in removed]
    named = {key for entry in kept for key in entry.inputs.values()} | {*needed}
    # A run that trained on from a policy may need its optimizer state, which is recovered from work before it.
    begun = {key for entry in kept if entry.slices("policies") for key in entry.inputs.values()} | {*needed}
    named |= recovery_keys(store, begun)
    # What a kept run has as a whole itself needs no row of another; a part of it is not enough.
    named = named - {entry.key for entry in kept if not entry.part} | {*needed}
    found = [entry for key in sorted(named) if (entry := store.ledger.find(key))]
    needed_work = References(store, [*kept, *found])
    below = store.policies.adapter_bases(needed_work.policies) - needed_work.keys
    found += [entry for key in sorted(below) if (entry := store.ledger.find(key))]
    staying = [entry for entry in found if entry.run in removed]
    ids = {entry.row_id for entry in staying}
    going = [entry for entry in every if entry.run in removed and entry.row_id not in ids]
    return going, staying, [*kept, *staying]
