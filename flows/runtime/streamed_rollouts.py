"""The rollouts of steps that take them from a stream: who is assigned when, and what a step's intake is keyed by.

An assignment is made ahead of its step, so a sampler with state goes on from what was trained on by then: the rollouts
of the step that made the policy with which the assignment joins the stream. They are inputs of the assignment, so a run
that is called again, and another one of the same key, chooses the same examples.
"""

from collections.abc import Callable, Mapping, Sequence

from configs.run import RunConfig, View
from flows.runtime.executor import Executor
from storage.keys import content_key
from tasks.advantage import reference
from tasks.advantage import stage as advantage
from tasks.assignment import stage as assignment
from tasks.filtering import stage as filtering
from tasks.packing import stage as packing
from tasks.rollout import intake
from tasks.rollout.stream import Stream
from tasks.runtime.stage import Policy, Ref
from tasks.training import stage as training

MAKE_POLICIES = (filtering.task, reference.task, advantage.task, packing.task, training.task)
"""The stages between rollouts and the policy that is trained on them."""
FIRST_REPLACEMENT = 1000
"""The number, among the batches of a step, of the first one that replaces stale groups: those of attempts are below, by
the bound of `filtering.max_batch_attempts`."""
Assign = Callable[[Executor, int, Ref, int, Sequence[Ref], Mapping[str, int] | None], Ref]
"""Says which examples a batch of a step tries (`flows.runtime.pipeline.assign`)."""


class StreamedRollouts:
    """Gives steps their assignments, which the stream samples, and their rollouts out of the stream."""

    def __init__(self, config: RunConfig, stream: Stream, assign: Assign) -> None:
        self._stream = stream
        self._assign = assign
        self._digest = stream_digest(config)
        self._config = config
        self._assigned: dict[int, Ref] = {}
        self._taken: dict[int, list[Ref]] = {}
        """What each step took, batches that were given up among it."""
        self._num_spare = 0
        """Groups that were assigned by the steps so far and that these need not take: below 0 there are too few."""

    def begin(self, execute: Executor, steps: Sequence[int], examples: Ref, policy: Policy) -> None:
        """Let a policy sample, and beside what is assigned already the first assignments of some steps."""
        # All at once, as whatever comes later makes the stream look again.
        for step in steps:
            self._assigned[step] = self._assign(execute, step, examples, 0, self._known_before(step), None)
        self._stream.feed([self._assigned[step] for step in steps], policy)

    def assign(
        self,
        execute: Executor,
        step: int,
        examples: Ref,
        batch: int,
        earlier: Sequence[Ref],
        groups: Mapping[str, int] | None = None,
    ) -> Ref:
        """Return a step's first assignment, or make a further one and let the stream sample that, too."""
        if not batch:
            return self._assigned[step]
        further = self._assign(execute, step, examples, batch, earlier, groups)
        # As many groups go in as the step takes beyond its own, so that none of the steps to come lacks any.
        self._stream.feed([further])
        return further

    def sample(self, execute: Executor, step: int, assigned: Ref, examples: Ref, policy: Policy | None) -> Ref:
        """Take as many groups from the stream as an assignment names; `policy` is the oldest that may sample them."""
        key, given = {"stream": self._digest}, {"stream": self._stream}
        taken = execute(intake.task, step, (assigned, examples), policy, parameters=given, extra_inputs=key)
        self._stream.settle(taken)
        self._taken.setdefault(step, []).append(taken)
        begun = execute.num_rows("assignments", assigned) // self._config.assignment.group_size
        # By what is recorded alone, so that it is the same however often the run is called.
        self._num_spare += begun - execute.num_rows("intakes", taken) - execute.num_rows("stale_groups", taken)
        if self._num_spare < 0 and step + 1 < self._config.steps:
            self._stream.feed([self._replace(execute, step, examples, taken)])
            self._num_spare = 0
        return taken

    def _replace(self, execute: Executor, step: int, examples: Ref, taken: Ref) -> Ref:
        """Assign as many groups as lack in place of those that were stale when a step was filled."""
        batch = FIRST_REPLACEMENT + len(self._taken[step]) - 1
        count, keeps_examples = -self._num_spare, self._config.rollout.stale == "top_up"
        digests = {"batch": str(batch), "replaces": str(count)} | ({"keeps_examples": "true"} if keeps_examples else {})
        known = (self._assigned[step],) if self._config.assignment.sampler.stateful else ()
        parameters = {"batch": batch, "replaces": count, "keeps_examples": keeps_examples}
        refs = (examples, *known, taken)
        return execute(assignment.task, step, refs, parameters=parameters, extra_inputs=digests)

    def _known_before(self, step: int) -> tuple[Ref, ...]:
        """Return what a sampler with state goes on from: the assignment before, and the rollouts that were trained on
        last when the step is assigned, as many steps before it as the stream is ahead, and one."""
        if not step or not self._config.assignment.sampler.stateful:
            return ()
        return self._assigned[step - 1], *self._taken.get(step - 1 - self._config.rollout.max_off_policy_steps, ())


def stream_digest(config: RunConfig) -> str:
    """Return the digest of how policies are made from rollouts, and of how far these are ahead.

    With the oldest policy that may sample for a step it stands for the younger ones, which are not known beforehand.
    """
    stages = (task.stage for task in MAKE_POLICIES)
    made = [[each.name, each.version, View(config, each.sections, each.name).content()] for each in stages]
    return content_key([config.rollout.max_off_policy_steps, made])
