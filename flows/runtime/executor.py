"""Doing: walk the pipeline and compute what the ledger does not have."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from flows.runtime.empty_batch import explain_empty_batches
from flows.runtime.group_refill import missing_groups
from flows.runtime.pipeline import StepBatch
from flows.runtime.session import Session
from storage.refs import Entry
from tasks.assignment.evaluation_retries import errored_assignments
from tasks.metrics import stage as metrics
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy, Ref, inputs_of, ref_of


class Executor:
    """Does what the ledger does not have yet, as tasks of the current flow run."""

    def __init__(self, session: Session, place: RunContext | None = None) -> None:
        self._session = session
        self._place = place or session.place

    def __call__(
        self,
        task: StageTask,
        step: int,
        refs: Sequence[Ref] = (),
        policy: Policy | None = None,
        parameters: Mapping[str, Any] | None = None,
        extra_inputs: Mapping[str, str] | None = None,
    ) -> Ref:
        """Return the reference to the finished work; finished work makes no Prefect task, so a resume is instant."""
        place = self._place
        entry = place.find(place.key(task.stage, step, inputs_of(refs, policy) | dict(extra_inputs or {})))
        if entry is not None:
            self._session.count(computed=False)
            return ref_of(place.adopt(entry, step), computed=False)
        if task is not metrics.task:  # takes no time, and a step that was trained is not left without its numbers
            self._session.stop_if_cancelled(step, task.stage.name)
        self._session.tell("stage", stage=task.stage.name, step=step, evaluating=place is not self._session.place)
        with place.unbuffered() if task.waits else nullcontext():  # what took long is not held back for a moment
            ref = task(place, step, refs, policy, self._session.services, parameters, extra_inputs)
        self._session.count(computed=True)
        self._session.tell("done", ref=ref)
        return ref

    def share(self, entry: Entry, step: int) -> Ref:
        """Make finished work of another run part of this one; return the reference to it."""
        return ref_of(self._place.adopt(entry, step), computed=False)

    def decision(self, ref: Ref) -> Mapping[str, Any] | None:
        """Return the row of a decision at a gate."""
        row: Mapping[str, Any] = self._place.table("decisions", (ref,)).to_pylist()[0]
        return row

    def missing(self, assigned: Sequence[Ref], credits: Ref) -> Mapping[str, int]:
        """Return how many groups of the first of some assignments have no replacement yet, by environment."""
        return missing_groups(self._place, assigned, credits)

    def num_errored(self, ref: Ref) -> int:
        """Return how many assignments of some rollouts ended with an error."""
        return len(errored_assignments(self._place.table("traces", (ref,), ["assignment_id", "error_class"])))

    def explained(self, empty: Sequence[StepBatch]) -> str:
        """Return what became of the rollouts of batches that hold nothing to train on, and what to do, in lines."""
        return explain_empty_batches(self._place, empty)

    def done(self, task: StageTask, step: int, refs: Sequence[Ref], policy: Policy) -> bool:
        """Tell whether this run itself has finished a stage before, or has taken it over from another run."""
        entry = self._place.find(self._place.key(task.stage, step, inputs_of(refs, policy)))
        return entry is not None and entry.run == self._place.run
