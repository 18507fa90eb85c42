"""The pipeline: which stage feeds which, in training, supervised warm start and evaluation."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol

from configs.checks.teachers import only_teachers_sample, policy_scores
from configs.run import RunConfig
from tasks.advantage import reference
from tasks.advantage import stage as advantage
from tasks.assignment import examples
from tasks.assignment import stage as assignment
from tasks.filtering import stage as filtering
from tasks.gate import stage as gate
from tasks.metrics import stage as metrics
from tasks.metrics.figures import in_words
from tasks.packing import stage as packing
from tasks.rollout import demonstration
from tasks.rollout import stage as rollout
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.stage import Policy, Ref
from tasks.training import policy as policy_import
from tasks.training import stage as training


class StageExecutor(Protocol):
    """Does a stage, or says what doing it would be."""

    def __call__(
        self,
        task: StageTask,
        step: int,
        refs: Sequence[Ref] = (),
        policy: Policy | None = None,
        parameters: Mapping[str, Any] | None = None,
        extra_inputs: Mapping[str, str] | None = None,
    ) -> Ref: ...

    def decision(self, ref: Ref) -> Mapping[str, Any] | None:
        """Return the row of a decision at a gate; None where it is still to be made, which is taken to let pass."""
        ...

    def missing(self, assigned: Sequence[Ref], credits: Ref) -> Mapping[str, int]:
        """Return how many groups of the first of some assignments have no replacement yet, by environment.

        None where that is still to be found out: what is to come is taken to be enough.
        """
        ...

    def num_errored(self, ref: Ref) -> int:
        """Return how many assignments of rollouts ended with an error; none where they are still to be made."""
        ...

    def explained(self, empty: "Sequence[StepBatch]") -> str:
        """Return what became of the rollouts of batches that hold nothing to train on, and what to do, in lines."""
        ...

    def done(self, task: StageTask, step: int, refs: Sequence[Ref], policy: Policy) -> bool:
        """Tell whether this run itself has finished a stage before, or has taken it over from another run."""
        ...


@dataclass(frozen=True)
class Source:
    """What a run starts from, by digest: a directory of weights, and for supervised runs a file."""

    weights: str
    weights_digest: str
    data: str = ""
    data_digest: str = ""


@dataclass(frozen=True)
class StepBatch:
    """One step's way from examples to packed batches."""

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


class EmptyBatch(ValueError):
    """Every batch of a step was empty: the filters left nothing to train on."""


def build_batch(
    do: StageExecutor, step: int, found: Ref, policy: Policy, config: RunConfig, before: StepBatch | None = None
) -> StepBatch:
    """Make the batches of one step; draw again while the filters leave nothing of them.

    `before` is what was drawn for the step before, whose state estimators and samplers go on from.

    Raises Evicted after `filtering.max_batch_attempts` empty batches.
    """
    earlier = (*before.assignments, *before.traces) if before else ()
    judge = partial(_filter_and_credit, do, step, policy, config, before and before.advantage)
    way = refill_groups if config.assignment.refill else _resample
    empty: list[StepBatch] = []
    for assigned, sampled, (verdicts, credits) in way(do, step, found, policy, config, earlier, judge):
        batches = do(packing.task, step, (credits, *sampled))
        drawn = StepBatch(assigned, sampled, verdicts, credits, batches)
        if drawn.packing.num_rows("batches"):
            return drawn
        empty.append(drawn)
    measure(do, step, empty[-1].refs)
    what = f"step {step}: {sum(len(each.assignments) for each in empty)} batches in a row hold nothing to train on"
    raise EmptyBatch(f"{what}. {do.explained(empty)}")


def measure(do: StageExecutor, step: int, refs: Sequence[Ref]) -> Ref:
    """Write the metrics of a step out of what it made; `refs` are all its work but examples and references.

    Where rollouts were scored again, that comes before them.
    """
    num_batches = sum(ref.stage == "assignment" for ref in refs)
    return do(metrics.task, step, refs, parameters={"num_batches": num_batches})


FilterAndCredit = Callable[[tuple[Ref, ...]], tuple[Ref, Ref]]
"""Filters and credits rollouts; returns both."""

CreditedRollouts = tuple[tuple[Ref, ...], tuple[Ref, ...], tuple[Ref, Ref]]
"""What a step has to be packed: its assignments, their rollouts, and how these were filtered and credited."""


