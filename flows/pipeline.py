"""The pipeline: which stage feeds which, for training and for supervised warm start, written once.

The same walk runs the stages (`Worker`) and foretells them (`Foreteller`): keys depend on nothing that is computed, so
what a run, a resumed run or a changed config would compute is known before anything starts.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any

from configs.run import RunConfig
from flows.drawing import draw
from flows.steps import Do, Drawn, Source
from tasks import assignment, examples, gate, policy_import, rollout, training
from tasks.figures import in_words
from tasks.stage import Policy, Ref


class GateRefused(ValueError):
    """A step's batch may not be trained on: a person or a rule said so."""


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


def held_out(do: Do) -> tuple[Ref, Ref]:
    """List the examples and say which held-out ones are tried; no policy is needed to know."""
    found = do(examples.task, 0)
    return found, do(assignment.evaluation_task, 0, (found,))


def attempts(do: Do, policy: Policy | None, retries: int = 0) -> tuple[Ref, ...]:
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
