"""The pipeline: which stage feeds which, in training, supervised warm start and evaluation.

`run_steps` and `build_batch` are the one place that says the order of the stages. An executor runs them or, in a dry
run, only says which results the ledger has: keys depend on nothing that is computed, so what a run, a resumed run or a
changed config would compute is known before anything starts.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

from configs.run import RunConfig, only_teachers_sample, policy_scores
from flows.orchestration.states import EmptyBatch, GateRefused
from flows.runtime.executor import Executor
from flows.runtime.prepare import Source
from flows.runtime.streamed_rollouts import StreamedRollouts
from tasks.advantage import reference
from tasks.advantage import stage as advantage
from tasks.assignment import examples as example_list
from tasks.assignment import stage as assignment
from tasks.filtering import stage as filtering
from tasks.gate import stage as gate
from tasks.metrics import stage as metrics
from tasks.metrics.figures import in_words
from tasks.packing import stage as packing
from tasks.rollout import demonstration
from tasks.rollout import stage as rollout
from tasks.rollout.stream import Stream
from tasks.runtime.stage import Policy, Ref
from tasks.training import policy as policy_import
from tasks.training import stage as training


@dataclass(frozen=True)
class StepBatch:
    """The stage results of one step, from its assignments to its packed batches."""

    assignments: tuple[Ref, ...]
    """What was tried; several where groups were replaced."""
    traces: tuple[Ref, ...]
    """The rollouts, those of each assignment in turn; where they were scored again, first what that made of them."""
    filtering: Ref
    advantage: Ref
    packing: Ref

    @property
    def refs(self) -> tuple[Ref, ...]:
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
    def refs(self) -> tuple[Ref, ...]:
        """The references, in the order of the stages."""
        return *self.batch.refs, self.training, self.metrics


Check = Callable[[StepBatch], None]
"""Looks at a batch before training spends anything on it; raises where rows are unaccounted for."""
Build = Callable[[Callable[[], None]], StepBatch]
"""Builds a batch; calls its argument once the batch has no more use for the engine, unless it turns out to be empty."""


class Building(NamedTuple):
    """A batch that is being built; both functions raise what building it raises."""

    wait_for_engine: Callable[[], object]
    """Waits until the batch leaves the engine to the next one."""
    wait: Callable[[], StepBatch]
    """Waits for the batch."""


Ahead = Callable[[Build], Building]
"""Starts to build a batch ahead of time."""
Expect = Callable[[Policy], None]
"""Is given a policy as soon as it is made, where the next rollouts will be sampled with it."""
Begin = Callable[[Callable[[], StepBatch]], Callable[[], StepBatch]]
"""Begins some work, after what was begun before; returns what waits for its result and raises what it raises."""


def when_asked(build: Build) -> Building:
    """Build a batch when somebody first waits for it: nothing is ahead of anything."""
    builds, built = [build], list[StepBatch]()

    def wait() -> StepBatch:
        if builds:
            built.append(builds[0](lambda: None))
            builds.clear()  # it holds the batch before, which would hold the one before that
        return built[0]

    return Building(wait, wait)


def run_steps(
    execute: Executor,
    source: Source,
    ahead: Ahead = when_asked,
    check: Check = lambda batch: None,
    begin: Begin = cache,
    expect: Expect = lambda policy: None,
) -> Iterator[FinishedStep]:
    """Run all steps of the executor's config and yield each finished one.

    With `rollout.max_off_policy_steps` 0 the stages run in turn. With 1, the batch of step k + 1 is sampled with the
    policy that step k trains, while it trains: one step off-policy, and neither engine nor learner waits for the other.
    With more, steps take their rollouts from a stream (`run_stream`).
    """
    config = execute.config
    if config.streams:
        yield from run_stream(execute, source, begin, check)
        return
    examples, policy = start(execute, source)
    overlaps = bool(config.rollout.max_off_policy_steps)

    def begin_batch(step: int, policy: Policy, before: Building | None = None) -> Building:
        build = partial(build_batch, execute, step, examples, policy, before)
        # After the last step nothing would train on a further batch, and nobody asks for it.
        return ahead(build) if overlaps and step < config.steps else when_asked(build)

    building = begin_batch(0, policy)
    # While a batch is filtered, passes the gate and is trained on, the next one is sampled.
    following = begin_batch(1, policy, building) if overlaps else None
    for step in range(config.steps):
        finished = learn(execute, step, building.wait(), policy, check, expect if _samples(config, step) else None)
        policy = finished.policy
        if following:
            building, following = following, begin_batch(step + 2, policy, following)
        else:  # with the policy that was just trained, so that no rollout is stale
            building = begin_batch(step + 1, policy, building)
        if following and step + 1 < config.steps:
            # Before the step is handed out: whoever gets it may ask the engine for another policy.
            building.wait_for_engine()
        yield finished


def run_stream(execute: Executor, source: Source, begin: Begin, check: Check) -> Iterator[FinishedStep]:
    """Run all steps with rollouts of a stream, which is sampled while steps train, and yield each finished one.

    As soon as policy v is there, it samples, and the assignments of step v + n are given to the stream, n being
    `rollout.max_off_policy_steps`. A step is made of the first groups that end, whichever step assigned them; all of
    them were sampled at most n policies before. `rollout.stale` says whether a step waits for what is due. A gate stops
    the training, while sampling goes on to that bound.

    Batches are built one after the other, ahead of the training: where the filters leave nothing or too little of a
    step, it takes further groups before the next step takes any, and as many are assigned. Raises EmptyBatch where all
    attempts are used up.
    """
    config = execute.config
    examples, policy = start(execute, source)
    built: list[Callable[[], StepBatch]] = []
    waits, has_surplus = config.rollout.stale == "wait", config.oversampling is not None
    with closing(Stream(execute.rows, config.rollout.max_off_policy_steps, waits, has_surplus)) as stream:
        rollouts = StreamedRollouts(config, stream, assign)
        for step in range(config.steps):
            new = range(len(built), min(step + config.rollout.max_off_policy_steps + 1, config.steps))
            if new:
                rollouts.begin(execute, new, examples, policy)
            for each in new:
                build = partial(_build_after, execute, each, examples, policy, built[-1] if built else None, rollouts)
                built.append(begin(build))
            with stream.meter.learner_waits():
                batch = built[step]()
            finished = learn(execute, step, batch, policy, check)
            policy = finished.policy
            yield finished


def _build_after(
    execute: Executor,
    step: int,
    examples: Ref,
    policy: Policy,
    before: Callable[[], StepBatch] | None,
    rollouts: StreamedRollouts,
) -> StepBatch:
    """Build a batch once the one before has all its groups; raises what building that one raised."""
    if before:
        before()
    building = Building(lambda: None, before) if before else None
    return build_batch(execute, step, examples, policy, building, rollouts=rollouts)


def _samples(config: RunConfig, step: int) -> bool:
    """Tell whether a further batch is sampled with the policy that a step makes, and the engine free for it by then."""
    left = step + 1 + config.rollout.max_off_policy_steps < config.steps
    asks_again = config.assignment.refill or bool(config.scorers)
    return left and not asks_again and not only_teachers_sample(config)


def learn(
    execute: Executor, step: int, batch: StepBatch, policy: Policy, check: Check, expect: Expect | None = None
) -> FinishedStep:
    """Train a policy on a step's batch, once that is checked and let pass, and measure the step."""
    check(batch)
    pass_gate(execute, step, batch, policy)
    trained, made = train(execute, step, batch, policy)
    if expect and trained.computed:  # what is found may have been sampled with already
        expect(made)
    return FinishedStep(step, batch, trained, measure(execute, step, (*batch.refs, trained)), made)


