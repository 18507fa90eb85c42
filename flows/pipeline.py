"""The pipeline: which stage feeds which, for training and for supervised warm start, written once.

The same walk runs the stages (`Worker`) and foretells them (`Foreteller`): keys depend on nothing that is computed, so
what a run, a resumed run or a changed config would compute is known before anything starts.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol

from configs.run import RunConfig
from tasks import (
    advantage,
    assignment,
    demonstration,
    examples,
    filtering,
    gate,
    packing,
    policy_import,
    rollout,
    training,
)
from tasks.figures import in_words
from tasks.stage import Policy, Ref, StageTask


class Evicted(ValueError):
    """Every batch of a step was empty: the filters left nothing to train on."""


class GateRefused(ValueError):
    """A step's batch may not be trained on: a person or a rule said so."""


class Do(Protocol):
    """Does a stage, or says what doing it would be."""

    def __call__(
        self,
        task: StageTask,
        step: int,
        refs: Sequence[Ref] = (),
        policy: Policy | None = None,
        services: Mapping[str, Any] | None = None,
        extra_inputs: Mapping[str, str] | None = None,
    ) -> Ref: ...

    def decision(self, ref: Ref) -> Mapping[str, Any] | None:
        """Return the row of a decision at a gate; None where it is still to be made, which is taken to let pass."""
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
class Drawn:
    """One step's way from examples to packed batches."""

    assignment: Ref
    traces: tuple[Ref, ...]
    """The rollouts; where they were scored again, first what that made of the traces."""
    filtering: Ref
    advantage: Ref
    packing: Ref

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The references, in the order of the stages."""
        return self.assignment, *self.traces, self.filtering, self.advantage, self.packing


def first_policy(do: Do, source: Source) -> Policy:
    """Bring in the weights that the run starts from."""
    digest = {"weights": source.weights_digest}
    return Policy(do(policy_import.task, 0, services={"source": source.weights}, extra_inputs=digest).key, 0)


def start(do: Do, source: Source) -> tuple[Ref, Policy]:
    """List the examples and bring in the first policy."""
    policy = first_policy(do, source)
    if source.data_digest:
        file = {"file": source.data_digest}
        return do(examples.demonstration_task, 0, services={"source": source.data}, extra_inputs=file), policy
    return do(examples.task, 0), policy


def draw(do: Do, step: int, found: Ref, policy: Policy, config: RunConfig, before: Drawn | None = None) -> Drawn:
    """Make the batches of one step; draw again while the filters leave nothing of them.

    `before` is what was drawn for the step before, whose state estimators go on from.

    Raises Evicted after `filtering.max_batch_attempts` empty batches.
    """
    for batch in range(config.filtering.max_batch_attempts):
        drawn = _draw(do, step, found, policy, batch, config, before)
        if drawn.packing.num_rows("batches"):
            return drawn
    raise Evicted(
        f"step {step}: {config.filtering.max_batch_attempts} batches in a row hold nothing to train on. Everything "
        f"sampled is in the store. Look at the verdicts (stagecoach show): rewards that never differ within a group "
        f"call for easier or harder examples, larger groups, or another filtering section; go on under a new name."
    )


def _draw(do: Do, step: int, found: Ref, policy: Policy, batch: int, config: RunConfig, before: Drawn | None) -> Drawn:
    again = {"batch": str(batch)} if batch else {}
    assigned = do(assignment.task, step, (found,), services={"batch": batch}, extra_inputs=again)
    traces = (
        do(demonstration.task, step, (assigned, found))
        if config.kind == "sft"
        else do(rollout.task, step, (assigned, found), policy)
    )
    verdicts = do(filtering.task, step, (traces,))
    credits = credit(do, step, (traces,), verdicts, config, before and before.advantage)
    return Drawn(assigned, (traces,), verdicts, credits, do(packing.task, step, (credits, traces)))


def credit(do: Do, step: int, traces: tuple[Ref, ...], verdicts: Ref, config: RunConfig, before: Ref | None) -> Ref:
    """Credit a step's kept rollouts; `before` is the same of the step before, where an estimator has state."""
    states = (before,) if before and config.stateful else ()
    return do(advantage.task, step, (*traces, verdicts, *states))


def pass_gate(do: Do, step: int, drawn: Drawn, policy: Policy, config: RunConfig) -> None:
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


def train(do: Do, step: int, drawn: Drawn, policy: Policy) -> tuple[Ref, Policy]:
    """Train `policy` on one step's batches; the policy made is named by the work that made it."""
    trained = do(training.task, step, (drawn.packing,), policy)
    return trained, Policy(trained.key, step + 1)


def attempts(do: Do, policy: Policy) -> Ref:
    """Try the held-out examples with `policy`: the same examples and seeds for every policy of a run."""
    found = do(examples.task, 0)
    assigned = do(assignment.evaluation_task, 0, (found,))
    return do(rollout.task, policy.version, (assigned, found), policy)


Check = Callable[[Drawn], None]
"""Looks at what was drawn before training spends anything on it; raises where rows are unaccounted for."""

Ahead = Callable[[Callable[[], Drawn]], Callable[[], Drawn]]
"""Starts drawing ahead of time and returns a function that waits for what was drawn."""


Finished = tuple[int, Drawn, Ref, Policy]
"""A finished step: its number, what it drew, its training, and the policy it made."""


def run_steps(
    do: Do,
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
    drawn = draw(do, 0, found, policy, config)
    for step in range(config.steps):
        after, last = step + 1, step + 1 == config.steps
        early = config.rollout.max_off_policy_steps and not last
        waiting = ahead(partial(draw, do, after, found, policy, config, drawn)) if early else None
        check(drawn)
        pass_gate(do, step, drawn, policy, config)
        trained, policy = train(do, step, drawn, policy)
        # Waited for before the step is handed out: whoever gets it may ask the engine for another policy.
        following = waiting() if waiting else None
        yield step, drawn, trained, policy
        if not last:
            drawn = following or draw(do, after, found, policy, config, drawn)
