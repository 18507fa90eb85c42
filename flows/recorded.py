"""What a run recorded, step by step, found by walking its ledger rows from the last work of a step to the first."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from storage.refs import Entry
from storage.store import Store
from tasks.place import LOOK_SECONDS
from tasks.stage import Policy

SAMPLING = ("rollout", "demonstration", "import")
"""Stages whose work is the traces of a step; a replay knows all of them as `rollout`."""
WAY = ("examples", "assignment", "rollout", "regrade", "filtering", "advantage", "packing", "training")
"""The stages of a step, in order, as a replay names them."""


@dataclass(frozen=True)
class RecordedStep:
    """One recorded step: the work that belongs together, and the policy that the step began with."""

    step: int
    work: Mapping[str, Entry]
    """Finished work by stage, named as in WAY; an unfinished step lacks the last ones."""
    policy: Entry | None
    """The work that made the policy which the step trained, or would have; None where weights never came in."""


class Recorded:
    """The steps that a run recorded."""

    def __init__(self, store: Store, run: str, first_step: int = 0) -> None:
        self._store = store
        self._run = run
        self._first_step = first_step

    @cached_property
    def steps(self) -> dict[int, RecordedStep]:
        """The recorded steps by number; of a step that was drawn more than once, the last batch counts."""
        latest: dict[int, Entry] = {}
        for entry in self._entries:
            known = latest.get(entry.step)
            if entry.step >= self._first_step and _stage(entry) in WAY[1:]:  # examples are of the run, not of a step
                latest[entry.step] = entry if known is None else max(known, entry, key=_progress)
        return {step: RecordedStep(step, self._work(last), self._policy(last)) for step, last in sorted(latest.items())}

    @property
    def first_policy(self) -> Entry | None:
        """The work that brought in the weights that the run started from, None where it had none."""
        return next((entry for entry in self._entries if entry.stage == "policy_import"), None)

    @cached_property
    def _entries(self) -> list[Entry]:
        of_run = self._store.ledger.entries(run=self._run)
        return [each for each in of_run if not each.part and "evaluation_assignment" not in each.inputs]

    def _work(self, last: Entry) -> dict[str, Entry]:
        """Return the work that `last` was made of, itself included, by stage."""
        found = {_stage(last): last}
        for name, key in last.inputs.items():
            entry = self._store.ledger.find(key, run=self._run, staleness=LOOK_SECONDS) if _role(name) in WAY else None
            if entry is not None:
                found = self._work(entry) | found
        return found

    def _policy(self, last: Entry) -> Entry | None:
        if last.stage == "training":
            return self._store.ledger.find(last.inputs["policy"], run=self._run)
        # A step that was not trained would have gone on from the last policy before it.
        made = [entry for entry in self._entries if entry.stage == "training" and entry.step < last.step]
        return max(made, key=lambda entry: entry.step, default=self.first_policy)


def recorded_by(store: Store, run: str) -> Recorded:
    """Return what a run recorded; of a replay not the policy of the step before its first, which it took over."""
    config = store.runs.config(run)
    return Recorded(store, run, config["replay"]["first_step"] if config["kind"] == "replay" else 0)


def policy_of(entry: Entry) -> Policy:
    """Return the policy that finished work of training or import made."""
    return Policy(entry.key, entry.step + 1 if entry.stage == "training" else 0)


def trace_ids(store: Store, entry: Entry) -> list[str]:
    """Return the ids of the traces that finished work made."""
    return [str(name) for name in store.read(entry.slices("traces"), ["trace_id"])["trace_id"].to_pylist()]


def _role(name: str) -> str:
    return "rollout" if name in SAMPLING else name


def _stage(entry: Entry) -> str:
    return _role(entry.stage)


def _progress(entry: Entry) -> tuple[int, object]:
    return WAY.index(_stage(entry)), entry.finished_at