def build_batch(
    execute: Executor,
    step: int,
    examples: Ref,
    policy: Policy,
    before: Building | None = None,
    leave_engine: Callable[[], None] = lambda: None,
    rollouts: StreamedRollouts | None = None,
) -> StepBatch:
    """Make the packed batches of one step: assignment, rollout, filtering, advantage, packing.

    A batch of which the filters leave nothing is sampled again with other examples, unless groups were replaced already
    (`assignment.refill`). `before` is the batch of the step before, which has the engine first, and whose state
    estimators and samplers go on from. `leave_engine` is called when the engine can go on to the next batch's policy.
    `rollouts` is where a stream's come from.

    Raises EmptyBatch after `filtering.max_batch_attempts` empty batches.
    """
    config = execute.config
    # What a sampler with state learns from; others do not have it in their keys (see `assign`).
    known = before.wait() if before and config.assignment.sampler.stateful else None
    earlier = (*known.assignments, *known.traces) if known else ()

    def credit_traces(traces: tuple[Ref, ...]) -> tuple[Ref, Ref]:
        # Only now, as the batch of the step before may still be in the making.
        state = before.wait().advantage if before and config.stateful else None
        return filter_and_credit(execute, step, traces, policy, state)

    def take(execute: Executor, step: int, assigned: Ref, examples: Ref, policy: Policy | None) -> Ref:
        if before:
            before.wait_for_engine()
        if config.assignment.refill or config.scorers:  # which may ask the engine again
            return sample(execute, step, assigned, examples, policy)
        sampled = sample(execute, step, assigned, examples, policy, when_sampled=leave_engine)
        leave_engine()  # also where they were sampled before
        return sampled

    ways = (rollouts.assign, rollouts.sample) if rollouts else (assign, take)
    empty: list[StepBatch] = []
    # Where groups are replaced, `sample_groups` has used up all attempts already.
    for attempt in range(1 if config.assignment.refill else config.filtering.max_batch_attempts):
        groups = sample_groups(execute, step, examples, policy, earlier, credit_traces, attempt, ways)
        assigned, sampled, (verdicts, credits) = groups
        batches = pack(execute, step, sampled, verdicts, credits)
        batch = StepBatch(assigned, sampled, verdicts, credits, batches)
        if batches.num_rows("batches"):
            return batch
        empty.append(batch)
        earlier = (*assigned, *sampled)
    # A step without training has metrics too, or nobody could see why it is empty.
    measure(execute, step, empty[-1].refs)
    what = f"step {step}: {sum(len(each.assignments) for each in empty)} batches in a row hold nothing to train on"
    traces = [ref for batch in empty for ref in batch.traces]
    raise EmptyBatch(f"{what}. {execute.explain_empty(step, traces, [batch.filtering for batch in empty])}")


