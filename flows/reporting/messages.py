"""What a run says of itself in one line: its state's message in Prefect, a finished step, a whole run.

Made from plain data, as watchers of a run and callers of a flow have it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flows.reporting.formats import describe_scores, environment_title, interval_text


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: 1 step, 20 steps."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def step_message(step: Mapping[str, Any]) -> str:
    """Return what is to be said of a finished step: figures, tokens and seconds, or whose work it was."""
    reward, loss = step.get("reward"), (step.get("update") or {}).get("loss")
    figures = [f"{name} {value:.3f}" for name, value in (("reward", reward), ("loss", loss)) if value is not None]
    if not step["computed"]:
        return ", ".join([f"cached ({', '.join(step.get('runs') or ('?',))})", *figures])
    return ", ".join([*figures, f"{step['tokens']:,} tokens", f"{sum(step['seconds'].values()):.1f} s"])


def outcome_message(outcome: Mapping[str, Any]) -> str:
    """Return what a flow came to, out of what it returns: steps, first and last figure, held-out scores, work done."""
    if "tables" in outcome:
        return _maintenance_message(outcome)
    steps = outcome.get("steps", ())
    parts = [part for part in (plural(len(steps), "step"), _course(steps)) if steps and part]
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
    verb = "would be removed" if done.get("dry_run") else "removed"
    merged, deleted = plural(done["merged"], "file"), plural(done["deleted"], "file")
    tables = plural(len(done["tables"]), "table")
    return f"{tables}: {merged} merged, {deleted} deleted; {plural(len(removed), 'run')} {verb}"
