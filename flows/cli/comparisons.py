"""diff, curves, evals: commands that compare runs by settings and work, rewards by step, and held-out examples."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from configs.errors import ConfigError
from configs.run import RunConfig
from configs.store import default_store
from flows.cli.arguments import Force, Index, Json, StoreOption, option
from flows.cli.run_report import describe
from flows.queries.compare import compare
from flows.queries.compare_rows import step_detail
from flows.queries.compare_summary import sheets, summary_lines
from flows.queries.scores import EvaluationScores, RecordedEvaluation, mixed_policies, recorded_evaluations
from flows.queries.store_reader import StoreReader, recorded_run
from flows.reporting.artifacts import escape
from flows.reporting.curve import Point, curves_svg
from flows.reporting.formats import (
    chart,
    console,
    environment_title,
    fixed_point,
    grid,
    interval_text,
    markdown_table,
    say,
    with_interval,
)
from flows.reporting.output_files import check_output, write_text, write_whole
from flows.reporting.panel import printable
from storage.read.frames import existing_store
from storage.store import Store
from tasks.arrays.columns import texts
from tasks.assignment.examples import values_of
from tasks.evaluation.stage import example_means, paired_differences, rewards_of

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
    reader = StoreReader.at(store or default_store(), most_bytes=None)
    a, b = (recorded_run(reader.store, run)[0] for run in (run_a, run_b))
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
    root = existing_store(store or default_store())
    found = [describe(root, *named) for named in [recorded_run(root, name) for name in runs]]
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
    scores = [
        f"| {run['run']} | {score['version']} | {escape(one['environment'])} | {fixed_point(one['average'])} |"
        for run in runs
        for score in run["evaluations"]
        for one in score["scores"]
    ]
    heads = ["| run | policy version | environment | score |", "|---|---:|---|---:|"]
    return ["", "On held-out examples:", "", *heads, *scores] if scores else []


Row = dict[str, Any]
_FIELDS: Mapping[str, pa.DataType] = {
    **{"run": pa.string(), "version": pa.int64(), "policy_key": pa.string(), "set": pa.string()},
    **{"environment": pa.string(), "bucket": pa.string(), "figure": pa.string()},
    **{"value": pa.float64(), "low": pa.float64(), "high": pa.float64(), "floor": pa.float64()},
    **{"num_examples": pa.int64(), "num_attempts": pa.int64(), "num_errors": pa.int64()},
    **{"difference": pa.float64(), "difference_low": pa.float64(), "difference_high": pa.float64()},
    "num_paired": pa.int64(),
}
SCHEMA = pa.schema(_FIELDS)
"""One figure of one evaluation; `bucket` is the field's value as JSON, `difference` to the first row of its like.