FilterAndCredit = Callable[[tuple[Ref, ...]], tuple[Ref, Ref]]
"""Filters and credits rollouts; returns both results."""
CreditedGroups = tuple[tuple[Ref, ...], tuple[Ref, ...], tuple[Ref, Ref]]
"""The assignments of a batch, their rollouts, and how these were filtered and credited."""


def sample_groups(
    execute: Executor,
    step: int,
    examples: Ref,
    policy: Policy,
    earlier: Sequence[Ref],
    credit_traces: FilterAndCredit,
    attempt: int = 0,
    ways: tuple[Callable[..., Ref], Callable[..., Ref]] | None = None,
) -> CreditedGroups:
    """Assign groups, sample them, filter and credit their rollouts.

    With `assignment.refill`, groups that teach nothing are replaced (dynamic sampling: DAPO, arXiv 2503.14476). Each
    further assignment has as many groups of each environment as are missing, of other examples and with the same
    policy; all rollouts of the step are filtered and credited together. It ends when no group is missing, or after
    `filtering.max_batch_attempts` assignments with what there is, which may be nothing. `ways` are other functions in
    place of `assign` and `sample`.
    """
    choose, take = ways or (assign, sample)
    assigned: tuple[Ref, ...] = (choose(execute, step, examples, attempt, earlier),)
    sampled: tuple[Ref, ...] = (take(execute, step, assigned[0], examples, policy),)
    credited = credit_traces(sampled)
    config = execute.config
    for number in range(1, config.filtering.max_batch_attempts if config.assignment.refill else 1):
        groups = execute.groups_to_refill(assigned, sampled, credited[1])
        if not groups:
            break
        assigned = (*assigned, choose(execute, step, examples, number, assigned, groups))
        sampled = (*sampled, take(execute, step, assigned[-1], examples, policy))
        credited = credit_traces(sampled)
    return assigned, sampled, credited


