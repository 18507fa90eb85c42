"""What a store can do without: the work of runs that nobody keeps, and weights between those that are kept.

A plan is made first and changes nothing; `storage.keeping.sweeping` carries it out. What a kept run's rows name stays,
whoever computed it: the slices of its rows, and the rows of the keys that went into them (one step up: the policy that
an evaluation tried, say). Of a policy from which a kept run trains, the way back to the nearest with optimizer state
stays as well, and of one that is an adapter the weights below; what a run needs beyond that its caller says (`Needs`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from storage.adapters import bases
from storage.errors import RunUnknown, StoreError
from storage.keeping.activity import unfinished, why_protected
from storage.keeping.thinning import KEEP_ALL, Thinning, thin, ways_back
from storage.refs import Entry, Slice
from storage.runs import REMOVED
from storage.store import Store


@dataclass(frozen=True)
class Needs:
    """What a run needs of others though none of its rows names it."""

    run: str
    """The run that it goes through again; until it has finished, all of that stays."""
    keys: frozenset[str]
    """Work of others that it may be gone on from."""


NOTHING: Mapping[str, Needs] = MappingProxyType({})


@dataclass(frozen=True)
class Plan:
    """What would go. Nothing of it is done yet."""

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
    thinned: tuple[str, ...] = ()
    """Keys of policies of kept runs whose weights go; their rows in the tables stay."""
    policy_bytes: int = 0

    @property
    def slice_bytes(self) -> int:
        """Bytes of the files of `slices` as first written."""
        return sum(file.size for piece in self.slices for file in piece.files)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.removed or self.thinned)


def plan(
    store: Store,
    keep: Collection[str],
    force: Collection[str] = (),
    thinning: Thinning = KEEP_ALL,
    needs: Mapping[str, Needs] = NOTHING,
) -> Plan:
    """Find out what goes when only the runs `keep` are kept, and of their policies those that `thinning` says.

    Runs without a finished event, or that finished just now, stay unless `force` names them, and so does what an
    unfinished run that stays goes through again; nor are the policies of any of these thinned then. `needs`, by run, is
    what runs need that their rows do not name. Raises RunUnknown for a name that is no run of the store, StoreError for
    one in both.
    """
    runs = runs_in(store)
    _check_names(runs, keep, force)
    reasons = {run: why_protected(store, run) for run in runs if run not in force}
    spared = {run: why for run, why in reasons.items() if why and run not in keep}
    open_runs = {run for run in runs if run not in force and unfinished(store, run)}
    again = _gone_through(needs, {run for run in open_runs if run in keep or run in spared})
    spared |= {run: why for run, why in again.items() if run in runs and run not in {*keep, *force, *spared}}
    removed = [run for run in runs if run not in keep and run not in spared]
    needed = {key for run, need in needs.items() if run in runs and run not in removed for key in need.keys}
    rows, staying, left = _rows(store, removed, needed)
    live = {piece for entry in left for piece in entry.outputs}
    slices = dict.fromkeys(piece for entry in rows for piece in entry.outputs if piece not in live)
    keys = {entry.key for entry in left}
    policies = [key for key in _policy_keys(rows) if key not in keys and store.policies.find(key)]
    spare = open_runs | {*again} - {*force} | {run for run in runs if run in removed or _was_removed(store, run)}
    thinned = thin(store, left, thinning, spare, needed)
    return Plan(
        kept=tuple(run for run in runs if run in keep),
        removed=tuple(removed),
        protected=tuple(spared.items()),
        rows=tuple(rows),
        staying=tuple(staying),
        slices=tuple(slices),
        policies=tuple(policies),
        thinned=tuple(thinned),
        policy_bytes=sum(policy_bytes(store, key) for key in (*policies, *thinned)),
    )


def policy_bytes(store: Store, key: str) -> int:
    """The size of a policy's files; 0 for one that is absent."""
    policy = store.policies.find(key)
    return sum(file.size for file in policy.files) if policy else 0


def runs_in(store: Store) -> list[str]:
    """All runs with an event or a row, newest last, but those removed before of which no row is left."""
    named = store.runs.names()
    with_rows = {entry.run for entry in store.ledger.entries()}
    there = [run for run in named if run in with_rows or not _was_removed(store, run)]
    return [*sorted(with_rows - {*named}), *there]


def _check_names(runs: Sequence[str], keep: Collection[str], force: Collection[str]) -> None:
    safe = "nothing was removed"
    if unknown := sorted({*keep, *force} - {*runs}):
        known = f"the runs are: {', '.join(runs) or 'none'}"
        raise RunUnknown(f"there is no run {', '.join(unknown)}", known, safe, "check the names")
    if both := sorted({*keep} & {*force}):
        raise StoreError(f"{', '.join(both)}: kept and forced to go at once", "", safe, "say one of the two")


def _was_removed(store: Store, run: str) -> bool:
    last = store.runs.last(run)
    return last is not None and last.event == REMOVED


def _gone_through(needs: Mapping[str, Needs], runs: Iterable[str]) -> dict[str, str]:
    """The runs that unfinished runs go through again, one behind the other, and why they stay."""
    found: dict[str, str] = {}
    for run in sorted(runs):
        source = run
        while source in needs and needs[source].run not in found:
            source = needs[source].run
            found[source] = f"run {run!r}, which may go on, goes through it again"
    return found


def _rows(
    store: Store, removed: Collection[str], needed: Collection[str]
) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """The rows of removed runs that go, those that stay because they are needed, and all that will be left."""
    every = store.ledger.entries()
    kept = [entry for entry in every if entry.run not in removed]
    named = {key for entry in kept for key in entry.inputs.values()} | {*needed}
    begun = {key for entry in kept if entry.slices("policies") for key in entry.inputs.values()} | {*needed}
    named |= ways_back(store, begun)
    named = named - {entry.key for entry in kept if not entry.part} | {*needed}
    found = [entry for key in sorted(named) if (entry := store.ledger.find(key))]
    below = bases(store, _policy_keys([*kept, *found])) - {entry.key for entry in (*kept, *found)}
    found += [entry for key in sorted(below) if (entry := store.ledger.find(key))]
    standing = [entry for entry in found if entry.run in removed]
    ids = {entry.row_id for entry in standing}
    going = [entry for entry in every if entry.run in removed and entry.row_id not in ids]
    return going, standing, [*kept, *standing]


def _policy_keys(entries: Iterable[Entry]) -> list[str]:
    return list(dict.fromkeys(entry.key for entry in entries if entry.slices("policies")))
