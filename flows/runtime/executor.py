"""Executor: finds the results of a run's stages in the ledger or computes them; a dry run only says which.

RolloutSource: the assignments and rollouts of each step, in the order of the steps. Up to one step off-policy, a step's
rollouts are those of its own assignments. With more steps of lag (`rollout.max_off_policy_steps`) all steps share a
RolloutQueue, and a step takes the groups that end first. The queue's assignments are made ahead of their steps, so a
sampler with state continues from what was trained on by then: the rollouts of the step that made the policy with which
an assignment joins the queue. They are inputs of the assignment, so a resumed run, and another run of the same key,
chooses the same examples. Owned by the training loop; called by the thread that builds a step's batch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from configs.run import RunConfig, View, only_teachers_sample
from storage.keys import content_key
from storage.refs import Entry
from tasks.advantage import reference
from tasks.advantage import stage as advantage
from tasks.assignment import stage as assignment
from tasks.filtering import stage as filtering
from tasks.judging import stage as judging
from tasks.metrics import stage as metrics
from tasks.metrics.accounting import COLUMNS as TRACE_COLUMNS
from tasks.metrics.accounting import AccountBreach, account_step
from tasks.packing import stage as packing
from tasks.rollout import demonstration, preference
from tasks.rollout import stage as rollout
from tasks.rollout.queue import RolloutQueue
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.run_context import RunContext, StageKeys
from tasks.runtime.stage import Policy, Ref, inputs_of, perform, ref_of
from tasks.stages import shown_stage
from tasks.training import stage as training

if TYPE_CHECKING:
    from flows.runtime.session import Session

FIRST_REPLACEMENT = 1000
"""Number, among the batches of a step, of the first one that replaces stale groups; `filtering.max_batch_attempts`
bounds the numbers of the others below it."""
Refs = tuple[Ref, ...]


@dataclass(frozen=True)
class StepBatch:
    """The stage results of one step, from its assignments to its packed batches."""

    assignments: Refs
    """Several where groups were replaced."""
    traces: Refs
    """The rollouts of each assignment in turn; before them, where there are any, the judged and the regraded ones."""
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
        """The stages that were asked for and their results, found or to come, in order; of a session its metrics only,
        which gates read: the results of all steps would grow with the run."""

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
        if session is None or ref.stage == metrics.STAGE.name:
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
    tables: dict[str, pa.Table] = {
        **{table: context.table(table, batch.traces) for table in groups},
        "assignments": context.table("assignments", batch.assignments, ["assignment_id"]),
        "traces": context.table("traces", batch.traces, TRACE_COLUMNS),
        "verdicts": context.table("verdicts", [batch.filtering], ["trace_id", "keep", "reason"]),
        "samples": context.table("samples", [batch.advantage], ["sample_id", "trace_id"]),
        "batches": context.table("batches", [batch.packing], ["sample_ids"]),
    }
    try:
        account_step(tables)
    except AccountBreach as error:
        # `account` knows tables alone, not their run.
        error.add_note(f"Run {context.run}, step {batch.packing.step}, between the stages packing and training.")
        raise


class RolloutSource:
    """Assigns examples to steps and returns the rollouts of each."""

    def __init__(self, execute: Executor, examples: Ref, recorded: Mapping[str, str] | None = None) -> None:
        """`recorded` names the work whose rollouts a run of preferences learns from."""
        config, lag = execute.config, execute.config.rollout.max_off_policy_steps
        self.execute, self._examples, self._config, self._recorded = execute, examples, config, recorded
        waits, has_surplus = config.rollout.stale == "wait", config.oversampling is not None
        self.queue = RolloutQueue(execute.rows, lag, waits, has_surplus) if config.streams else None
        """Shared by all steps; None where each step samples its own assignments."""
        # How policies are made from rollouts, and how far these are ahead: with the oldest policy that may sample for a
        # step it identifies the younger ones, which are not known beforehand.
        tasks = [filtering.task, reference.task, advantage.task, packing.task, training.task]
        tasks[:0] = [judging.task] if config.judges else []
        stages = [(each.stage, View(config, each.stage.sections, each.stage.name)) for each in tasks]
        self._digest = content_key([lag, [[stage.name, stage.version, view.content()] for stage, view in stages]])
        self._assigned: dict[int, Ref] = {}
        """The first assignment of each step of the queue."""
        self._taken: dict[int, list[Ref]] = {}
        """The results that each step took from the queue, batches that were given up among them."""
        self._num_surplus = 0
        """Groups that the steps so far assigned and need not take; below 0 groups are missing."""

    def add(self, steps: Sequence[int], policy: Policy) -> None:
        """Let `policy` sample for the queue, and add the first assignments of `steps` to it."""
        if self.queue is None or not steps:
            return
        # In one go: each further addition makes the sampler look again.
        for step in steps:
            state: Refs = ()
            if step and self._config.assignment.sampler.stateful:
                # The rollouts that were trained on last when the step is assigned are lag + 1 steps older.
                last_trained = step - 1 - self._config.rollout.max_off_policy_steps
                state = self._assigned[step - 1], *self._taken.get(last_trained, ())
            self._assigned[step] = assign(self.execute, step, self._examples, 0, state)
        self.queue.add([self._assigned[step] for step in steps], policy)

    def close(self) -> None:
        """Stop what the queue samples: no step takes it."""
        if self.queue:
            self.queue.close()

    def assign(self, step: int, batch: int, previous: Sequence[Ref], groups: Mapping[str, int] | None = None) -> Ref:
        """Return an assignment of a step, arguments as in `assign`; one that is new is sampled by the queue, too."""
        if self.queue is None:
            return assign(self.execute, step, self._examples, batch, previous, groups)
        if not batch:
            return self._assigned[step]
        further = assign(self.execute, step, self._examples, batch, previous, groups)
        # As many groups go in as the step takes beyond its own, so that none of the steps to come lacks any.
        self.queue.add([further])
        return further

    def sample(self, step: int, assigned: Ref, policy: Policy | None) -> Ref:
        """Return rollouts of an assignment, or as many groups of the queue; `policy` is the oldest that may sample.

        Supervised runs take demonstrations, and those of preferences recorded rollouts, in place of rollouts.
        """
        inputs = assigned, self._examples
        if self.queue is None:
            if self._config.from_data:
                # No policy: data are the same whichever policy learns from them, and so is their key.
                task = demonstration.task if self._config.kind == "sft" else preference.task
                return self.execute(task, step, inputs, extra_inputs=self._recorded)
            return self.execute(rollout.task, step, inputs, sampling_policy(policy, self._config))
        key = {"stream": self._digest}
        taken = self.execute(rollout.queue_task, step, inputs, policy, parameters=self.queue, extra_inputs=key)
        self.queue.mark_recorded(taken)
        self._taken.setdefault(step, []).append(taken)
        num_assigned = self.execute.num_rows("assignments", assigned) // self._config.assignment.group_size
        # By recorded rows alone, so that it is the same however often the run is called.
        num_placed = self.execute.num_rows("intakes", taken) + self.execute.num_rows("stale_groups", taken)
        self._num_surplus += num_assigned - num_placed
        if self._num_surplus < 0 and step + 1 < self._config.steps:
            self.queue.add([self._replace(step, taken)])
            self._num_surplus = 0
        return taken

    def judge(self, step: int, sampled: Ref) -> Refs:
        """Return the rollouts of one result as judges scored them; none without judges."""
        return (self.execute(judging.task, step, (sampled, self._examples)),) if self._config.judges else ()

    def _replace(self, step: int, taken: Ref) -> Ref:
        """Assign as many groups as are missing in place of those that were stale when a step was filled."""
        batch = FIRST_REPLACEMENT + len(self._taken[step]) - 1
        count, keeps_examples = -self._num_surplus, self._config.rollout.stale == "top_up"
        digests = {"batch": str(batch), "replaces": str(count)} | ({"keeps_examples": "true"} if keeps_examples else {})
        state = (self._assigned[step],) if self._config.assignment.sampler.stateful else ()
        request = assignment.BatchRequest(batch, replaces=count, keeps_examples=keeps_examples)
        refs = (self._examples, *state, taken)
        return self.execute(assignment.task, step, refs, parameters=request, extra_inputs=digests)


def assign(
    execute: Executor,
    step: int,
    examples: Ref,
    batch: int,
    previous: Sequence[Ref],
    groups: Mapping[str, int] | None = None,
) -> Ref:
    """Choose the examples of a batch of a step.

    `groups` has numbers of groups by environment, and then `previous` are the assignments of the step so far; else
    `previous` are the results of the batch before, which only a sampler with state reads.
    """
    # The first batch has no number in its key, so that it is the same whatever comes after it.
    digests = {"batch": str(batch)} if batch else {}
    digests |= {"groups": json.dumps(groups, sort_keys=True)} if groups else {}
    refs = (examples, *previous) if groups or execute.config.assignment.sampler.stateful else (examples,)
    request = assignment.BatchRequest(batch, groups)
    return execute(assignment.task, step, refs, parameters=request, extra_inputs=digests)


def sampling_policy(policy: Policy | None, config: RunConfig) -> Policy | None:
    """Return the policy that rollouts depend on: none where teachers sample all of them."""
    return None if only_teachers_sample(config) else policy