def assign(
    execute: Executor,
    step: int,
    examples: Ref,
    batch: int,
    earlier: Sequence[Ref],
    groups: Mapping[str, int] | None = None,
) -> Ref:
    """Say which examples a batch of a step tries.

    `groups` is how many of which environment, and then `earlier` the assignments of the step so far; else `earlier` is
    the work of the batch before, which only a sampler with state reads.
    """
    # The first batch has no number in its key, so that it is the same whatever comes after it.
    digests = {"batch": str(batch)} if batch else {}
    digests |= {"groups": json.dumps(groups, sort_keys=True)} if groups else {}
    refs = (examples, *earlier) if groups or execute.config.assignment.sampler.stateful else (examples,)
    return execute(assignment.task, step, refs, parameters={"batch": batch, "groups": groups}, extra_inputs=digests)


def sample(
    execute: Executor,
    step: int,
    assigned: Ref,
    examples: Ref,
    policy: Policy | None,
    when_sampled: Callable[[], None] | None = None,
) -> Ref:
    """Sample what was assigned; in supervised runs, take the demonstrations in place of rollouts.

    `when_sampled` is called when the last rollout has ended, before all of them are committed.
    """
    if execute.config.kind == "sft":
        # No policy: demonstrations are the same whoever learns from them, and so is their key.
        return execute(demonstration.task, step, (assigned, examples))
    sampled_by = sampling_policy(policy, execute.config)
    return execute(rollout.task, step, (assigned, examples), sampled_by, when_computed=when_sampled)


def sampling_policy(policy: Policy | None, config: RunConfig) -> Policy | None:
    """Return the policy that rollouts depend on: none where teachers sample all of them."""
    return None if only_teachers_sample(config) else policy


def filter_and_credit(
    execute: Executor, step: int, traces: tuple[Ref, ...], policy: Policy, before: Ref | None
) -> tuple[Ref, Ref]:
    """Filter the rollouts of a step and credit those that are kept; arguments as in `credit`."""
    verdicts = execute(filtering.task, step, traces)
    return verdicts, credit(execute, step, traces, verdicts, before, policy)


def credit(
    execute: Executor,
    step: int,
    traces: tuple[Ref, ...],
    verdicts: Ref,
    before: Ref | None,
    sampled_by: Policy | None = None,
) -> Ref:
    """Credit a step's kept rollouts, scored by a reference first where an algorithm has one.

    `before` is the same of the step before, where an estimator has state; `sampled_by` the policy that sampled them,
    which scores them itself where an algorithm wants that.
    """
    # Only then is the policy in the key: a frozen teacher says the same of rollouts of any policy.
    config = execute.config
    policy = sampled_by if policy_scores(config) else None
    scored = (execute(reference.task, step, (*traces, verdicts), policy),) if config.scorers else ()
    # Without state, steps are credited independently, and a replay may begin anywhere.
    states = (before,) if before and config.stateful else ()
    return execute(advantage.task, step, (*traces, verdicts, *scored, *states))


def pack(execute: Executor, step: int, traces: tuple[Ref, ...], verdicts: Ref, credits: Ref) -> Ref:
    """Pack the credited rollouts of a step."""
    config = execute.config
    # Only then is the filtering in the key: a constant length is that of every rollout, those dropped included. Where
    # groups are replaced those that were dropped are no part of the batch.
    counted = (verdicts,) if config.constant_lengths and not config.assignment.refill else ()
    return execute(packing.task, step, (credits, *counted, *traces))


def start(execute: Executor, source: Source) -> tuple[Ref, Policy]:
    """List the examples and bring in the first policy."""
    policy = first_policy(execute, source)
    if source.data_digest:
        file = {"file": source.data_digest}
        listed = execute(example_list.demonstration_task, 0, parameters={"source": source.data}, extra_inputs=file)
        return listed, policy
    return execute(example_list.task, 0), policy


