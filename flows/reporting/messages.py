"""What a run says of itself in one line: its state's message in Prefect, a finished step, a whole run.

Made from plain data, as watchers of a run and callers of a flow have it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flows.reporting.formats import describe_scores, environment_title, interval_text, visible
from flows.reporting.usual_range import describe_exits
from tasks.arrays.finding import QUARANTINED
from tasks.metrics.accounting import ERRORED, FILTERED, STALE, STOPPED
from tasks.metrics.figures import ALL, Values, full_name

TRUNCATED = "truncated"
LOSSES = {ERRORED: "errored", TRUNCATED: TRUNCATED, FILTERED: "dropped"}
LOSSES |= {QUARANTINED: "quarantined", STOPPED: "stopped", STALE: "stale"}
"""Words for rollouts that are not what a mean reward suggests, by outcome. Truncated ones have an outcome as well."""
MOST_CLASSES = 3
"""Error classes, or filters, that are named; the most frequent ones."""


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: 1 step, 20 steps."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rollout_counts(values: Values) -> dict[str, Any]:
    """Return the rollouts of a step in numbers, out of its metrics: num_traces, num_truncated, outcomes.

    `outcomes` are outcome, detail (an error class, a filter, or empty) and num_traces, which add up to num_traces.
    """
    num_traces, truncated = (values.get(("", f"batch/{name}"), 0.0) for name in ("num_traces", "truncated_ratio"))
    accounts = [(name.split("/", 2), count) for (_, name), count in values.items() if name.startswith("accounting/")]
    outcomes = [
        {"outcome": outcome, "detail": "".join(detail), "num_traces": int(count)}
        for (_, outcome, *detail), count in accounts
    ]
    return {"num_traces": int(num_traces), "num_truncated": round(num_traces * truncated), "outcomes": outcomes}


def measured_step(step: int, values: Values) -> dict[str, Any]:
    """Return a step as watchers know it, out of its metrics: reward, tokens, `metrics` by full name, `rollout_counts`.

    A number that was not measured is None.
    """
    return {
        "step": step,
        "reward": values.get((ALL, "reward/mean")),
        "reward_std": values.get((ALL, "reward/std")),
        **rollout_counts(values),
        "tokens": int(sum(values.get((ALL, f"rollout/{kind}_tokens"), 0) for kind in ("input", "output"))),
        "metrics": {full_name(*name): value for name, value in values.items()},
    }


def count_losses(steps: Iterable[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Return how many rollouts of some steps (`rollout_counts`) met which of LOSSES, by detail; empty Counters of none.

    The one detail of truncated rollouts is empty.
    """
    counts = {outcome: Counter[str]() for outcome in LOSSES}
    for step in steps:
        counts[TRUNCATED][""] += step.get("num_truncated", 0)
        for share in step.get("outcomes", ()):
            if share["outcome"] in LOSSES:
                counts[share["outcome"]][share["detail"]] += share["num_traces"]
    return counts


def losses_message(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return which rollouts of some steps (`rollout_counts`) are errored, truncated or left out, if any."""
    total = sum(step.get("num_traces", 0) for step in steps)
    counts = {LOSSES[outcome]: own for outcome, own in count_losses(steps).items() if own.total()}
    parts = [f"{own.total():,} {word}{_classes(own)}" for word, own in counts.items()]
    return ", ".join(parts).replace(" ", f" of {total:,} rollouts ", 1)


def _classes(counts: Counter[str]) -> str:
    named = [f"{visible(name)} {count:,}" for name, count in counts.most_common(MOST_CLASSES) if name]
    return f" ({', '.join(named)}{', ...' if len(counts) > MOST_CLASSES else ''})" if named else ""


def result_lines(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the results of some steps in lines: the reward, lost rollouts, figures outside their usual range.

    Each has `step`, `reward`, `metrics` (by full name), and `rollout_counts`. What is not to be said has no line.
    """
    lost, exits = losses_message(steps), describe_exits(steps)
    return [*reward_line([step["reward"] for step in steps]), *([lost] if lost else []), *([exits] if exits else [])]


def reward_line(rewards: Sequence[float | None]) -> list[str]:
    """Return what was learnt, in a line; none of a run without rewards. A step that has none is left out."""
    known = [each for each in rewards if each is not None]
    if not known:
        return []
    last = known[-3:]  # one step alone is as much luck as learning
    return [f"mean reward {known[0]:.2f} in the first step, {sum(last) / len(last):.2f} over the last {len(last)}"]


def step_message(step: Mapping[str, Any]) -> str:
    """Return what is to be said of a finished step: figures, tokens and seconds, or whose work it was."""
    reward, loss = step.get("reward"), (step.get("update") or {}).get("loss")
    figures = [f"{name} {value:.3f}" for name, value in (("reward", reward), ("loss", loss)) if value is not None]
    figures += filter(None, [losses_message([step])])
    if not step["computed"]:
        return ", ".join([f"cached ({', '.join(step.get('runs') or ('?',))})", *figures])
    return ", ".join([*figures, f"{step['tokens']:,} tokens", f"{sum(step['seconds'].values()):.1f} s"])


def outcome_message(outcome: Mapping[str, Any]) -> str:
    """Return what a flow came to, out of what it returns: steps, first and last figure, held-out scores, work done."""
    if "tables" in outcome:
        return _maintenance_message(outcome)
    steps = outcome.get("steps", ())
    parts = [part for part in (plural(len(steps), "step"), _course(steps)) if steps and part]
    parts += filter(None, [losses_message(steps), describe_exits(steps)])
    parts += _held_out(outcome.get("comparisons", ()))
    parts += [describe_scores(each) for each in outcome.get("scores", ())]
    done = f"{outcome.get('num_computed', 0):,} computed, {outcome.get('num_found', 0):,} cached"
    return "; ".join(filter(None, (", ".join(parts), done)))


def _course(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the figure of the first and the last step: the reward, or in supervised runs the loss."""
    rewards = [step["reward"] for step in steps if step.get("reward") is not None]
    losses = [step["update"]["loss"] for step in steps if step.get("update")]
    name, values = ("reward", rewards) if rewards else ("loss", losses)
    return f"{name} {values[0]:.2f} to {values[-1]:.2f}" if values else ""


def _held_out(comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how the average of each set and environment changed from the first policy to the last."""
    rows = [row for row in comparisons if row["figure"] == "avg" and row["difference"] is not None]
    parts = []
    for row in rows:
        where = f" {environment_title(row['set'], row['environment'])}" if len(rows) > 1 else ""
        interval = f" {interval_text(row['interval'])}" if row["interval"] else ""
        parts.append(f"held-out{where} {row['difference']:+.3f}{interval}")
    return parts


def _maintenance_message(done: Mapping[str, Any]) -> str:
    removed = done.get("gc", {}).get("removed", ())
    verb = "would be " if done.get("dry_run") else ""
    merged, deleted = plural(done["merged"], "file"), plural(done["deleted"], "file")
    tables = plural(len(done["tables"]), "table")
    return f"{tables}: {merged} {verb}merged, {deleted} {verb}deleted; {plural(len(removed), 'run')} {verb}removed"