def refill_groups(
    do: StageExecutor,
    step: int,
    found: Ref,
    policy: Policy,
    config: RunConfig,
    earlier: Sequence[Ref],
    judge: FilterAndCredit,
) -> Iterator[CreditedRollouts]:
    """Yield the rollouts of one step once, with groups in place of those that teach nothing (DAPO, arXiv 2503.14476).

    Each further assignment has as many groups of each environment as are missing, of other examples and with the same
    policy; all rollouts of the step are filtered and credited together. Ends when no group is missing, or after
    `filtering.max_batch_attempts` assignments with what there is, which may be nothing.
    """
    assigned = (assign(do, step, found, config, 0, earlier),)
    sampled = (_sampled(do, step, assigned[0], found, policy, config),)
    judged = judge(sampled)
    for batch in range(1, config.filtering.max_batch_attempts):
        groups = do.missing(assigned, judged[1])
        if not groups:
            break
        assigned = (*assigned, assign(do, step, found, config, batch, assigned, groups))
        sampled = (*sampled, _sampled(do, step, assigned[-1], found, policy, config))
        judged = judge(sampled)
    yield assigned, sampled, judged


def _resample(
    do: StageExecutor,
    step: int,
    found: Ref,
    policy: Policy,
    config: RunConfig,
    earlier: Sequence[Ref],
    judge: FilterAndCredit,
) -> Iterator[CreditedRollouts]:
    """Yield the rollouts of one step, again and again, each sampled in place of those before."""
    for batch in range(config.filtering.max_batch_attempts):
        assigned = assign(do, step, found, config, batch, earlier)
        sampled = _sampled(do, step, assigned, found, policy, config)
        yield (assigned,), (sampled,), judge((sampled,))
        earlier = assigned, sampled


def assign(
    do: StageExecutor,
    step: int,
    found: Ref,
    config: RunConfig,
    batch: int,
    earlier: Sequence[Ref],
    groups: Mapping[str, int] | None = None,
) -> Ref:
    """Say which examples a batch of a step tries.

    `groups` is how many of which environment, and then `earlier` the assignments of the step so far; else it is the
    work that was drawn before, which only a sampler with state looks at.
    """
    again = {"batch": str(batch)} if batch else {}
    again |= {"groups": json.dumps(groups, sort_keys=True)} if groups else {}
    refs = (found, *earlier) if groups or config.assignment.sampler.stateful else (found,)
    return do(assignment.task, step, refs, parameters={"batch": batch, "groups": groups}, extra_inputs=again)


def _sampled(do: StageExecutor, step: int, assigned: Ref, found: Ref, policy: Policy, config: RunConfig) -> Ref:
    if config.kind == "sft":
        return do(demonstration.task, step, (assigned, found))
    return do(rollout.task, step, (assigned, found), sampling_policy(policy, config))


def sampling_policy(policy: Policy | None, config: RunConfig) -> Policy | None:
    """Return the policy that rollouts depend on: none where teachers sample all of them."""
    return None if only_teachers_sample(config) else policy


def _filter_and_credit(
    do: StageExecutor, step: int, policy: Policy, config: RunConfig, before: Ref | None, traces: tuple[Ref, ...]
) -> tuple[Ref, Ref]:
    verdicts = do(filtering.task, step, traces)
    return verdicts, credit(do, step, traces, verdicts, config, before, policy)


def credit(
    do: StageExecutor,
    step: int,
    traces: tuple[Ref, ...],
    verdicts: Ref,
    config: RunConfig,
    before: Ref | None,
    sampled_by: Policy | None = None,
) -> Ref:
    """Credit a step's kept rollouts, scored by a reference first where an algorithm has one.

    `before` is the same of the step before, where an estimator has state; `sampled_by` the policy that sampled them,
    which scores them itself where an algorithm wants that.
    """
    policy = sampled_by if policy_scores(config) else None
    scored = (do(reference.task, step, (*traces, verdicts), policy),) if config.scorers else ()
    states = (before,) if before and config.stateful else ()
    return do(advantage.task, step, (*traces, verdicts, *scored, *states))


class GateRefused(ValueError):
    """A step's batch may not be trained on: a person or a rule said so."""


def first_policy(do: StageExecutor, source: Source) -> Policy:
    """Bring in the weights that the run starts from."""
    digest = {"weights": source.weights_digest}
    return Policy(do(policy_import.task, 0, parameters={"source": source.weights}, extra_inputs=digest).key, 0)


