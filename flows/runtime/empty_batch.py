"""Says what a batch lacks: how many groups to replace, or why nothing of it can be trained on."""

from collections import Counter
from collections.abc import Mapping, Sequence

from flows.reporting.formats import error_words, one_line
from tasks.arrays.group_counts import admitted_groups, groups_to_refill, num_wanted
from tasks.metrics.accounting import ERRORED, NO_WEIGHT, outcome_of
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Ref

GROUPS = ["group_id", "environment"]
TRACES = ["trace_id", "error_class", "error_type", "error_message"]
VERDICTS = ["trace_id", "reason"]
MAX_NAME_CHARS, MAX_MESSAGE_CHARS = 60, 320
"""Of the words of an environment that are shown."""


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


def explain_empty_batches(context: RunContext, step: int, sampled: Sequence[Ref], filtered: Sequence[Ref]) -> str:
    """Return the outcomes of all rollouts of a step's batches that hold nothing, counted, and what to do, in lines."""
    verdicts = {row["trace_id"]: row["reason"] for row in context.table("verdicts", filtered, VERDICTS).to_pylist()}
    rows = context.table("traces", sampled, TRACES).to_pylist()
    outcomes, errors = Counter[tuple[str, str]](), Counter[tuple[str | None, str | None]]()
    for row in rows:
        outcomes[outcome := outcome_of(row["error_class"], verdicts[row["trace_id"]], NO_WEIGHT)] += 1
        errors[row["error_type"], row["error_message"]] += outcome[0] == ERRORED
    lines = [f"Of {len(rows)} rollouts:" if rows else "No rollout was made"]
    for (kind, detail), count in sorted(outcomes.items()):
        lines.append(f"{count} {kind}{f' ({one_line(detail, MAX_NAME_CHARS)})' if detail else ''}")
    for (error, message), count in (+errors).most_common(1):
        # Names and messages come from environments: one line each, and cut, or they could act on a terminal.
        words = error_words(message or "(no text)", MAX_MESSAGE_CHARS)
        lines.append(f"The most frequent error ({count}): {one_line(error or 'an error', MAX_NAME_CHARS)}: {words}")
    at, attempts = f"{context.run} --store {context.config.store}", context.config.filtering.max_batch_attempts
    lines += (
        "Safe: everything sampled is in the store, and so are the policies made before",
        f"To do: see them with stagecoach traces {at} --step {step}, and mend what fails; then sample again: "
        f"stagecoach resume {at} filtering.max_batch_attempts={2 * attempts}",
        "To do where rewards do not differ within a group: take easier or harder examples, larger groups "
        "(assignment.group_size) or a higher rollout.temperature, under a new name",
    )
    return "\n  ".join(lines)
