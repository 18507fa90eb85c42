"""What a store can do without: the work of removed runs, and weights between those that are kept."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from storage.errors import RunUnknown, StoreError
from storage.maintenance.activity import unfinished, why_protected
from storage.policies.adapters import bases
from storage.refs import Entry, Slice
from storage.runs import REMOVED
from storage.store import Store


@dataclass(frozen=True)
class Thinning:
    """Which versions keep their weights: `all`, the `last` one, or `every` n-th and the last."""

    kind: str
    every: int = 0

    @classmethod
    def parse(cls, text: str) -> "Thinning":
        """Read `all`, `last` or `every:N`; StoreError for anything else."""
        kind, _, number = text.partition(":")
        if text in ("all", "last"):
            return cls(text)
        if kind == "every" and number.isdecimal() and int(number) > 0:
            return cls("every", int(number))
        raise StoreError(f"{text!r} is no way to thin policies", "", "nothing was removed", "say all, last or every:N")

    def wants(self, version: int) -> bool:
        """Whether a version is kept for its number."""
        return self.kind == "all" or (self.kind == "every" and version % self.every == 0)


KEEP_ALL = Thinning("all")


def thin(
    store: Store,
    entries: Iterable[Entry],
    thinning: Thinning,
    spare: Collection[str] = (),
    needed: Collection[str] = (),
) -> list[str]:
    """The keys of policies whose weights go, sorted; of the runs `spare`, and of the keys `needed`, none goes.

    Besides what `thinning` keeps, a run keeps its first policy (it starts from it), its last, the way back from the
    last to the nearest with optimizer state (it goes on from there), and every policy that a run tried without having
    made or taken it over itself (it was asked for by name). What one run keeps, no other takes from it, nor what a kept
    adapter is laid over.
    """
    if thinning.kind == "all":
        return []
    by_run: dict[str, dict[str, Mapping[str, Any]]] = {}
    tried: dict[str, set[str]] = {}
    for entry in entries:
        tried.setdefault(entry.run, set()).update(key for name, key in entry.inputs.items() if name == "policy")
        if entry.slices("policies"):
            by_run.setdefault(entry.run, {})[entry.key] = _row(store, entry)
    kept = {key for run, keys in tried.items() for key in keys - set(by_run.get(run, {}))} | {*needed}
    for run, made in by_run.items():
        kept |= set(made) if run in spare else _kept(made, thinning)
    kept |= bases(store, kept)
    return sorted(key for made in by_run.values() for key in made if key not in kept and store.policies.find(key))


def ways_back(store: Store, keys: Iterable[str]) -> set[str]:
    """What leads from policies back to the nearest with optimizer state: keys of policies and of what they are made of.

    Whoever trains on from a policy whose optimizer state was not saved trains its recorded batches again.
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


def _kept(made: Mapping[str, Mapping[str, Any]], thinning: Thinning) -> set[str]:
    order = sorted(made, key=lambda key: made[key]["version"])
    kept = {order[0], *(key for key in order if thinning.wants(made[key]["version"]))}
    last = made[order[-1]]
    while not last["has_optimizer"] and last["parent_key"] in made:
        kept.add(last["parent_key"])
        last = made[last["parent_key"]]
    return kept | {order[-1]}


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


def needed_by(store: Store, runs: Collection[str], needed: Collection[str] = ()) -> list[Entry]:
    """The rows of some runs, and of others those that they need; `needed` are further keys, see `Needs`."""
    others = {entry.run for entry in store.ledger.entries()} - {*runs}
    return _rows(store, others, needed)[2]


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
