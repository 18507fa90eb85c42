"""The command show: a run at a glance, and the stages that a change to its config would run again."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from rich.text import Text

from flows.cli.arguments import (
    Count,
    Json,
    Name,
    RunItems,
    StoreOption,
    one_run,
    option,
    run_and_step,
    split_items,
    stored_run,
)
from flows.reporting.formats import (
    LONGEST_LINE,
    Grid,
    before_after,
    compact_number,
    console,
    count,
    describe_scores,
    environment_title,
    grid,
    one_line,
    paint,
    seconds,
    sparkline,
    visible,
)

MIN_WAITING = 0.1
"""Share of the time from which on a wait is worth a change of settings."""
FULL = 0.9
"""Share of `rollout.max_in_flight` from which on that is what holds rollouts back."""
MAX_CURVE_WIDTH = 48
CURVES = {"reward": "reward", "length": "length", "entropy": "entropy", "gap (KL)": "mismatch_kl", "loss": "loss"}
"""Figures of a step that are drawn, by the name of the line; the gap is the one between engine and learner."""
COLUMNS = {"kept": "kept", "loss": "loss", "grad norm": "grad_norm", "KL": "mismatch_kl"}
"""Columns of the table of steps after the rewards and the lost rollouts, each with its figure."""


def show(
    *items: RunItems,
    name: Name = "",
    last: Annotated[Count, option("number of last steps to print")] = 10,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print a run: all steps as curves, the last ones, or the step of RUN:STEP, as rows.

    Raises RunUnknown, NotThere for an unknown step, LayoutError without a store; none is made.
    """
    from flows.cli.run_report import describe
    from flows.queries.compare_summary import ranges
    from flows.queries.request import NotThere

    runs, overrides = split_items(items)
    run, step = run_and_step(one_run([name, *runs]))
    reader, run, config = stored_run(store, run)
    report = describe(reader.store, run, config, overrides)
    steps = [entry["step"] for entry in report["steps"]]
    if step is not None and step not in steps:
        raise NotThere(f"run {run!r} has no step {step}; it has {ranges(steps) or 'none yet'}")
    printed = report["steps"][-last:] if step is None else [report["steps"][steps.index(step)]]
    if as_json:
        print(json.dumps(report if step is None else printed[0], sort_keys=True))
        return 0
    for part in _parts(report, printed):
        if part:
            console().print(one_line(part, LONGEST_LINE) if isinstance(part, str) else part)
    return 0


def _parts(report: dict[str, Any], printed: Sequence[dict[str, Any]]) -> Iterator[str | Text | Grid]:
    """Yield the lines and tables of a run."""
    from flows.queries.notes import note_line
    from flows.queries.run_state import look_of
    from flows.reporting.messages import losses_message
    from flows.reporting.usual_range import describe_exits

    state, badge, steps = report["state"], look_of(report["state"]), report["steps"]
    if report["process_gone"]:
        state, badge = f"{state}; its process is gone", "warn"
    head = Text(visible(f"{report['kind']} {report['run']}: "))
    yield head + paint(state, badge) + f", {len(steps)}/{report['num_steps']} steps"
    yield report["message"]
    for name in ("model", "environments", "algorithms"):
        if value := report[name]:
            yield f"{name:<13} {value if isinstance(value, str) else ', '.join(value)}"
    if total := sum(sum(step["seconds"].values()) for step in steps):
        tokens = sum(max(step["tokens"].values(), default=0) for step in steps)
        yield f"{'total':<13} {seconds(total)} of work in steps, {count(tokens)} tokens"
    if report["lost_services"]:
        counts = ", ".join(f"{service} {number}" for service, number in report["lost_services"].items())
        yield f"services lost: {counts}; the last one: {report['last_lost_service']}"
    yield from map(note_line, report["notes"])
    yield losses_message(steps)
    yield describe_exits(steps)
    yield from _curves(report)
    if verdict := stream_verdict([step["stream"] for step in steps]):
        yield f"{'stream':<13} {verdict}"
    yield _step_table(printed)
    if len(printed) < len(steps):
        yield f"{len(printed)} of {len(steps)} steps; --last N shows more"
    yield from _scores(report)
    if report["comparisons"]:
        yield before_after(report["comparisons"])
    yield f"tables: {report['store']}/tables"
    for stage, works in report.get("change", {}).items():
        yield f"{stage:<21} {works.get('computed', 0):>5} to compute, {works.get('found', 0):>5} cached"


