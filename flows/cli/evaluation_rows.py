"""Figures of evaluations as rows, each with its difference to the first evaluation of the same set."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from configs.errors import ConfigError
from configs.run import RunConfig
from flows.queries.scores import EvaluationScores, RecordedEvaluation, recorded_evaluations
from flows.reporting.formats import environment_title, interval_text, with_interval
from storage.store import Store
from tasks.arrays.columns import texts
from tasks.assignment.examples import values_of
from tasks.evaluation.stage import example_means, paired_differences, rewards_of

Row = dict[str, Any]
TYPES: dict[pa.DataType, tuple[str, ...]] = {
    pa.string(): ("run", "policy_key", "set", "environment", "bucket", "figure"),
    pa.int64(): ("version", "num_examples", "num_attempts", "num_errors", "num_paired"),
    pa.float64(): ("value", "low", "high", "floor", "difference", "difference_low", "difference_high"),
}
SCHEMA = pa.schema([(name, kind) for kind, names in TYPES.items() for name in names])
"""One figure of one evaluation; `bucket` is the field's value as JSON, `difference` to the first row of its like.

`num_examples` are those that the figure is a mean over, `num_paired` those that the difference is one over.
"""


def evaluation_rows(store: Store, runs: Iterable[tuple[str, RunConfig]], by: str = "") -> Iterator[Row]:
    """Yield the figures of the evaluations of some runs, columns as in SCHEMA.

    With `by`, each value of that field of the examples has figures. Raises ConfigError, FieldMissing.
    """
    # Only attempts at the same set, environment and bucket are compared example by example.
    first: dict[tuple[str, str, str | None], pa.Table] = {}
    for run, config in runs:
        for recorded in recorded_evaluations(store, run, config):
            scores = recorded.scores_in(store, config)
            about = {"run": run, "version": recorded.version, "policy_key": recorded.policy_key}
            for environment in sorted(set(texts(scores.traces["environment"]))):
                traces = scores.traces.filter(pc.field("environment") == environment)
                for bucket, examples in _buckets(store, recorded, environment, by).items():
                    rows = traces if examples is None else traces.filter(pc.field("example_id").isin(examples))
                    if rows.num_rows:
                        like = {"set": recorded.set_name, "environment": environment, "bucket": bucket}
                        base = first.setdefault((recorded.set_name, environment, bucket), rows)
                        yield from (about | like | figures for figures in _figures(scores, rows, base))


def _figures(scores: EvaluationScores, traces: pa.Table, base: pa.Table) -> Iterator[Row]:
    """Yield the mean reward and pass@k of rollouts in one environment, each with its difference to those of `base`."""
    changes = [] if base is traces else paired_differences(base, traces, scores.pass_at, scores.pass_reward)
    paired: dict[str, Row] = {change.figure: asdict(change) for change in changes}
    (score,) = scores.of(traces)
    means = next(map(example_means, rewards_of(traces).values()), {})
    average = {"estimate": score["average"], "floor": score["average_floor"], "interval": score["interval"]}
    figures = {"avg": average | {"num_examples": len(means)}}
    for figure, values in (figures | {f"pass@{passed['k']}": passed for passed in score["pass_at"]}).items():
        change = paired.get(figure, {})
        yield {
            **{"figure": figure, "value": values["estimate"], "floor": values["floor"]},
            **{"num_examples": values["num_examples"], "num_attempts": score["num_attempts"]},
            **{"num_errors": sum(score["errors"].values())},
            **{"difference": change.get("difference"), "num_paired": change.get("num_examples")},
            **{end: (values["interval"] or {}).get(end) for end in ("low", "high")},
            **{f"difference_{end}": (change.get("interval") or {}).get(end) for end in ("low", "high")},
        }


def _buckets(store: Store, recorded: RecordedEvaluation, environment: str, by: str) -> dict[str | None, Any]:
    """Return the examples of an environment by the JSON of a field of theirs; None for all without a field."""
    if not by:
        return {None: None}
    listed = store.ledger.find(recorded.assigned.inputs["examples"]) if recorded.assigned else None
    if listed is None or recorded.assigned is None:
        raise ConfigError([f"the examples of policy {recorded.version} are not in the store; leave --by out"])
    # The table of examples has all of the environment: only those that were assigned are counted.
    assigned = store.read(recorded.assigned.slices("assignments"), ["environment", "example_id"])
    ids = assigned.filter(pc.field("environment") == environment)["example_id"].combine_chunks()
    rows = store.read(listed.slices("examples"))
    rows = rows.filter((pc.field("environment") == environment) & pc.field("example_id").isin(ids))
    names: dict[str | None, list[str]] = {}
    for name, value in zip(texts(rows["example_id"]), values_of(rows, environment, by), strict=True):
        # JSON keeps apart what prints alike, such as 1 and "1".
        names.setdefault(json.dumps(value, sort_keys=True), []).append(name)
    return dict(sorted(names.items()))


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row as texts for people, by the heading of their column."""
    interval, change = (
        None if row[f"{name}low"] is None else {end: row[f"{name}{end}"] for end in ("low", "high")}
        for name in ("", "difference_")
    )
    # A difference is over the examples that both have: where those are fewer, it is said.
    fewer = f" (of {row['num_paired']})" if row["num_paired"] != row["num_examples"] else ""
    return {
        "policy": f"{row['run']}:{row['version']}" if row["policy_key"] else f"{row['run']}: external",
        "figure": row["figure"],
        **({} if row["bucket"] is None else {"bucket": row["bucket"]}),
        "value": with_interval(row["value"], {"interval": interval}),
        "to the first": "-"
        if row["difference"] is None
        else f"{row['difference']:+.3f} {interval_text(change, '+')}{fewer}",
        "held-out": environment_title(row["set"], row["environment"]),
        "examples": str(row["num_examples"]),
        "errors": str(row["num_errors"]),
    }
