"""The pipeline: which stage feeds which, in training, supervised warm start and evaluation.

`build_batch` and `train_step` are the one place that says the order of the stages. An executor runs them or, in a dry
run, only says which results the ledger has: keys depend on nothing that is computed, so what a run, a resumed run or a
changed config would compute is known before anything starts. Callers: the training loop and the threads of its batches,
replays, `stagecoach check`.
"""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from configs.run import policy_scores
from flows.orchestration.states import EmptyBatch, GateRefused
from flows.reporting.formats import error_words, one_line
from flows.runtime.executor import Executor, FinishedStep, Refs, RolloutSource, StepBatch
from flows.runtime.resolve_run import Source
from tasks.advantage import reference
from tasks.advantage import stage as advantage
from tasks.arrays.group_counts import admitted_groups, groups_to_refill, num_wanted
from tasks.assignment import examples as example_list
from tasks.assignment import stage as assignment
from tasks.assignment.stage import errored_assignments
from tasks.filtering import stage as filtering
from tasks.gate import stage as gate
from tasks.metrics import stage as metrics
from tasks.metrics.accounting import ERRORED, NO_WEIGHT, outcome_of
from tasks.metrics.figures import in_words
from tasks.metrics.warnings import WINDOW
from tasks.packing import stage as packing
from tasks.rollout import stage as rollout
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy, Ref
from tasks.training import policy as policy_import
from tasks.training import stage as training

ERROR_COLUMNS = ("assignment_id", "error_class")
GROUPS = ["group_id", "environment"]
MAX_NAME_CHARS, MAX_MESSAGE_CHARS = 60, 320
"""Of the words of an environment that are shown."""


def import_sources(execute: Executor, source: Source) -> tuple[Ref, Policy]:
    """List the examples and import the first policy."""
    policy = first_policy(execute, source)
    if source.pairs:
        return execute(
            example_list.preference_task, 0, parameters=source.pairs, extra_inputs=source.pair_inputs
        ), policy
    if source.data_digest:
        file = {"file": source.data_digest}
        listed = execute(example_list.demonstration_task, 0, parameters=source.data, extra_inputs=file)
        return listed, policy
    return execute(example_list.task, 0), policy


def first_policy(execute: Executor, source: Source) -> Policy:
    """Return the recorded policy that the run forks from, or else import the weights that it starts from."""
    if source.policy:
        return source.policy
    digest = {"weights": source.weights_digest}
    return Policy(execute(policy_import.task, 0, parameters=source.weights, extra_inputs=digest).key, 0)


def build_batch(
    rollouts: RolloutSource,
    step: int,
    policy: Policy,
    previous: Callable[[], StepBatch] | None = None,
) -> StepBatch:
    """Make the packed batches of one step: assignment, rollout, judging (with judges), filtering, advantage, packing.

    A batch of which the filters leave nothing is sampled again with other examples, unless groups were replaced already
    (`assignment.refill`). `previous` returns the batch of the step before, once it is built: it has the engine first,
    and estimators and samplers continue its state.

    Raises EmptyBatch after `filtering.max_batch_attempts` empty batches.
    """
    execute = rollouts.execute
    config = execute.config
    before = previous() if previous else None
    # What a sampler with state learns from; others do not have it in their keys (see `assign`).
    earlier = (*before.assignments, *before.traces) if before and config.assignment.sampler.stateful else ()
    sample = partial(rollouts.sample, step, policy=policy)

    def credit_traces(traces: Refs) -> tuple[Ref, Ref]:
        verdicts = execute(filtering.task, step, traces)
        return verdicts, credit(execute, step, traces, verdicts, before.advantage if before else None, policy)

    empty: list[StepBatch] = []
    # Where groups are replaced, `sample_groups` has used up all attempts already.
    for attempt in range(1 if config.assignment.refill else config.filtering.max_batch_attempts):
        assigned, sampled, credited = sample_groups(rollouts, step, earlier, sample, credit_traces, attempt)
        batch = StepBatch(assigned, sampled, *credited, pack(execute, step, sampled, *credited))
        if batch.packing.num_rows("batches"):
            return batch
        empty.append(batch)
        earlier = (*assigned, *sampled)
    # A step without training has metrics too, or nobody could see why it is empty.
    write_metrics(execute, step, empty[-1].refs)
    count = sum(len(batch.assignments) for batch in empty)
    traces = [ref for batch in empty for ref in batch.traces]
    context, filtered = execute.context_of(empty[-1].packing), [batch.filtering for batch in empty]
    why = explain_empty_batches(context, step, traces, filtered) if context else ""
    raise EmptyBatch(f"step {step}: {count} batches in a row hold nothing to train on. {why}")


def train_step(execute: Executor, step: int, batch: StepBatch, policy: Policy) -> FinishedStep:
    """Train `policy` on a step's batch, once its accounts are checked and the gate lets it pass; write its metrics."""
    execute.check_account(batch)
    check_gate(execute, step, batch, policy)
    trained, new_policy = train(execute, step, batch, policy)
    return FinishedStep(step, batch, trained, write_metrics(execute, step, (*batch.refs, trained)), new_policy)