def start(do: StageExecutor, source: Source) -> tuple[Ref, Policy]:
    """List the examples and bring in the first policy."""
    policy = first_policy(do, source)
    if source.data_digest:
        file = {"file": source.data_digest}
        return do(examples.demonstration_task, 0, parameters={"source": source.data}, extra_inputs=file), policy
    return do(examples.task, 0), policy


def pass_gate(do: StageExecutor, step: int, drawn: StepBatch, policy: Policy, config: RunConfig) -> None:
    """Have the step's batch approved where the config has a gate. Raises GateRefused where it is refused.

    What the run has trained on already is not asked about: a gate may be set up later. A rule says the same of the same
    batch for ever; a person decides for one run, and who refused is asked again when it is resumed, which is another
    question with a key of its own. The weights do not depend on it: no key of training does.
    """
    off = config.gate.type == "none" or step % config.gate.every
    if off or do.done(training.task, step, (drawn.packing,), policy):
        return
    refs = (drawn.packing, drawn.advantage, drawn.filtering, *drawn.traces)
    own = {"run": config.name} if config.gate.type == "pause" else {}
    for question in count():
        asked = do(gate.task, step, refs, extra_inputs=own | ({"question": str(question)} if question else {}))
        decision = do.decision(asked)
        if decision is None or decision["approved"]:
            return
        if asked.computed or decision["gate"] == "rule":
            measure(do, step, (*drawn.refs, asked))
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


def train(do: StageExecutor, step: int, drawn: StepBatch, policy: Policy) -> tuple[Ref, Policy]:
    """Train `policy` on one step's batches; the policy made is named by the work that made it."""
    trained = do(training.task, step, (drawn.packing,), policy)
    return trained, Policy(trained.key, step + 1)


def held_out(do: StageExecutor) -> tuple[Ref, Ref]:
    """List the examples and say which held-out ones are tried; no policy is needed to know."""
    found = do(examples.task, 0)
    return found, do(assignment.evaluation_task, 0, (found,))


def attempts(do: StageExecutor, policy: Policy | None, retries: int = 0) -> tuple[Ref, ...]:
    """Try the held-out examples with `policy`, None for someone else's: the same examples and seeds for every policy.

    What ended with an error is tried up to `retries` times more, in work of its own: the rollouts of each round.
    """
    found, assigned = held_out(do)
    version = policy.version if policy else 0
    made = [do(rollout.task, version, (assigned, found), policy)]
    while len(made) <= retries and do.num_errored(made[-1]):
        assigned = do(assignment.evaluation_task, 0, (found, assigned, made[-1]))
        made.append(do(rollout.task, version, (assigned, found), policy))
    return tuple(made)


Check = Callable[[StepBatch], None]
"""Looks at what was drawn before training spends anything on it; raises where rows are unaccounted for."""

Ahead = Callable[[Callable[[], StepBatch]], Callable[[], StepBatch]]
"""Starts drawing ahead of time and returns a function that waits for what was drawn."""


Finished = tuple[int, StepBatch, Ref, Ref, Policy]
"""A finished step: its number, what it drew, its training, its metrics, and the policy it made."""


def run_steps(
    do: StageExecutor,
    source: Source,
    config: RunConfig,
    ahead: Ahead = lambda drawing: drawing,
    check: Check = lambda drawn: None,
) -> Iterator[Finished]:
    """Walk the whole run and yield each finished step.

    With `rollout.max_off_policy_steps` 0 the stages run in turn; with 1, step k + 1 is drawn with the policy that step
    k trains, while it trains.
    """
    found, policy = start(do, source)
    drawn = build_batch(do, 0, found, policy, config)
    for step in range(config.steps):
        after, last = step + 1, step + 1 == config.steps
        early = config.rollout.max_off_policy_steps and not last
        waiting = ahead(partial(build_batch, do, after, found, policy, config, drawn)) if early else None
        check(drawn)
        pass_gate(do, step, drawn, policy, config)
        trained, policy = train(do, step, drawn, policy)
        measured = measure(do, step, (*drawn.refs, trained))
        # Waited for before the step is handed out: whoever gets it may ask the engine for another policy.
        following = waiting() if waiting else None
        yield step, drawn, trained, measured, policy
        if not last:
            drawn = following or build_batch(do, after, found, policy, config, drawn)
