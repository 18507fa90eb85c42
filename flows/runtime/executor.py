"""Executes the stages of a run: finds their results in the ledger or computes them; a dry run only says which.

The pipeline is the same in both cases, so that what a run would compute is known before anything is started for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from configs.run import RunConfig
from storage.refs import Entry
from tasks.metrics import stage as metrics
from tasks.metrics.accounting import COLUMNS as TRACE_COLUMNS
from tasks.metrics.accounting import AccountBreach, account, taken_assignments
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.run_context import RunContext, StageKeys
from tasks.runtime.stage import Policy, Ref, inputs_of, perform, ref_of
from tasks.stages import shown_stage

if TYPE_CHECKING:
    from flows.runtime.session import Session

Refs = tuple[Ref, ...]


@dataclass(frozen=True)
class StepBatch:
    """The stage results of one step, from its assignments to its packed batches."""

    assignments: Refs
    """Several where groups were replaced."""
    traces: Refs
    """The rollouts of each assignment in turn; where they were scored again, first the regraded rollouts."""
    filtering: Ref
    advantage: Ref
    packing: Ref

    @property
    def refs(self) -> Refs:
        """The references, in the order of the stages."""
        return *self.assignments, *self.traces, self.filtering, self.advantage, self.packing


@dataclass(frozen=True)
class FinishedStep:
    """One trained step."""

    step: int
    batch: StepBatch
    training: Ref
    metrics: Ref
    policy: Policy
    """The policy that the step made."""

    @property
    def refs(self) -> Refs:
        """The references, in the order of the stages."""
        return *self.batch.refs, self.training, self.metrics


class Executor:
    """Executes stages for one run, or for one evaluation set of it.

    With a `session` what the ledger does not have is computed, as a Prefect task of the current flow run. Without one
    it is a dry run: results to come are taken to make one row a table. Without a `context` no store is read either,
    and nothing is found.
    """

    def __init__(
        self,
        session: "Session | None" = None,
        context: RunContext | None = None,
        config: RunConfig | None = None,
        label: str = "",
    ) -> None:
        """`label` is the name of the evaluation set, where there are several."""
        self._session = session
        self._label = label
        self._context = context or (session.context if session else None)
        config = config or (self._context.config if self._context else None)
        assert config is not None, "an executor has a session, a context or a config"
        self.config = config
        # Not those of the context: a dry run without a store has none.
        self._keys = StageKeys(config)
        self.results: list[tuple[StageTask, Ref]] = []
        """The stages that were asked for and their results, found, computed or to come, in order."""

    def __call__(
        self,
        task: StageTask,
        step: int,
        refs: Sequence[Ref] = (),
        policy: Policy | None = None,
        parameters: Any = None,
        extra_inputs: Mapping[str, str] | None = None,
    ) -> Ref:
        """Return the reference to a stage's result; a result that is there makes no Prefect task.

        `parameters` is the record that the stage's inputs take; its key has it by `extra_inputs`: digests of inputs
        that are no tables.
        """
        stage, session, context = task.stage, self._session, self._context
        inputs = inputs_of(refs, policy) | dict(extra_inputs or {})
        key = self._keys(stage, step, inputs)
        # The label distinguishes what scores a policy from what is trained on, and one set from the other.
        label = "-".join(filter(None, (shown_stage(stage.name, inputs), self._label)))
        entry = self._find(key)
        if entry is not None:
            ref = self.share(entry, step)
            if session:
                session.count(computed=False)
                session.task_runs.show_found(task, step, label, ref)
        elif session is None or context is None:
            # One row a table: enough for whoever asks whether there are any.
            rows = tuple((table, 1) for table in stage.writes)
            ref = Ref(stage.name, step, key, rows, 0, 0.0, computed=True)
        else:
            if task is not metrics.task:  # takes no time, and a step that was trained is not left without its numbers
                session.stop_if_cancelled(step, stage.name)
            session.notify("stage", stage=stage.name, step=step, evaluating=context is not session.context)
            if stage.may_block:  # whatever is finished does not wait as long
                context.flush_soon()
            # Only the services that the stage asks: they travel with the work to a task runner's workers.
            services = session.services.only(stage.services)
            arguments = tuple(refs), policy, services, parameters, extra_inputs
            ref = session.task_runs.caller(task, step, label)(partial(perform, stage, context, step, *arguments))
            if stage.may_block:  # what took long is not lost while it waits for quick stages
                context.flush_soon()
            session.count(computed=True)
            session.notify("done", ref=ref)
        self.results.append((task, ref))
        return ref

    def check_account(self, batch: StepBatch) -> None:
        """Account for every rollout of a batch that is not all cached. Raises AccountBreach; nothing in a dry run."""
        if self._session and any(ref.computed for ref in batch.refs):  # cached results were checked when computed
            check_account(self._session.context, batch)

    def abort(self) -> None:
        """End the services of a run that fails; nothing in a dry run."""
        if self._session:
            self._session.close()

    def context_of(self, ref: Ref) -> RunContext | None:
        """Return where the rows of a result can be read; None in a dry run where it is still to come."""
        return None if self._session is None and ref.computed else self._context

    def rows(self, table: str, ref: Ref) -> pa.Table:
        """Return the rows of a table that a result made, in a run that computes or where they are recorded."""
        context = self.context_of(ref)
        assert context is not None, f"{ref.stage} {ref.key} is still to come, and so are its rows"
        return context.table(table, (ref,))

    def num_rows(self, table: str, ref: Ref) -> int:
        """Return how many rows of a table a result made; none where it is still to come."""
        return dict(ref.rows).get(table, 0) if self.context_of(ref) else 0

    def is_own_result(self, task: StageTask, step: int, refs: Sequence[Ref], policy: Policy) -> bool:
        """Return whether the run itself has finished a stage before, or has taken it over from another run."""
        # A cached result is not enough: another run may have trained on the same batch without asking.
        entry = self._find(self._keys(task.stage, step, inputs_of(refs, policy)))
        return entry is not None and entry.run == self.config.name

    def _find(self, key: str) -> Entry | None:
        return self._context.find(key) if self._context else None

    def share(self, entry: Entry, step: int) -> Ref:
        """Make a finished result part of this run, in a dry run of none; return the reference to it."""
        if self._session and self._context:
            entry = self._context.adopt(entry, step)
        return ref_of(entry, computed=False)


def check_account(context: RunContext, batch: StepBatch) -> None:
    """Account for every rollout of a step. Raises AccountBreach where one is lost or counted twice."""
    written = {table for ref in batch.traces for table, _ in ref.rows}
    groups = [table for table in ("intakes", "stale_groups") if table in written]
    tables = (
        # With intakes, groups of other steps' assignments are among them.
        taken_assignments(*(context.table(table, batch.traces) for table in groups))
        if "intakes" in written
        else context.table("assignments", batch.assignments, ["assignment_id"]),
        context.table("traces", batch.traces, TRACE_COLUMNS),
        context.table("verdicts", [batch.filtering], ["trace_id", "keep", "reason"]),
        context.table("samples", [batch.advantage], ["sample_id", "trace_id"]),
        context.table("batches", [batch.packing], ["sample_ids"]),
    )
    try:
        account(*tables)
    except AccountBreach as error:
        # `account` knows tables alone, not their run.
        error.add_note(f"Run {context.run}, step {batch.packing.step}, between the stages packing and training.")
        raise
