"""Says what a batch lacks: how many groups to replace, or why nothing of it can be trained on."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from configs.run import RunConfig
from flows.reporting.formats import error_words, one_line
from tasks.arrays.group_counts import admitted_groups, groups_to_refill, num_wanted
from tasks.metrics.accounting import ERRORED, FILTERED, NO_WEIGHT, outcome_of
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Ref

GROUPS = ["group_id", "environment"]
TRACES = ["trace_id", "error_class", "error_type", "error_message"]
VERDICTS = ["trace_id", "reason"]
MAX_NAME_CHARS, MAX_MESSAGE_CHARS = 60, 320
"""Of the words of an environment that are shown."""
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


def explain_empty_batches(context: RunContext, step: int, sampled: Sequence[Ref], filtered: Sequence[Ref]) -> str:
    """Return the outcomes of all rollouts of a step's batches that hold nothing, counted, and what to do, in lines."""
    verdicts = {row["trace_id"]: row["reason"] for row in context.table("verdicts", filtered, VERDICTS).to_pylist()}
    rows = context.table("traces", sampled, TRACES).to_pylist()
    outcome_rows = [(outcome_of(row["error_class"], verdicts[row["trace_id"]], NO_WEIGHT), row) for row in rows]
    outcomes = Counter(outcome for outcome, _ in outcome_rows)
    errored = [row for (outcome, _), row in outcome_rows if outcome == ERRORED]
    lines = [f"Of {len(rows)} rollouts:" if rows else "No rollout was made"]
    for (outcome, detail), count in sorted(outcomes.items()):
        lines.append(f"{count} {outcome}{f' ({one_line(detail, MAX_NAME_CHARS)})' if detail else ''}")
    if errored:
        lines.append(_commonest_error(errored))
    lines.append("Safe: everything sampled is in the store, and so are the policies made before")
    return "\n  ".join([*lines, *(f"To do: {line}" for line in _advice(outcomes, context.config, step))])


def _commonest_error(rows: Sequence[Row]) -> str:
    ((kind, message), count), *_ = Counter((row["error_type"], row["error_message"]) for row in rows).most_common(1)
    # Names and messages come from environments: one line each, and cut, or they could act on a terminal.
    words = error_words(message or "(no text)", MAX_MESSAGE_CHARS)
    return f"The most frequent error ({count}): {one_line(kind or 'an error', MAX_NAME_CHARS)}: {words}"


def _advice(outcomes: Collection[tuple[str, str]], config: RunConfig, step: int) -> Iterator[str]:
    """Yield what to do, for each thing that left nothing to train on."""
    at = f"{config.name} --store {config.store}"
    see = f"stagecoach traces {at} --step {step} --where"
    if any(outcome == ERRORED for outcome, _ in outcomes):
        yield (
            f"see the errors with {see} \"outcome = 'errored'\", and mend what fails; then sample again: "
            f"stagecoach resume {at} filtering.max_batch_attempts={2 * config.filtering.max_batch_attempts}"
        )
    if reasons := sorted(detail for outcome, detail in outcomes if outcome == FILTERED):
        yield f"see what {', '.join(reasons)} left out with {see} \"reason = '{reasons[0]}'\""
    if "zero_advantage" in reasons:
        yield (
            "rewards that never differ within a group call for easier or harder examples, larger groups "
            "(assignment.group_size) or a higher rollout.temperature, under a new name"
        )
    if (NO_WEIGHT, "") in outcomes:
        what = "loosen the admission that refused their groups" if config.admission else "look at their advantages"
        zero = "" if config.packing.zero_advantages else "; packing.zero_advantages=true trains on those of zero"
        yield f"see {see} \"outcome = 'no weight'\": {what}{zero}"
