"""Thinning: which policies of a run keep their weights. Rows in tables are not its business and all stay."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from storage.adapters import bases
from storage.errors import StoreError
from storage.refs import Entry
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
