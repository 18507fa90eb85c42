"""An example over a run's history: its task, every attempt at it in training and in evaluations, and how these went.

Attempts are found in the index of traces; further columns are read of the steps alone that tried the example.
"""

from typing import Any

import polars as pl

from flows.queries.identify import nearest
from flows.queries.request import NotThere
from flows.queries.rollouts import rounds_of, traces_of
from flows.queries.store_reader import StoreReader
from flows.queries.trace import index

PASS_REWARD = 1.0
"""What an attempt that passes earns at least, as evaluations count it (tasks.evaluation.stage.estimates)."""
ATTEMPT = (
    "step",
    "for_training",
    "set",
    "trace_id",
    "key",
    "agent",
    "trainable",
    "reward",
    "advantage",
    "outcome",
    "detail",
    "error_class",
    "stop_condition",
    "num_turns",
    "num_input_tokens",
    "num_output_tokens",
    "policy_version",
    "staleness",
    "group_id",
    "assignment_id",
    "started_at",
    "seconds",
)
"""What is told of an attempt; of an evaluation, `step` is the version of the policy that was scored."""


def example(library: StoreReader, run: str, environment: str, example_id: str) -> dict[str, Any] | None:
    """Return the example as the run's environment gave it: `split` and `task`, JSON; None where it was not listed.

    Raises NotThere for an unknown run.
    """
    rows = library.frames(run)["examples"]
    named = (pl.col("environment") == environment) & (pl.col("example_id") == example_id)
    found = rows.filter(named).select("step", "split", "task").sort("step").collect()
    return found.drop("step").row(-1, named=True) if len(found) else None


def attempts(library: StoreReader, run: str, environment: str, example_id: str) -> pl.DataFrame:
    """Return all attempts at an example that a run uses, by step, those of evaluations after those of training.

    Columns as in `ATTEMPT`; `set` is null in training. Raises NotThere, with the nearest examples, where there is none.
    """
    lineages = library.history(run).lineages
    known = index(library, [lineage.traces for lineage in lineages])
    own = known.filter((pl.col("environment") == environment) & (pl.col("example_id") == example_id))
    if own.is_empty() and example(library, run, environment, example_id) is None:
        raise NotThere(_nowhere(run, environment, example_id, known))
    keys = set(own["key"])
    of_example = [lineage for lineage in lineages if lineage.traces.key in keys]
    rows = traces_of(library, run, of_example)
    rows = rows.filter((pl.col("environment") == environment) & (pl.col("example_id") == example_id))
    scoring = [lineage.traces for lineage in of_example if not lineage.for_training]
    sets = rounds_of(library, run, scoring).select("key", "set")
    rows = rows.join(sets, on="key", how="left", maintain_order="left")
    rows = rows.with_columns(for_training=~pl.col("key").is_in([work.key for work in scoring]))
    return rows.sort("step", ~pl.col("for_training"), maintain_order=True).select(ATTEMPT)


def by_step(rows: pl.DataFrame) -> pl.DataFrame:
    """Return how attempts went, for each step or evaluation and agent.

    Columns: step, for_training, set, agent, num_attempts, num_scored, reward (mean), lowest, highest, num_passed and
    pass_rate, the share of the scored that earned PASS_REWARD or more; null where none was scored.
    """
    reward = pl.col("reward")
    passed = (reward >= PASS_REWARD).sum().cast(pl.Int64)
    return rows.group_by("step", "for_training", "set", "agent", maintain_order=True).agg(
        num_attempts=pl.len().cast(pl.Int64),
        num_scored=reward.count().cast(pl.Int64),
        reward=reward.mean(),
        lowest=reward.min(),
        highest=reward.max(),
        num_passed=passed,
        pass_rate=pl.when(reward.count() > 0).then(passed / reward.count()),
    )


def _nowhere(run: str, environment: str, example_id: str, known: pl.DataFrame) -> str:
    names = known.select(pl.concat_str("environment", "example_id", separator="/").unique(maintain_order=True))
    near = nearest(f"{environment}/{example_id}", names.to_series())
    told = f"; the nearest that it tried are {', '.join(near)}" if near else ""
    return f"run {run!r} has no example {example_id!r} of {environment!r}{told}"