def sample_groups(
    rollouts: RolloutSource,
    step: int,
    earlier: Sequence[Ref],
    sample: Callable[[Ref], Ref],
    credit_traces: Callable[[Refs], tuple[Ref, Ref]],
    attempt: int = 0,
) -> tuple[Refs, Refs, tuple[Ref, Ref]]:
    """Assign groups, `sample` them, filter and credit their rollouts; return the results of each, in this order.

    Where judges score rollouts, these come as judged first, then as sampled.

    With `assignment.refill`, groups that have zero advantage are replaced (dynamic sampling: DAPO, arXiv 2503.14476).
    Each further assignment has as many groups of each environment as are missing, of other examples and with the same
    policy; all rollouts of the step are filtered and credited together. It ends when no group is missing, or after
    `filtering.max_batch_attempts` assignments with the groups so far, which may be none.
    """
    execute = rollouts.execute
    assigned: Refs = (rollouts.assign(step, attempt, earlier),)
    sampled: Refs = (sample(assigned[0]),)
    judged = rollouts.judge(step, sampled[0])
    credited = credit_traces((*judged, *sampled))
    for batch in range(1, execute.config.filtering.max_batch_attempts if execute.config.assignment.refill else 1):
        # Credits that are still to be given are taken to be enough.
        context = execute.context_of(credited[1])
        if not context or not (groups := missing_groups(context, assigned, sampled, credited[1])):
            break
        assigned = (*assigned, rollouts.assign(step, batch, assigned, groups))
        sampled = (*sampled, sample(assigned[-1]))
        judged = (*judged, *rollouts.judge(step, sampled[-1]))
        credited = credit_traces((*judged, *sampled))
    return assigned, (*judged, *sampled), credited