def first_policy(execute: Executor, source: Source) -> Policy:
    """Bring in the weights that the run starts from."""
    digest = {"weights": source.weights_digest}
    parameters = {"source": source.weights}
    return Policy(execute(policy_import.task, 0, parameters=parameters, extra_inputs=digest).key, 0)


def train(execute: Executor, step: int, batch: StepBatch, policy: Policy) -> tuple[Ref, Policy]:
    """Train `policy` on one step's batches; the new policy is named by the stage result that made it."""
    trained = execute(training.task, step, (batch.packing,), policy)
    return trained, Policy(trained.key, step + 1)


def measure(execute: Executor, step: int, refs: Sequence[Ref]) -> Ref:
    """Write the metrics of a step out of what it made; `refs` are all its results but examples and references.

    Where rollouts were scored again, that comes before them.
    """
    # A parameter outside the key: the assignments themselves are in it.
    num_batches = sum(ref.stage == "assignment" for ref in refs)
    return execute(metrics.task, step, refs, parameters={"num_batches": num_batches})


def pass_gate(execute: Executor, step: int, batch: StepBatch, policy: Policy) -> None:
    """Have the step's batch approved where the config has a gate. Raises GateRefused where it is refused.

    What the run has trained on already is not asked about: a gate may be set up later. A rule says the same of the same
    batch for ever; a person decides for one run, and who refused is asked again when it is resumed, which is another
    question with a key of its own. The weights do not depend on it: no key of training does.
    """
    config = execute.config
    off = config.gate.type == "none" or step % config.gate.every
    if off or execute.is_own_result(training.task, step, (batch.packing,), policy):
        return
    refs = (batch.packing, batch.advantage, batch.filtering, *batch.traces)
    # A rule's decision may be shared between runs; a person's holds for the run that was asked about.
    own = {"run": config.name} if config.gate.type == "pause" else {}
    # Each refusal makes the next question another one, with a key of its own; answers stay in the ledger.
    for question in count():
        asked = execute(gate.task, step, refs, extra_inputs=own | ({"question": str(question)} if question else {}))
        decision = execute.decision(asked)
        if decision is None or decision["approved"]:
            return
        # A refusal of a person that was only found, not computed now, is an earlier one: ask the next question.
        if asked.computed or decision["gate"] == "rule":
            measure(execute, step, (*batch.refs, asked))
            raise GateRefused(_refusal(step, decision, config))


def _refusal(step: int, decision: Mapping[str, Any], config: RunConfig) -> str:
    resume = f"stagecoach resume {config.name} --store {config.store}"
    again = (
        f"with another rule: {resume} gate.rule=..." if decision["gate"] == "rule" else f"to be asked again: {resume}"
    )
    lines = (
        f"step {step}: the batch was refused by {decision['decided_by']}: {decision['reason'] or 'no reason given'}",
        f"Figures: {in_words(json.loads(decision['figures']))}",
        "Safe: nothing was trained on it; the batch and all before it are in the store, and so is the decision",
        f"To do: go on {again}; or without a gate: {resume} gate.type=none",
    )
    return "\n  ".join(lines)


def choose_held_out(execute: Executor) -> tuple[Ref, Ref]:
    """List the examples and say which held-out ones are tried; no policy is needed to know."""
    examples = execute(example_list.task, 0)
    return examples, execute(assignment.evaluation_task, 0, (examples,))


def evaluate(execute: Executor, policy: Policy | None, retries: int = 0) -> tuple[Ref, ...]:
    """Try the held-out examples with `policy`, None for someone else's: the same examples and seeds for every policy.

    What ended with an error is tried up to `retries` times more, in results of their own: the rollouts of each retry.
    """
    examples, assigned = choose_held_out(execute)
    # Rollouts of an evaluation are ordered by the policy's version: they belong to no step.
    version = policy.version if policy else 0
    tried = [execute(rollout.task, version, (assigned, examples), policy)]
    while len(tried) <= retries and execute.num_errored(tried[-1]):
        # Only what ended with an error, with other seeds; the first rollouts stay where they are.
        assigned = execute(assignment.evaluation_task, 0, (examples, assigned, tried[-1]))
        tried.append(execute(rollout.task, version, (assigned, examples), policy))
    return tuple(tried)
