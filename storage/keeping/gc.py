"""What a store can do without: the work of runs that nobody keeps, and weights between those that are kept.

A plan is made first and changes nothing; `storage.keeping.sweeping` carries it out. What a kept run's rows name stays,
whoever computed it: the slices of its rows, and the rows of the keys that went into them (one step up: the policy that
an evaluation tried, say).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from storage.errors import RunUnknown, StoreError
from storage.keeping.activity import unfinished, why_protected
from storage.keeping.thinning import KEEP_ALL, Thinning, thin
from storage.refs import Entry, Slice
from storage.runs import REMOVED
from storage.store import Store


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


def plan(store: Store, keep: Collection[str], force: Collection[str] = (), thinning: Thinning = KEEP_ALL) -> Plan:
    """Find out what goes when only the runs `keep` are kept, and of their policies those that `thinning` says.

    Runs without a finished event, or that finished just now, stay unless `force` names them; nor are the policies of
    unfinished runs thinned then. Raises RunUnknown for a name that is no run of the store, StoreError for one in both.
    """
    runs = runs_in(store)
    _check_names(runs, keep, force)
    reasons = {run: why_protected(store, run) for run in runs if run not in force}
    spared = {run: why for run, why in reasons.items() if why and run not in keep}
    removed = [run for run in runs if run not in keep and run not in spared]
    rows, staying, left = _rows(store, removed)
    live = {piece for entry in left for piece in entry.outputs}
    slices = dict.fromkeys(piece for entry in rows for piece in entry.outputs if piece not in live)
    keys = {entry.key for entry in left}
    policies = [key for key in _policy_keys(rows) if key not in keys and store.policies.find(key)]
    thinned = thin(store, left, thinning, spare={run for run in runs if run not in force and unfinished(store, run)})
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
    there = [run for run in named if run in with_rows or store.runs.events(run)[-1].event != REMOVED]
    return [*sorted(with_rows - {*named}), *there]


def _check_names(runs: Sequence[str], keep: Collection[str], force: Collection[str]) -> None:
    safe = "nothing was removed"
    if unknown := sorted({*keep, *force} - {*runs}):
        known = f"the runs are: {', '.join(runs) or 'none'}"
        raise RunUnknown(f"there is no run {', '.join(unknown)}", known, safe, "check the names")
    if both := sorted({*keep} & {*force}):
        raise StoreError(f"{', '.join(both)}: kept and forced to go at once", "", safe, "say one of the two")


def _rows(store: Store, removed: Collection[str]) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """The rows of removed runs that go, those that stay because they are named, and all that will be left."""
    every = store.ledger.entries()
    kept = [entry for entry in every if entry.run not in removed]
    named = {key for entry in kept for key in entry.inputs.values()} - {e.key for e in kept if not e.part}
    standing = [entry for key in sorted(named) if (entry := store.ledger.find(key))]
    ids = {entry.row_id for entry in standing}
    going = [entry for entry in every if entry.run in removed and entry.row_id not in ids]
    return going, standing, [*kept, *standing]


def _policy_keys(entries: Iterable[Entry]) -> list[str]:
    return list(dict.fromkeys(entry.key for entry in entries if entry.slices("policies")))
