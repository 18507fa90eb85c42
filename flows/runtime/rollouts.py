"""RolloutSource: the assignments and rollouts of each step of a run, in the order of its steps.

Up to one step off-policy, a step's rollouts are those of its own assignments. With more steps of lag
(`rollout.max_off_policy_steps`) all steps share a RolloutQueue, and a step takes the groups that end first. The queue's
assignments are made ahead of their steps, so a sampler with state continues from what was trained on by then: the
rollouts of the step that made the policy with which an assignment joins the queue. They are inputs of the assignment,
so a resumed run, and another run of the same key, chooses the same examples.

Owned by the training loop. `assign` and `sample` are called by the thread that builds a step's batch; batches of a
queue are built sequentially.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from configs.run import RunConfig, View, only_teachers_sample
from flows.runtime.executor import Executor, Refs
from storage.keys import content_key
from tasks.advantage import reference
from tasks.advantage import stage as advantage
from tasks.assignment import stage as assignment
from tasks.filtering import stage as filtering
from tasks.packing import stage as packing
from tasks.rollout import demonstration
from tasks.rollout import stage as rollout
from tasks.rollout.queue import RolloutQueue
from tasks.runtime.stage import Policy, Ref
from tasks.training import stage as training

MAKE_POLICIES = (filtering.task, reference.task, advantage.task, packing.task, training.task)
"""The stages between rollouts and the policy that is trained on them."""
FIRST_REPLACEMENT = 1000
"""Number, among the batches of a step, of the first one that replaces stale groups; `filtering.max_batch_attempts`
bounds the numbers of the others below it."""


class RolloutSource:
    """Assigns examples to steps and returns the rollouts of each."""

    def __init__(self, execute: Executor, examples: Ref) -> None:
        config, lag = execute.config, execute.config.rollout.max_off_policy_steps
        self.execute, self._examples, self._config = execute, examples, config
        waits, has_surplus = config.rollout.stale == "wait", config.oversampling is not None
        self.queue = RolloutQueue(execute.rows, lag, waits, has_surplus) if config.streams else None
        """Shared by all steps; None where each step samples its own assignments."""
        self._digest = queue_digest(config) if config.streams else ""
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

    def learner_waits(self) -> AbstractContextManager[None]:
        """Within the block, count the time for the load of the queue's sampler."""
        return self.queue.meter.learner_waits() if self.queue else nullcontext()

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

        Supervised runs take demonstrations in place of rollouts.
        """
        inputs = assigned, self._examples
        if self.queue is None:
            if self._config.kind == "sft":
                # No policy: demonstrations are the same whichever policy learns from them, and so is their key.
                return self.execute(demonstration.task, step, inputs)
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


def queue_digest(config: RunConfig) -> str:
    """Return the digest of how policies are made from rollouts, and of how far these are ahead.

    With the oldest policy that may sample for a step it identifies the younger ones, which are not known beforehand.
    """
    stages = (task.stage for task in MAKE_POLICIES)
    content = [[stage.name, stage.version, View(config, stage.sections, stage.name).content()] for stage in stages]
    return content_key([config.rollout.max_off_policy_steps, content])
