"""Foretelling: walk the pipeline without computing anything, to know what would be."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from configs.run import RunConfig
from flows.queries.step_history import step_history
from flows.replays.steps import quarantined_in, replay_steps
from flows.runtime import pipeline
from flows.runtime.evaluation_sets import evaluation_contexts
from flows.runtime.group_refill import missing_groups
from flows.runtime.pipeline import EmptyBatch, Source, StepBatch, attempts
from storage.refs import Entry
from tasks.assignment.evaluation_retries import errored_assignments
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.run_context import RunContext, StageKeys
from tasks.runtime.stage import Policy, Ref, inputs_of, ref_of

Find = Callable[[str], Entry | None]
"""Returns the finished work of a key, or None."""
Decided = Callable[[Entry], Mapping[str, Any]]
"""Returns the row of a decision that was made at a gate."""
Errored = Callable[[Entry], int]
"""Returns how many assignments of finished rollouts ended with an error."""
Missing = Callable[[Sequence[Ref], Ref], Mapping[str, int]]
"""Returns how many groups of finished assignments the finished credits leave to be replaced, by environment."""


class DryRun:
    """Computes nothing: says for every piece of work its key and whether it is found."""

    def __init__(
        self,
        config: RunConfig,
        find: Find,
        decided: Decided = lambda entry: {"approved": True},
        missing: Missing = lambda assigned, credits: {},
        num_errored: Errored = lambda entry: 0,
    ) -> None:
        self._name = config.name
        self.evaluation = config.evaluation
        """What is evaluated, where this foretells evaluations: one set."""
        self._keys = StageKeys(config)
        self._find = find
        self._decided = decided
        self._missing = missing
        self._num_errored = num_errored
        self.tasks: list[StageTask] = []
        self.pieces: list[Ref] = []
        """The work, found or to come, in the order of `tasks`."""

    def __call__(
        self,
        task: StageTask,
        step: int,
        refs: Sequence[Ref] = (),
        policy: Policy | None = None,
        parameters: Mapping[str, Any] | None = None,
        extra_inputs: Mapping[str, str] | None = None,
    ) -> Ref:
        """Return the reference to the work, finished or to come; work to come is taken to make one row a table."""
        stage = task.stage
        key = self._keys(stage, step, inputs_of(refs, policy) | dict(extra_inputs or {}))
        entry = self._find(key)
        unknown = Ref(stage.name, step, key, tuple((table, 1) for table in stage.writes), 0, 0.0, computed=True)
        self.tasks.append(task)
        self.pieces.append(ref_of(entry, computed=False) if entry else unknown)
        return self.pieces[-1]

    def share(self, entry: Entry, step: int) -> Ref:
        """Return the reference to finished work of another run; it is no work of this one."""
        return ref_of(entry, computed=False)

    def decision(self, ref: Ref) -> Mapping[str, Any] | None:
        """Return the row of a decision at a gate; None where it is still to be made."""
        entry = self._find(ref.key)
        return self._decided(entry) if entry else None

    def missing(self, assigned: Sequence[Ref], credits: Ref) -> Mapping[str, int]:
        """Return how many groups are to be replaced, by environment; none where the credits are still to be given."""
        return self._missing(assigned, credits) if self._find(credits.key) else {}

    def num_errored(self, ref: Ref) -> int:
        """Return how many assignments of some rollouts ended with an error; none where they are still to be made."""
        entry = self._find(ref.key)
        return self._num_errored(entry) if entry else 0

    def explained(self, empty: Sequence[StepBatch]) -> str:
        """Return nothing: nobody reads it, as what is foretold ends there too."""
        return ""

    def done(self, task: StageTask, step: int, refs: Sequence[Ref], policy: Policy) -> bool:
        """Tell whether the run itself has finished a stage before, or has taken it over from another run."""
        entry = self._find(self._keys(task.stage, step, inputs_of(refs, policy)))
        return entry is not None and entry.run == self._name


def plan_work(place: RunContext, source: Source, policy: Policy | None = None) -> list[Ref]:
    """Return every piece of work that the run of `place` consists of, once, found or still to be computed.

    Of a run that ended because nothing was left to train on, or a rule refused it, those are the pieces up to there.
    """

    def decided(entry: Entry) -> Mapping[str, Any]:
        row: Mapping[str, Any] = place.store.read(entry.slices("decisions")).to_pylist()[0]
        return row

    def lacking(assigned: Sequence[Ref], credits: Ref) -> Mapping[str, int]:
        return missing_groups(place, assigned, credits)

    def num_errored(entry: Entry) -> int:
        return len(errored_assignments(place.store.read(entry.slices("traces"), ["assignment_id", "error_class"])))

    tell = DryRun(place.config, place.find, decided, lacking)
    sets = [DryRun(each.config, each.find, num_errored=num_errored) for each in evaluation_contexts(place).values()]
    with suppress(EmptyBatch, pipeline.GateRefused):
        if place.config.kind == "replay":
            _walk_replay(place, source, tell)
        else:
            _walk(place.config, source, tell, sets, policy)
    return list({piece.key: piece for each in (tell, *sets) for piece in each.pieces}.values())


def _walk_replay(place: RunContext, source: Source, tell: DryRun) -> None:
    replay = place.config.replay
    recorded, quarantined = step_history(place.store, replay.run), quarantined_in(place.store, replay)
    for _ in replay_steps(tell, source, place.config, recorded, quarantined):
        pass


def _walk(config: RunConfig, source: Source, tell: DryRun, sets: Sequence[DryRun], policy: Policy | None) -> None:
    retries = config.evaluation.retry_errors
    if config.kind == "evaluate":
        tried = None if config.external else policy or pipeline.first_policy(tell, source)
        for each in sets:
            attempts(each, tried, retries)
        return
    training = config.kind == "train"
    due = [each for each in sets if training and each.evaluation.every]
    if due:
        _evaluate(due, pipeline.first_policy(tell, source), retries)
    for *_, made in pipeline.run_steps(tell, source, config):
        _evaluate(due, made, retries)


def _evaluate(sets: Sequence[DryRun], policy: Policy, retries: int) -> None:
    for each in sets:
        if each.evaluation.due(policy.version):
            attempts(each, policy, retries)
