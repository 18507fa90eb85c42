"""What a run recorded, step by step, found by walking its ledger rows from the last work of a step to the first."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from configs.load import from_json
from configs.replay import redone
from storage.keys import canonical
from storage.refs import Entry
from storage.store import Store
from tasks.runtime.run_context import LOOK_SECONDS
from tasks.runtime.stage import Policy

SAMPLING = ("rollout", "demonstration", "import")
"""Stages whose work is the traces of a step; a replay knows all of them as `rollout`."""
SEVERAL = ("assignment", "rollout")
"""Stages of which a step has more work than one where groups were replaced; the second is named `rollout.1`."""
WAY = ("examples", "assignment", "rollout", "regrade", "filtering", "reference", "advantage", "packing", "training")
"""The stages of a step, in order, as a replay names them."""


@dataclass(frozen=True)
class RecordedStep:
    """One recorded step: the work that belongs together, and the policy that the step began with."""

    step: int
    work: Mapping[str, Entry]
    """Finished work by stage, named as in WAY, in that order; an unfinished step lacks the last ones."""
    policy: Entry | None
    """The work that made the policy which the step trained, or would have; None where weights never came in."""

    def of(self, stage: str) -> dict[str, Entry]:
        """Return all work of a stage by name, in order: several where groups of the step were replaced."""
        found = [name for name in self.work if name.partition(".")[0] == stage]
        return {name: self.work[name] for name in sorted(found, key=_number)}


class Recorded:
    """The steps that a run recorded."""

    def __init__(
        self, store: Store, run: str, source: "Recorded | None" = None, along: bool = False, fills: bool = False
    ) -> None:
        self._store = store
        self._run = run
        self._source = source
        """What a replay went through again: its steps that it did not train start from policies of that run."""
        self._along = along
        """Whether a replay trained along, each step from the policy that it made before."""
        self.fills = fills
        """Whether the run replaced groups: then only packing says that a step has all its rollouts."""

    @cached_property
    def steps(self) -> dict[int, RecordedStep]:
        """The recorded steps by number; of a step that was drawn more than once, the last batch counts."""
        latest: dict[int, Entry] = {}
        for entry in self._entries:
            known = latest.get(entry.step)
            if _stage(entry) in WAY[1:]:  # examples are of the run, not of a step
                latest[entry.step] = entry if known is None else max(known, entry, key=_progress)
        return {step: RecordedStep(step, self._work(last), self._policy(last)) for step, last in sorted(latest.items())}

    @property
    def first_policy(self) -> Entry | None:
        """The work that brought in the weights that the run started from, None where it had none."""
        return next((entry for entry in self._entries if entry.stage == "policy_import"), None)

    def sampler(self, past: RecordedStep) -> Policy | None:
        """Return the policy that sampled a step's rollouts; None where none of the store did."""
        key = past.work["rollout"].inputs.get("policy") if "rollout" in past.work else None
        entry = self._store.ledger.find(key, run=self._run) if key else None
        return policy_of(entry, 0) if entry else None

    def state_of(self, assigned: Entry) -> list[Entry]:
        """Return the work that an assignment knows from which examples are hard: an earlier one, and its rollouts."""
        names = [name for name in assigned.inputs if name.partition(".")[0] in (*SEVERAL, "regrade")]
        found = (self._find(assigned.inputs[name]) for name in sorted(names, key=_number))
        return [entry for entry in found if entry is not None]

    def credits_before(self, step: int) -> Entry | None:
        """Return the credits from whose state those of a step go on: as its own did, or else those of the step before.

        Those of a replay's first step are of the run that it went through again, and no step of its own.
        """
        own, earlier = self._credits(step), self._credits(step - 1)
        key = own.inputs.get("advantage") if own else None
        return self._find(key) if key else earlier

    def judged_before(self, step: int) -> Iterator[Entry]:
        """Yield the filterings whose kept rollouts are in the state that a step's credits go on from, last first."""
        entry = self.credits_before(step)
        while entry is not None:
            if (judged := self._find(entry.inputs["filtering"])) is not None:
                yield judged
            key = entry.inputs.get("advantage")
            entry = self._find(key) if key else None

    def _credits(self, step: int) -> Entry | None:
        past = self.steps.get(step)
        return past.work.get("advantage") if past else None

    def _find(self, key: str) -> Entry | None:
        return self._store.ledger.find(key, run=self._run, staleness=LOOK_SECONDS)

    @cached_property
    def _entries(self) -> list[Entry]:
        of_run = self._store.ledger.entries(run=self._run)
        return [each for each in of_run if not each.part and "evaluation_assignment" not in each.inputs]

    def _work(self, last: Entry, number: str = "") -> dict[str, Entry]:
        """Return the work that `last` was made of, itself included, by stage; `number` is that of an assignment's.

        Only what comes before it on the way through a step: from other work of its stage, or from rollouts that say
        which examples to try, it has a state.
        """
        stage = _stage(last)
        found = {f"{stage}{number}" if stage in SEVERAL else stage: last}
        for name, key in last.inputs.items():
            role, dot, other = name.partition(".")
            if _role(role) not in WAY[: WAY.index(stage)]:
                continue
            if (entry := self._find(key)) is not None:
                found = self._work(entry, dot + other or number) | found
        return found

    def _policy(self, last: Entry) -> Entry | None:
        if last.stage == "training":
            return self._find(last.inputs["policy"])
        # A step that was not trained would have gone on from the last policy before it.
        made = [entry for entry in self._entries if entry.stage == "training" and entry.step < last.step]
        if made and (self._source is None or self._along):
            return max(made, key=lambda entry: entry.step)
        return self.first_policy or self._of_source(last.step)

    def _of_source(self, step: int) -> Entry | None:
        """The policy of the recorded run that a replay's step started from."""
        if self._source is None:
            return None
        begun = min(entry.step for entry in self._entries if _stage(entry) in WAY[1:]) if self._along else step
        past = self._source.steps.get(begun)
        return past.policy if past else None


def recorded_by(store: Store, run: str) -> Recorded:
    """Return what a run recorded; of a replay, with the run that it went through again behind it."""
    config = from_json(canonical(store.runs.config(run)))
    drew = config.kind == "train" or {"assignment", "advantage", "packing"} <= {*redone(config.replay)}
    fills = drew and config.assignment.refill
    if config.kind != "replay" or config.replay.run not in store.runs.names():
        return Recorded(store, run, fills=fills)
    along = config.replay.policies == "own" and "training" in redone(config.replay)
    return Recorded(store, run, recorded_by(store, config.replay.run), along, fills)


def policy_of(entry: Entry, step: int) -> Policy:
    """Return the policy that finished work of training or import made; weights that came in are those of `step`."""
    return Policy(entry.key, entry.step + 1 if entry.stage == "training" else step)


def trace_ids(store: Store, entry: Entry) -> list[str]:
    """Return the ids of the traces that finished work made."""
    return [str(name) for name in store.read(entry.slices("traces"), ["trace_id"])["trace_id"].to_pylist()]


def _number(name: str) -> int:
    """Return which one of its stage some work is, by its name: `rollout.1` is the second."""
    return int(name.partition(".")[2] or 0)


def _role(name: str) -> str:
    return "rollout" if name in SAMPLING else name


def _stage(entry: Entry) -> str:
    return _role(entry.stage)


def _progress(entry: Entry) -> tuple[int, object]:
    return WAY.index(_stage(entry)), entry.finished_at