def credit(
    execute: Executor,
    step: int,
    traces: Refs,
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


def pack(execute: Executor, step: int, traces: Refs, verdicts: Ref, credits: Ref) -> Ref:
    """Pack the credited rollouts of a step."""
    config = execute.config
    # Only then is the filtering in the key: a constant length is that of every rollout, those dropped included. Where
    # groups are replaced those that were dropped are no part of the batch.
    counted = (verdicts,) if config.constant_lengths and not config.assignment.refill else ()
    return execute(packing.task, step, (credits, *counted, *traces))


def train(execute: Executor, step: int, batch: StepBatch, policy: Policy) -> tuple[Ref, Policy]:
    """Train `policy` on one step's batches; the new policy is named by the stage result that made it."""
    trained = execute(training.task, step, training_inputs(execute, batch), policy)
    return trained, Policy(trained.key, step + 1)


def training_inputs(execute: Executor, batch: StepBatch) -> Refs:
    """Return what a step is trained on: its rows, and where preferences are learnt the samples, which say the pairs."""
    return (batch.packing, batch.advantage) if execute.config.pairs else (batch.packing,)


def write_metrics(execute: Executor, step: int, refs: Sequence[Ref]) -> Ref:
    """Write the metrics of a step out of what it made; `refs` are all its results but examples and references.

    Where rollouts were scored again, that comes before them.
    """
    # A parameter outside the key: the assignments themselves are in it.
    num_batches = sum(ref.stage == "assignment" for ref in refs)
    return execute(metrics.task, step, refs, parameters=num_batches)


def check_gate(execute: Executor, step: int, batch: StepBatch, policy: Policy) -> None:
    """Have the step's batch approved where the config has a gate. Raises GateRefused where it is refused.

    What the run has trained on already is not asked about: a gate may be set up later. A rule says the same of the same
    batch for ever; a person decides for one run, and who refused is asked again when it is resumed, which is another
    question with a key of its own. The weights do not depend on it: no key of training does.
    """
    config = execute.config
    off = config.gate.type == "none" or step % config.gate.every
    if off or execute.is_own_result(training.task, step, training_inputs(execute, batch), policy):
        return
    refs = (batch.packing, batch.advantage, batch.filtering, *batch.traces, *_metrics_before(execute, step))
    # A rule's decision may be shared between runs; a person's holds for the run that was asked about.
    digests = {"run": config.name} if config.gate.type == "pause" else {}
    # Each refusal makes the next question another one, with a key of its own; answers stay in the ledger.
    for question in count():
        ref = execute(gate.task, step, refs, extra_inputs=digests | ({"question": str(question)} if question else {}))
        context = execute.context_of(ref)
        # A decision that is still to come is taken to let pass.
        rows: list[dict[str, Any]] = context.table("decisions", (ref,)).to_pylist() if context else [{"approved": True}]
        (decision,) = rows
        if decision["approved"]:
            return
        # A refusal of a person that was only found, not computed now, is an earlier one: ask the next question.
        if ref.computed or decision["gate"] == "rule":
            write_metrics(execute, step, (*batch.refs, ref))
            resume = f"stagecoach resume {config.name} --store {shlex.quote(config.store)}"
            raise GateRefused(
                f"step {step}: the batch was refused by {decision['decided_by']}: "
                f"{decision['reason'] or 'no reason given'}\n  Figures: {in_words(json.loads(decision['figures']))}\n  "
                "Safe: nothing was trained on it; the batch and all before it are in the store, and so is the decision"
                f"\n  To do: {resume} decides again, by another rule with gate.rule=..., without a gate with "
                "gate.type=none"
            )


def _metrics_before(execute: Executor, step: int) -> list[Ref]:
    """Return the metrics of the steps before, in order, as far as the gate's rule reads them."""
    gate = execute.config.gate
    window = gate.window if gate.type == "rule" else 0
    window = max(window, WINDOW) if gate.type == "rule" and "warning" in gate.rule.lower() else window
    results = {ref.step: ref for _, ref in execute.results if ref.stage == metrics.STAGE.name}
    return [results[before] for before in range(step - window + 1, step) if before in results]


def choose_held_out(execute: Executor) -> tuple[Ref, Ref]:
    """List the examples and say which held-out ones are tried; no policy is needed to know."""
    examples = execute(example_list.task, 0)
    return examples, execute(assignment.evaluation_task, 0, (examples,))


def evaluate(execute: Executor, policy: Policy | None, retries: int = 0) -> Refs:
    """Try the held-out examples with `policy`, None for someone else's: the same examples and seeds for every policy.

    What ended with an error is tried up to `retries` times more, in results of their own: the rollouts of each retry.
    """
    examples, assigned = choose_held_out(execute)
    # Rollouts of an evaluation are ordered by the policy's version: they belong to no step.
    version = policy.version if policy else 0
    tried = [execute(rollout.task, version, (assigned, examples), policy)]
    while len(tried) <= retries and _any_errored(execute, tried[-1]):
        # Only what ended with an error, with other seeds; the first rollouts stay where they are.
        assigned = execute(assignment.evaluation_task, 0, (examples, assigned, tried[-1]))
        tried.append(execute(rollout.task, version, (assigned, examples), policy))
    return tuple(tried)


def _any_errored(execute: Executor, ref: Ref) -> bool:
    context = execute.context_of(ref)
    return context is not None and bool(errored_assignments(context.table("traces", (ref,), ERROR_COLUMNS)))


def missing_groups(
    context: RunContext, assigned: Sequence[Ref], sampled: Sequence[Ref], credits: Ref
) -> Mapping[str, int]:
    """Return how many groups of the first of some finished assignments have no replacement yet, by environment.

    In a stream those of one environment may take the place of another's: as many lack as the step lacks in all.
    """
    first, every = (context.table("assignments", refs, GROUPS) for refs in (assigned[:1], assigned))
    samples, oversampling = context.rows("samples", (credits,)), context.config.assignment.oversampling
    if not context.config.streams:
        return groups_to_refill(first, every, samples, oversampling)
    wanted = num_wanted(first, oversampling) - len(admitted_groups(samples))
    lacking = groups_to_refill(first, context.table("traces", sampled, GROUPS), samples, oversampling)
    return Counter(list(Counter(lacking).elements())[: max(0, wanted)])


def explain_empty_batches(context: RunContext, step: int, sampled: Sequence[Ref], filtered: Sequence[Ref]) -> str:
    """Return the outcomes of all rollouts of a step's batches that hold nothing, counted, and what to do, in lines."""
    kept = context.table("verdicts", filtered, ["trace_id", "reason"])
    verdicts = {row["trace_id"]: row["reason"] for row in kept.to_pylist()}
    rows = context.table("traces", sampled, ["trace_id", "error_class", "error_type", "error_message"]).to_pylist()
    outcomes, errors = Counter[tuple[str, str]](), Counter[tuple[str | None, str | None]]()
    for row in rows:
        outcomes[outcome := outcome_of(row["error_class"], verdicts[row["trace_id"]], NO_WEIGHT)] += 1
        errors[row["error_type"], row["error_message"]] += outcome[0] == ERRORED
    lines = [f"Of {len(rows)} rollouts:" if rows else "No rollout was made"]
    for (kind, detail), number in sorted(outcomes.items()):
        lines.append(f"{number} {kind}{f' ({one_line(detail, MAX_NAME_CHARS)})' if detail else ''}")
    for (error, message), number in (+errors).most_common(1):
        # Names and messages come from environments: one line each, and cut, or they could act on a terminal.
        words = error_words(message or "(no text)", MAX_MESSAGE_CHARS)
        lines.append(f"The most frequent error ({number}): {one_line(error or 'an error', MAX_NAME_CHARS)}: {words}")
    at = f"{context.run} --store {shlex.quote(context.config.store)}"
    attempts = context.config.filtering.max_batch_attempts
    lines += (
        "Safe: everything sampled is in the store, and so are the policies made before",
        f"To do: see them with stagecoach traces {at} --step {step}, and mend what fails; then sample again: "
        f"stagecoach resume {at} filtering.max_batch_attempts={2 * attempts}",
        "To do where rewards do not differ within a group: take easier or harder examples, larger groups "
        "(assignment.group_size) or a higher rollout.temperature, under a new name",
    )
    return "\n  ".join(lines)
