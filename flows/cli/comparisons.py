"""diff, curves, evals: commands that compare runs by settings and work, rewards by step, and held-out examples."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from flows.cli.arguments import Force, Index, Json, StoreOption, open_reader, option, stored_run
from flows.reporting.formats import chart, console, fixed_point, grid, markdown_table, say

MOST_CURVE_ROWS = 12
"""Steps whose rewards are printed as numbers below the curves."""
LONGEST_CHART = 120


def diff(
    run_a: Annotated[str, option("the first run", "RUN_A")],
    run_b: Annotated[str, option("the run that is compared with it", "RUN_B")],
    /,
    *,
    step: Annotated[Index | None, option("compare one step: its traces, samples and groups")] = None,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print how the second run differs from the first; with `step`, down to the samples of that step.

    Raises RunUnknown, NotThere for a step that neither run has, LayoutError without a store.
    """
    from flows.queries.compare import compare
    from flows.queries.compare_rows import step_detail
    from flows.queries.compare_summary import sheets, summary_lines
    from flows.queries.store_reader import recorded_run
    from flows.reporting.panel import printable

    reader, a, _ = stored_run(store, run_a)
    b, _ = recorded_run(reader.store, run_b)
    comparison = dict(compare(reader, a, b))
    if step is not None:
        comparison["detail"] = step_detail(reader, a, b, step)
    if as_json:
        print(json.dumps(comparison, sort_keys=True))
        return 0
    out = console()
    for line in summary_lines(comparison):
        out.print(printable(line))
    for sheet in sheets(comparison):
        out.print(f"\n{printable(sheet.title)}", style="bold")
        out.print(grid(sheet.headings, sheet.rows))
    return 0


def curves(
    *runs: Annotated[str, option("one run or several", "RUN", required=True)],
    output: Annotated[str, option("write a page in Markdown, and its picture", "FILE")] = "",
    force: Force = False,
    store: StoreOption = "",
) -> int:
    """Print the rewards of runs by step, or write a page and its picture. Raises ConfigError for an unknown run."""
    from flows.cli.run_report import describe
    from flows.queries.store_reader import recorded_run
    from flows.reporting.curve import Point, curves_svg
    from flows.reporting.output_files import check_output, write_text

    reader = open_reader(store)
    found = [describe(reader.store, *recorded_run(reader.store, name)) for name in runs]
    rewards = {run["run"]: {s["step"]: s["reward"] for s in run["steps"] if s["reward"] is not None} for run in found}
    steps = sorted({step for of_run in rewards.values() for step in of_run})
    headings = ["step", *rewards]
    rows = [[str(step), *(fixed_point(of_run.get(step)) for of_run in rewards.values())] for step in steps]
    if not output:
        _draw(rewards, steps)
        places = {round(place * (len(rows) - 1) / (MOST_CURVE_ROWS - 1)) for place in range(MOST_CURVE_ROWS)}
        console().print(grid(headings, [rows[place] for place in sorted(places)] if rows else [], left=()))
        if len(rows) > MOST_CURVE_ROWS:
            say(f"{MOST_CURVE_ROWS} of {len(rows)} steps; --output FILE writes all")
        return 0
    picture = Path(output).with_suffix(".svg")
    series = {run: [Point(step, reward) for step, reward in of_run.items()] for run, of_run in rewards.items()}
    lines = [
        "# Learning curves, side by side",
        "",
        "The mean reward of each step's rollouts. Made by:",
        "",
        "```bash",
        f"stagecoach curves {' '.join(runs)}",
        "```",
        "",
        f"![curves]({picture.name})",
        "",
        *markdown_table(headings, rows),
        *_score_lines(found),
    ]
    check_output(Path(output), force)
    write_text(picture, curves_svg(series, "mean reward by step"), force)
    write_text(Path(output), "\n".join(lines) + "\n", force)
    print(f"written to {output} and {picture}")
    return 0


def _draw(rewards: Mapping[str, Mapping[int, float]], steps: Sequence[int]) -> None:
    """Draw the rewards of each run below each other, all between the same bounds and over the same steps."""
    values = [value for of_run in rewards.values() for value in of_run.values()]
    width = min(console().width, LONGEST_CHART)
    for run, of_run in rewards.items():
        if len(of_run) > 1:
            say(f"{run}: mean reward of steps {min(of_run)} to {max(of_run)}")
            for line in chart([of_run.get(step) for step in steps], min(values), max(values), width):
                print(line)


def _score_lines(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return lines of a page on what policies scored on held-out examples; none where no policy was evaluated."""
    from flows.reporting.artifacts import escape

    scores = [
        f"| {run['run']} | {score['version']} | {escape(one['environment'])} | {fixed_point(one['average'])} |"
        for run in runs
        for score in run["evaluations"]
        for one in score["scores"]
    ]
    heads = ["| run | policy version | environment | score |", "|---|---:|---|---:|"]
    return ["", "On held-out examples:", "", *heads, *scores] if scores else []


def evals(
    *runs: Annotated[str, option("runs; without any, the newest", "RUN")],
    by: Annotated[str, option("separate figures for each value of a field of the examples' tasks", "FIELD")] = "",
    output: Annotated[str, option("write the figures as Parquet, one row for each", "FILE")] = "",
    force: Force = False,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print the evaluations of runs, or write them as Parquet.

    Raises ConfigError for an unknown run or runs without evaluations, FieldMissing for a field that examples lack.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from configs.errors import ConfigError
    from flows.cli.evaluation_rows import SCHEMA, cells, parts_of, rows_of
    from flows.queries.scores import mixed_policies
    from flows.queries.store_reader import recorded_run
    from flows.reporting.output_files import write_whole
    from flows.reporting.panel import printable

    reader = open_reader(store)
    # All are looked up before the first is read.
    named = [recorded_run(reader.store, name) for name in runs or ["latest"]]
    parts = [part for name, config in named for part in parts_of(reader.store, name, config, by)]
    if not parts:
        tried = ", ".join(name for name, _ in named)
        raise ConfigError([f"{tried}: no policy was evaluated; do so with stagecoach eval"])
    found = list(rows_of(parts))
    if output:
        answer = pa.Table.from_pylist(found, schema=SCHEMA)
        write_whole(Path(output), lambda draft: pq.write_table(answer, draft), force)
        print(f"{len(found)} figures written to {Path(output)}")
    elif as_json:
        print(json.dumps(found, sort_keys=True))
    else:
        headings = ["run", "policy", "held-out", *(["bucket"] if by else []), "figure", "value", "examples"]
        headings += ["errors", "to the first", "95% interval"]
        rows = [cells(row, bool(by)) for row in found]
        console().print(grid(headings, rows, left=range(headings.index("value"))))
        for line in filter(None, (mixed_policies(reader.store, name) for name, _ in named)):
            console().print(printable(line))
    return 0