def _curves(report: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each figure that at least two steps, or two scored policies, have."""
    by_version: dict[int, list[float]] = {}
    for evaluation in report["evaluations"]:  # a policy may be scored on several sets
        averages = (score["average"] for score in evaluation["scores"])
        by_version.setdefault(evaluation["version"], []).extend(value for value in averages if value is not None)
    held_out = [sum(values) / len(values) for _, values in sorted(by_version.items()) if values]
    series = {name: [step[field] for step in report["steps"]] for name, field in CURVES.items()}
    for name, values in {"reward": series.pop("reward"), "held out": held_out, **series}.items():
        numbers = [value for value in values if value is not None]
        if len(numbers) > 1:
            begin = f"{name:<9} {compact_number(numbers[0]):>9} to {compact_number(numbers[-1]):<9} "
            yield begin + sparkline(values, max(1, min(MAX_CURVE_WIDTH, console().width - len(begin))))


def stream_verdict(steps: Sequence[Mapping[str, float]]) -> str:
    """Return who waited in a run whose steps took their rollouts from a stream, and what to change; empty for others.

    Each step has its metrics `stream/NAME` by name; means are over time.
    """
    measured = [step for step in steps if step.get("seconds")]
    if not measured:
        return ""
    total = sum(step["seconds"] for step in measured)
    waited, idle, full, stale = (
        sum(step["seconds"] * step.get(name, 0.0) for step in measured) / total
        for name in ("learner_waited", "engine_idle", "fullness", "stale")
    )
    ages = [step["token_age/mean"] for step in measured if "token_age/mean" in step]
    advice = "neither has to be changed"
    if stale >= MIN_WAITING:
        advice = "raise rollout.max_off_policy_steps, or lower assignment.oversampling where it is above 1"
    elif waited >= MIN_WAITING and full >= FULL:
        advice = "raise rollout.max_in_flight if the engine has room, or give it more of the machine"
    elif waited >= MIN_WAITING:
        advice = "raise rollout.max_off_policy_steps, so that more groups may be begun"
    elif idle >= MIN_WAITING:
        advice = "the learner is what the run waits for; fewer rollout.max_off_policy_steps may do"
    return (
        f"the learner waited {waited:.0%} of the time; the engine was idle {idle:.0%} of it, on average {full:.0%} full"
        f"{f', tokens were {sum(ages) / len(ages):.1f} steps old' if ages else ''}"
        f"{f', {stale:.0%} of the groups came to be too old' if stale else ''}: {advice}"
    )


def _step_table(steps: Sequence[dict[str, Any]]) -> Grid:
    from flows.reporting.messages import LOSSES, count_losses

    losses = [count_losses([step]) for step in steps]
    lost = [outcome for outcome in LOSSES if any(counts[outcome].total() for counts in losses)]
    rows = [
        (
            step["step"],
            compact_number(step["reward"]),
            *(f"{counts[outcome].total():,}" for outcome in lost),
            *(compact_number(step[name]) for name in COLUMNS.values()),
            max(step["tokens"].values(), default=0),
        )
        for step, counts in zip(steps, losses, strict=True)
    ]
    return grid(("step", "reward", *(LOSSES[outcome] for outcome in lost), *COLUMNS, "tokens"), rows, left=())


def _scores(report: dict[str, Any]) -> Iterator[str]:
    """Yield the scores of the last policy that was scored, and how many others were."""
    versions = {evaluation["version"] for evaluation in report["evaluations"]}
    last = [evaluation for evaluation in report["evaluations"] if evaluation["version"] == max(versions)]
    for evaluation, score in [(row, score) for row in last for score in row["scores"]]:
        where = environment_title(evaluation["set"], score["environment"])
        attempts = f"{score['num_attempts']} attempts at {score['num_examples']} examples"
        yield f"policy {evaluation['version']} on held-out {where}: {describe_scores(score)}; {attempts}"
    if len(versions) > 1:
        yield f"{len(versions)} policies were scored: `stagecoach evals {report['run']}` lists all"
    yield report["mixed_policies"]
