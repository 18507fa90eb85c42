"""What a run says of itself in one line: its state's message in Prefect, a finished step, a whole run.

Made from plain data, as watchers of a run and callers of a flow have it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flows.reporting.figures import describe_warnings
from flows.reporting.formats import describe_scores, environment_title, interval_text, visible
from tasks.arrays.finding import QUARANTINED
from tasks.inference.trace_rows.failures import UNSCORED
from tasks.metrics.accounting import ERRORED, FILTERED, STALE, STOPPED
from tasks.metrics.figures import ALL, Values, full_name

STAGE = "timing/stage/"
TRUNCATED = "truncated"
LOSSES = {ERRORED: "errored", TRUNCATED: TRUNCATED, FILTERED: "dropped"}
LOSSES |= {QUARANTINED: "quarantined", STOPPED: "stopped", STALE: "stale", UNSCORED: UNSCORED}
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
    """Return a step as watchers know it: reward, tokens, seconds by stage, `metrics` by full name, `rollout_counts`.

    `values` are its metrics and those of the ledger. A number that was not measured is None.
    """
    return {
        "step": step,
        "reward": values.get((ALL, "reward/mean")),
        "reward_std": values.get((ALL, "reward/std")),
        **rollout_counts(values),
        "seconds": {name.removeprefix(STAGE): value for (_, name), value in values.items() if name.startswith(STAGE)},
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
    parts = []
    for outcome, counts in count_losses(steps).items():
        named = [f"{visible(name)} {count:,}" for name, count in counts.most_common(MOST_CLASSES) if name]
        more = [*named, "..."] if len(counts) > MOST_CLASSES else named
        classes = f" ({', '.join(more)})" if named else ""
        parts += [f"{counts.total():,} {LOSSES[outcome]}{classes}"] if counts.total() else []
    return ", ".join(parts).replace(" ", f" of {total:,} rollouts ", 1)


def step_message(step: Mapping[str, Any]) -> str:
    """Return what is to be said of a finished step: figures, tokens and seconds, or whose work it was."""
    measured = {"reward": step.get("reward"), "loss": (step.get("update") or {}).get("loss")}
    figures = [f"{name} {value:.3f}" for name, value in measured.items() if value is not None]
    figures += filter(None, [losses_message([step]), describe_warnings([step])])
    if not step["computed"]:
        return ", ".join([f"cached ({', '.join(step.get('runs') or ('?',))})", *figures])
    return ", ".join([*figures, f"{step['tokens']:,} tokens", f"{sum(step['seconds'].values()):.1f} s"])


def outcome_message(outcome: Mapping[str, Any]) -> str:
    """Return the result of a flow in a line: steps, first and last figure, held-out scores, work done."""
    if "tables" in outcome:
        numbers = {"table": len(outcome["tables"]), "merged file": outcome["merged"]}
        numbers |= {"deleted file": outcome["deleted"], "removed run": len(outcome.get("gc", {}).get("removed", ()))}
        message = ", ".join(plural(count, noun) for noun, count in numbers.items())
        return f"planned, as nothing is changed: {message}" if outcome.get("dry_run") else message
    steps = outcome.get("steps", ())
    parts = [
        plural(len(steps), "step") if steps else "",
        _course(steps),
        losses_message(steps),
        describe_warnings(steps),
    ]
    rows = [row for row in outcome.get("comparisons", ()) if row["figure"] == "avg" and row["difference"] is not None]
    for row in rows:
        where = environment_title(row["set"], row["environment"]) if len(rows) > 1 else ""
        interval = interval_text(row["interval"]) if row["interval"] else ""
        parts.append(" ".join(filter(None, ("held-out", where, f"{row['difference']:+.3f}", interval))))
    parts += [describe_scores(scores) for scores in outcome.get("scores", ())]
    counts = f"{outcome.get('num_computed', 0):,} computed, {outcome.get('num_found', 0):,} cached"
    done = counts if "num_computed" in outcome else ""
    return "; ".join(filter(None, (", ".join(filter(None, parts)), done)))


def _course(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the figure of the first and the last step: the reward, or in supervised runs the loss."""
    rewards = [step["reward"] for step in steps if step.get("reward") is not None]
    losses = [step["update"]["loss"] for step in steps if step.get("update")]
    name, values = ("reward", rewards) if rewards else ("loss", losses)
    return f"{name} {values[0]:.2f} to {values[-1]:.2f}" if values else ""
