"""Says what is missing of a batch whose groups teach nothing: how many to replace, a warning, or why it is empty."""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from configs.run import RunConfig
from flows.reporting.formats import error_words, one_line
from tasks.arrays.finding import QUARANTINED
from tasks.arrays.group_counts import admitted_groups, groups_to_refill, num_wanted
from tasks.metrics.accounting import ERRORED, FILTERED, NO_WEIGHT, STALE, STOPPED, outcome_of
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Ref

GROUPS = ["group_id", "environment"]
TRACES = ["trace_id", "error_class", "error_type", "error_message"]
VERDICTS = ["trace_id", "reason", "evidence"]
LONGEST_NAME, LONGEST_MESSAGE = 60, 320
"""Characters of what an environment says that are shown."""
ZERO_ADVANTAGE, INCOMPLETE_GROUP = "zero_advantage", "incomplete_group"
EQUAL, ALONE, FOLLOWED = "equal rewards", "alone", "followed"
"""Of rollouts that were filtered for the outcomes of their group: all that stood earned the same; no other one stood; a
member failed. The second and third say nothing of rewards."""
Row = Mapping[str, Any]


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
    names = [name for name, count in lacking.items() for _ in range(count)]
    return Counter(names[: max(0, wanted)])


def short_of_groups(step: int, counts: Mapping[str, int]) -> str:
    """Return a warning where a step trains on fewer groups than it wanted; empty where that is not so."""
    if not counts or counts["admitted"] >= counts["wanted"]:
        return ""
    return (
        f"step {step}: {counts['admitted']} of {counts['wanted']} groups teach something, after {counts['drawn']} "
        f"groups in {counts['batches']} batch(es); it trains on those. The others were equal in reward, filtered or "
        "refused: look at the verdicts; choose other examples, assignment.refill or more filtering.max_batch_attempts"
    )


def explain_empty_batches(context: RunContext, step: int, sampled: Sequence[Ref], filtered: Sequence[Ref]) -> str:
    """Return the outcomes of all rollouts of a step's batches that hold nothing, counted, and what to do, in lines."""
    verdicts = {row["trace_id"]: row for row in context.table("verdicts", filtered, VERDICTS).to_pylist()}
    rows = [row | verdicts[row["trace_id"]] for row in context.table("traces", sampled, TRACES).to_pylist()]
    return "\n  ".join(_lines(rows, context.config, step))


def _lines(rows: Sequence[Row], config: RunConfig, step: int) -> Iterator[str]:
    outcomes = Counter(_outcome(row) for row in rows)
    yield f"Of {len(rows)} rollouts:" if rows else "No rollout was made"
    errored = [row for row in rows if _outcome(row)[0] == ERRORED]
    if errored:
        yield _errors(errored)
    yield from (_count_line(*outcome, count) for outcome, count in sorted(outcomes.items()) if outcome[0] != ERRORED)
    yield "Safe: everything sampled is in the store, and so are the policies made before"
    yield from (f"To do: {line}" for line in _advice(outcomes, config, step))


def _outcome(row: Row) -> tuple[str, str]:
    """Return outcome and detail of a rollout, distinguished by the part that its group had in it."""
    outcome, detail = outcome_of(row["error_class"], row["reason"], NO_WEIGHT)
    # One that stands alone after errors says nothing about how hard its example is: other advice.
    if (outcome, detail) == (FILTERED, ZERO_ADVANTAGE):
        return (EQUAL if json.loads(row["evidence"])[ZERO_ADVANTAGE]["members"] > 1 else ALONE), ""
    return (FOLLOWED, "") if (outcome, detail) == (FILTERED, INCOMPLETE_GROUP) else (outcome, detail)


def _errors(rows: Sequence[Row]) -> str:
    """Return how many rollouts ended with which class of error, and the commonest error in its own words."""
    classes = Counter(str(row["error_class"]) for row in rows).most_common()
    ((kind, message), count), *_ = Counter((row["error_type"], row["error_message"]) for row in rows).most_common(1)
    # Names and messages come from environments: one line each, and cut, or they could act on a terminal.
    shares = ", ".join(f"{number} {one_line(name, LONGEST_NAME)}" for name, number in classes)
    words = error_words(message or "(no text)", LONGEST_MESSAGE)
    return f"{len(rows)} errored: {shares}; most often ({count}): {one_line(kind or 'an error', LONGEST_NAME)}: {words}"


def _count_line(outcome: str, detail: str, count: int) -> str:
    return f"{count} " + {
        EQUAL: f"had the same reward as all they were compared with (filter {ZERO_ADVANTAGE})",
        ALONE: f"had nothing left to be compared with (filter {ZERO_ADVANTAGE})",
        FOLLOWED: f"were left out with a member of their group that failed (filter {INCOMPLETE_GROUP})",
        FILTERED: f"were left out by {detail}",
        STOPPED: "were stopped, as enough others had ended",
        STALE: "were stale before a step took them",
        QUARANTINED: "were in quarantine",
        NO_WEIGHT: "were kept, but no token of them has a weight",
    }.get(outcome, f"were {outcome}")


def _advice(outcomes: Collection[tuple[str, str]], config: RunConfig, step: int) -> Iterator[str]:
    """Yield what to do, for each thing that left nothing to train on."""
    at = f"{config.name} --store {config.store}"
    if any(outcome == ERRORED for outcome, _ in outcomes):
        more = f"filtering.max_batch_attempts={2 * config.filtering.max_batch_attempts}"
        yield (
            f"see the errors with stagecoach traces {at} --step {step} --outcome errored, and mend what fails (a class "
            "says where: infrastructure is servers and machines, timeout is rollout.timeout_seconds, model is what the "
            f"engine answered, environment is its own code); then sample again: stagecoach resume {at} {more}"
        )
    for detail in sorted(detail for outcome, detail in outcomes if outcome == FILTERED):
        yield (
            f"look at what {detail} found (stagecoach traces {at} --step {step} --reason {detail}); mend their cause, "
            f"or go on under a new name with another setting of {detail}"
        )
    if (EQUAL, "") in outcomes:
        yield (
            "rewards that never differ within a group call for easier or harder examples, larger groups "
            "(assignment.group_size), a higher rollout.temperature, or an algorithm that does not compare rollouts: go "
            "on under a new name"
        )
    if (NO_WEIGHT, "") in outcomes:
        refused = "admission refused their groups: loosen it" if config.admission else "look at their advantages"
        zero = "; packing.zero_advantages=true trains on those that are zero"
        more = "" if config.packing.zero_advantages else zero
        yield f"{refused} (stagecoach traces {at} --step {step} --outcome 'no weight'){more}"
