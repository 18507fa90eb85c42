"""The command show: a run at a glance."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from rich.text import Text

from flows.cli.arguments import Count, Json, RunOrLatest, StoreOption, option, run_and_step, stored_run
from flows.reporting.formats import (
    LONGEST_LINE,
    Grid,
    before_after,
    compact_number,
    console,
    describe_scores,
    environment_title,
    grid,
    one_line,
    paint,
    sparkline,
    visible,
)

MAX_CURVE_WIDTH = 48
CURVES = {"reward": "reward", "length": "length", "entropy": "entropy", "gap (KL)": "mismatch_kl", "loss": "loss"}
"""Figures of a step that are drawn, by the name of the line; the gap is the one between engine and learner."""
COLUMNS = {"kept": "kept", "loss": "loss", "grad norm": "grad_norm", "KL": "mismatch_kl"}
"""Columns of the table of steps after the rewards and the lost rollouts, each with its figure."""


def show(
    run: RunOrLatest = "latest",
    /,
    *,
    last: Annotated[Count, option("number of last steps to print")] = 10,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print a run: all steps as curves, the last ones, or the step of RUN:STEP, as rows.

    Raises RunUnknown, NotThere for an unknown step, LayoutError without a store; none is made.
    """
    from flows.cli.run_report import describe
    from flows.queries.request import NotThere, nearest_numbers

    name, step = run_and_step(run)
    reader, name, config = stored_run(store, name)
    report = describe(reader.store, name, config)
    steps = [entry["step"] for entry in report["steps"]]
    if step is not None and step not in steps:
        raise NotThere(f"run {name!r} has no step {step}; the nearest are {nearest_numbers(steps, step) or 'none yet'}")
    printed = report["steps"][-last:] if step is None else [report["steps"][steps.index(step)]]
    if as_json:
        print(json.dumps(report if step is None else printed[0], sort_keys=True))
        return 0
    for part in filter(None, _parts(report, printed)):
        console().print(one_line(part, LONGEST_LINE) if isinstance(part, str) else part)
    return 0


def _parts(report: dict[str, Any], printed: Sequence[dict[str, Any]]) -> Iterator[str | Text | Grid]:
    """Yield the lines and tables of a run."""
    from flows.queries.notes import note_line
    from flows.reporting.figures import describe_warnings
    from flows.reporting.messages import losses_message

    steps = report["steps"]
    head = Text(visible(f"{report['kind']} {report['run']}: "))
    yield head + paint(report["state"], report["look"]) + f", {len(steps)}/{report['num_steps']} steps"
    yield report["message"]
    for name in ("model", "environments", "algorithms"):
        if value := report[name]:
            yield f"{name:<13} {value if isinstance(value, str) else ', '.join(value)}"
    if lost := report["lost_services"]:
        yield f"services lost: {', '.join(f'{service} {number}' for service, number in lost.items())}"
    yield from map(note_line, report["notes"])
    yield losses_message(steps)
    yield describe_warnings([report])
    for name, field in CURVES.items():
        values = [step[field] for step in steps]
        numbers = [value for value in values if value is not None]
        if len(numbers) > 1:
            begin = f"{name:<9} {compact_number(numbers[0]):>9} to {compact_number(numbers[-1]):<9} "
            yield begin + sparkline(values, max(1, min(MAX_CURVE_WIDTH, console().width - len(begin))))
    yield _step_table(printed)
    if len(printed) < len(steps):
        yield f"{len(printed)} of {len(steps)} steps; --last N shows more"
    yield from _scores(report)
    if report["comparisons"]:
        yield before_after(report["comparisons"])
    yield report["mixed_policies"]


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
            step["tokens"],
        )
        for step, counts in zip(steps, losses, strict=True)
    ]
    return grid(("step", "reward", *(LOSSES[outcome] for outcome in lost), *COLUMNS, "tokens"), rows, left=())


def _scores(report: dict[str, Any]) -> Iterator[str]:
    """Yield the scores of the last policy that was scored."""
    last = max((evaluation["version"] for evaluation in report["evaluations"]), default=None)
    for evaluation in report["evaluations"]:
        for score in evaluation["scores"] if evaluation["version"] == last else ():
            where = environment_title(evaluation["set"], score["environment"])
            attempts = f"{score['num_attempts']} attempts at {score['num_examples']} examples"
            yield f"policy {last} on held-out {where}: {describe_scores(score)}; {attempts}"
