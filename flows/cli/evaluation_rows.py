"""Figures of evaluations as rows, each with its difference to the first evaluation of the same set."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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


def cells(row: Row, buckets: bool) -> list[str]:
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