`num_examples` are those that the figure is a mean over, `num_paired` those that the difference is one over.
"""


@dataclass(frozen=True)
class EvaluationPart:
    """The rollouts of one evaluation in one environment, of one bucket of its examples."""

    run: str
    recorded: RecordedEvaluation
    environment: str
    bucket: str | None
    evaluated: EvaluationScores
    traces: pa.Table

    @property
    def like(self) -> tuple[str, str, str | None]:
        """What is compared with each other."""
        return self.recorded.set_name, self.environment, self.bucket


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
    root = existing_store(store or default_store())
    named = [recorded_run(root, name) for name in runs or ["latest"]]  # all are looked up before the first is read
    parts = [part for name, config in named for part in parts_of(root, name, config, by)]
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
        rows = [_cells(row, bool(by)) for row in found]
        console().print(grid(headings, rows, left=range(headings.index("value"))))
        for line in filter(None, (mixed_policies(root, name) for name, _ in named)):
            console().print(printable(line))
    return 0


def parts_of(store: Store, run: str, config: RunConfig, by: str = "") -> Iterator[EvaluationPart]:
    """Yield the evaluations of a run by environment and, with `by`, by the values of that field of the examples."""
    for recorded in recorded_evaluations(store, run, config):
        evaluated = recorded.scores_in(store, config)
        for environment in sorted(set(texts(evaluated.traces["environment"]))):
            own = evaluated.traces.filter(pc.field("environment") == environment)
            for bucket, examples in _buckets(store, recorded, environment, by).items():
                chosen = own if examples is None else own.filter(pc.is_in(own["example_id"], value_set=examples))
                if chosen.num_rows:
                    yield EvaluationPart(run, recorded, environment, bucket, evaluated, chosen)


def rows_of(parts: Sequence[EvaluationPart]) -> Iterator[Row]:
    """Yield the figures of evaluations, each with its difference to the first evaluation of the same set."""
    first: dict[tuple[str, str, str | None], EvaluationPart] = {}
    for part in parts:
        # Only attempts at the same set, environment and bucket are compared example by example.
        base = first.setdefault(part.like, part)
        passing = part.evaluated.pass_at, part.evaluated.pass_reward
        changes = paired_differences(base.traces, part.traces, *passing) if base is not part else []
        paired = {change.figure: asdict(change) for change in changes}
        (score,) = part.evaluated.of(part.traces)
        average: dict[str, Any] = {
            "estimate": score["average"],
            "floor": score["average_floor"],
            "interval": score["interval"],
        }
        average["num_examples"] = len(example_means(rewards_of(part.traces)[part.environment]))
        for figure, values in {
            "avg": average,
            **{f"pass@{passed['k']}": passed for passed in score["pass_at"]},
        }.items():
            change = paired.get(figure, {})
            yield {
                "run": part.run,
                "version": part.recorded.version,
                "policy_key": part.recorded.policy_key,
                "set": part.recorded.set_name,
                **{"environment": part.environment, "bucket": part.bucket, "figure": figure},
                **{"value": values["estimate"], "floor": values["floor"], "num_examples": values["num_examples"]},
                **{end: (values["interval"] or {}).get(end) for end in ("low", "high")},
                **{"num_attempts": score["num_attempts"], "num_errors": sum(score["errors"].values())},
                **{"difference": change.get("difference"), "num_paired": change.get("num_examples")},
                **{f"difference_{end}": (change.get("interval") or {}).get(end) for end in ("low", "high")},
            }


def _buckets(store: Store, recorded: RecordedEvaluation, environment: str, by: str) -> dict[str | None, Any]:
    """Return the examples of an environment by the JSON of a field of theirs; None for all without a field."""
    if not by:
        return {None: None}
    found = store.ledger.find(recorded.assigned.inputs["examples"]) if recorded.assigned else None
    if found is None or recorded.assigned is None:
        raise ConfigError([f"the examples of policy {recorded.version} are not in the store; leave --by out"])
    # The table of examples has all of the environment: only those that were assigned are counted.
    tried = store.read(recorded.assigned.slices("assignments"), ["environment", "example_id"])
    chosen = tried.filter(pc.field("environment") == environment)["example_id"]
    rows = store.read(found.slices("examples"))
    rows = rows.filter((pc.field("environment") == environment) & pc.field("example_id").isin(chosen.combine_chunks()))
    names: dict[str, list[str]] = {}
    for name, value in zip(texts(rows["example_id"]), values_of(rows, environment, by), strict=True):
        # JSON keeps apart what prints alike, such as 1 and "1".
        names.setdefault(json.dumps(value, sort_keys=True), []).append(name)
    return {bucket: pa.array(names[bucket], pa.string()) for bucket in sorted(names)}


def _cells(row: Row, buckets: bool) -> list[str]:
    interval, change = (
        None if row[f"{name}low"] is None else {end: row[f"{name}{end}"] for end in ("low", "high")}
        for name in ("", "difference_")
    )
    errors = f"{row['num_errors']} of {row['num_attempts']}" if row["num_errors"] else "0"
    # A difference is over the examples that both have: where those are fewer, it is said.
    fewer = f" (of {row['num_paired']})" if row["num_paired"] != row["num_examples"] else ""
    return [
        row["run"],
        str(row["version"]) if row["policy_key"] else "external",
        environment_title(row["set"], row["environment"]),
        *([row["bucket"]] if buckets else []),
        *(row["figure"], with_interval(row["value"], {"interval": interval}), str(row["num_examples"]), errors),
        "-" if row["difference"] is None else f"{row['difference']:+.3f}{fewer}",
        interval_text(change, "+"),
    ]
