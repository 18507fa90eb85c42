"""Rows of two runs, read once to be compared, and what differs between those that both made of a step."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import polars as pl
import pyarrow as pa

from flows.queries.metrics import read_metrics
from flows.queries.store_reader import StoreReader
from storage.read.frames import Frames
from storage.read.lineage import Work
from storage.store import Store
from tasks.metrics.figures import (
    BATCH_COLUMNS,
    CREDIT_COLUMNS,
    MEANINGS,
    TRACE_COLUMNS,
    VERDICT_COLUMNS,
    Values,
    credit_figures,
    packing_figures,
    spread,
    trace_figures,
    verdict_figures,
)
from tasks.stages import EVALUATION, makers

REASONS = "reasons/"
MEASURES = (
    *("loss", "rl_loss", "ce_loss", "ref_kl_loss", "grad_norm", "entropy", "mismatch_kl", "masked_fraction"),
    *("learning_rate",),
)
"""What the learner measures of an update; of several updates their mean counts."""
READ_COLUMNS = {
    "traces": [*TRACE_COLUMNS, "environment", "example_id", "agent"],
    "verdicts": VERDICT_COLUMNS,
    "samples": CREDIT_COLUMNS,
    "batches": BATCH_COLUMNS,
    "updates": ["version", "update", "weights_sha256", *MEASURES],
}


FIGURES_OF_STEPS = (pl.col("scope") == "") & pl.any_horizontal(
    *(pl.col("name").str.starts_with(begin) for begin in ("batch/", REASONS)),
    pl.col("name").is_in([f"updates/{name}/mean" for name in MEASURES]),
)
"""The metrics of a step that are compared: an eighth of all that a step has."""


@dataclass(frozen=True)
class StepRows:
    """The rows that a step made, or several steps: a table is None where no step came that far.

    Each row has the `key` of the work that made it. Of a finished step that two runs share, only metrics and updates
    are read: nothing in it differs.
    """

    traces: pl.DataFrame | None = None
    verdicts: pl.DataFrame | None = None
    samples: pl.DataFrame | None = None
    batches: pl.DataFrame | None = None
    updates: pl.DataFrame | None = None
    tokens_per_row: int = 0
    """Tokens that a packed row has room for."""
    metrics: Values | None = None
    """What the step wrote of itself, as far as it is compared; None of an unfinished step, and of several together."""

    @cached_property
    def weights(self) -> str | None:
        """The digest of the weights that the last update made."""
        if self.updates is None or self.updates.is_empty():
            return None
        # Most steps make one update, and to sort one row a thousand times takes as long as to read them all.
        ordered = self.updates if self.updates.height == 1 else self.updates.sort("version", "update")
        return str(ordered["weights_sha256"][-1])

    def figures(self) -> dict[str, Any]:
        """Return the figures of `tasks.metrics.figures`, counts by reason, means of measures, weights digest.

        They are those that the finished step wrote; an unfinished one has none.
        """
        return {} if self.metrics is None else dict(self.numbers)

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """The same; those of an unfinished step are made of its rows."""
        return self._numbers_of_rows() if self.metrics is None else self._numbers_written(self.metrics)

    @property
    def num_updates(self) -> int:
        """Optimizer steps on the batch."""
        return 0 if self.updates is None else self.updates.height

    def _numbers_written(self, metrics: Values) -> dict[str, Any]:
        written = {name: value for (scope, name), value in metrics.items() if not scope}
        found: dict[str, Any] = {name: written[f"batch/{name}"] for name in MEANINGS if f"batch/{name}" in written}
        found |= {name: int(value) for name, value in found.items() if name.startswith("num_")}
        if "num_kept" in found:
            named = {name: int(value) for name, value in written.items() if name.startswith(REASONS)}
            found["reasons"] = {name.removeprefix(REASONS): count for name, count in named.items()}
        if self.updates is not None:
            found |= {name: written.get(f"updates/{name}/mean") for name in MEASURES} | {"weights": self.weights}
        return found

    def _numbers_of_rows(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.traces is not None:
            found |= trace_figures(as_arrow(self.traces))
        if self.traces is not None and self.verdicts is not None:
            found |= verdict_figures(as_arrow(self.traces), as_arrow(self.verdicts))
            left_out = self.verdicts.filter(~pl.col("keep")).group_by("reason").len().sort("reason")
            found["reasons"] = {str(reason): count for reason, count in left_out.iter_rows()}
        if self.samples is not None:
            found |= credit_figures(as_arrow(self.samples))
        if self.batches is not None:
            found |= packing_figures(as_arrow(self.batches), self.tokens_per_row * self.batches.height)
        if self.updates is not None:
            found |= {name: self.updates[name].mean() for name in MEASURES} | {"weights": self.weights}
        return found


def read_steps(store: Store, steps: Iterable[Mapping[str, Work]], *, shared: bool = False) -> list[StepRows]:
    """Return what the work of each of the given steps, by stage, has made; the tables are read together.

    With `shared`, of finished steps only their metrics and updates.
    """
    steps, frames = list(steps), Frames(store)
    found = [
        {
            name: works
            for name, works in _by_table(step).items()
            if name == "updates" or not (shared and is_finished(step))
        }
        for step in steps
    ]
    wanted = {name for each in found for name in each}
    rows = {name: _read(frames, name, [work for each in found for work in each.get(name, ())]) for name in wanted}
    metrics = read_metrics(frames, [step["metrics"] for step in steps if is_finished(step)], where=FIGURES_OF_STEPS)
    return [
        replace(_step_rows(step, works, rows), metrics=metrics.get(step["metrics"].key) if is_finished(step) else None)
        for step, works in zip(steps, found, strict=True)
    ]


def is_finished(step: Mapping[str, Work]) -> bool:
    """Say whether a step has written its metrics, which is the last that it does."""
    return "metrics" in step


def read_values(store: Store, steps: Iterable[Mapping[str, Work]]) -> tuple[pl.Series, pl.Series]:
    """Return the rewards of all traces of some steps, and the advantages of all samples, in whatever order."""
    frames, found = Frames(store), [_by_table(step) for step in steps]
    columns = {"traces": "reward", "samples": "advantage"}
    rewards, advantages = (
        frames.rows([work for each in found for work in each.get(table, ())], table).select(column).collect()[column]
        for table, column in columns.items()
    )
    return rewards, advantages


def join_steps(parts: Iterable[StepRows]) -> StepRows:
    """Return the rows of several steps as one."""
    steps = list(parts)
    made = {name: [rows for step in steps if (rows := getattr(step, name)) is not None] for name in READ_COLUMNS}
    tables: dict[str, Any] = {name: pl.concat(parts, rechunk=True) for name, parts in made.items() if parts}
    return StepRows(**tables)


def figures_together(steps: Sequence[StepRows], rewards: pl.Series, advantages: pl.Series) -> dict[str, Any]:
    """Return the figures over several steps, out of those of each and all `rewards` and `advantages` of theirs.

    Counts are sums, and shares are of the sums. Means of the learner's measures are over all optimizer steps.
    """
    own = [step.numbers for step in steps]
    names = {name for each in own for name in each}
    found: dict[str, Any] = {name: sum(each.get(name, 0) for each in own) for name in names if name[:4] == "num_"}
    for figure, values in (("reward", rewards), ("advantage", advantages)):
        known = spread(values.drop_nulls().to_list())
        found |= {name: known.get(name.removeprefix(f"{figure}_")) for name in names if name.startswith(f"{figure}_")}
    for name in names & {"truncated_ratio", "errored_ratio", "output_tokens_mean"}:
        found[name] = _weighted_mean((each.get(name), each.get("num_traces", 0)) for each in own)
    if "num_kept" in names:
        found["trainable_ratio"] = found["num_trainable"] / found["num_traces"] if found["num_traces"] else None
        found["reasons"] = dict(sum((Counter(each.get("reasons", {})) for each in own), Counter[str]()))
    if "num_rows" in names:
        room = sum(step.tokens_per_row * step.numbers.get("num_rows", 0) for step in steps)
        found["fill"] = found["num_tokens"] / room if room else None
    if "weights" in names:
        counts = [step.num_updates for step in steps]
        found |= {
            name: _weighted_mean((each.get(name), count) for each, count in zip(own, counts, strict=True))
            for name in MEASURES
        }
        found["weights"] = [step.weights for step in steps if step.weights is not None][-1:]
        found["weights"] = found["weights"][0] if found["weights"] else None
    return {name: found[name] for name in (*MEANINGS, "reasons", *MEASURES, "weights") if name in found}


def _weighted_mean(values: Iterable[tuple[float | None, int]]) -> float | None:
    """Return the mean of values, each with how many it stands for; None where none is known."""
    known = [(value, count) for value, count in values if value is not None and count]
    num = sum(count for _, count in known)
    return math.fsum(value * count for value, count in known) / num if num else None


def as_arrow(frame: pl.DataFrame) -> pa.Table:
    """Return a frame as an Arrow table of types that all of Arrow's functions know."""
    return frame.to_arrow(compat_level=pl.CompatLevel.oldest())


def _by_table(step: Mapping[str, Work]) -> dict[str, list[Work]]:
    """Return, by table, the work that made it: several pieces of a stage where groups of the step were refilled."""
    # Traces are made by several stages: scored again, those count rather than what was sampled.
    made_by = {name: next((stage for stage in makers(name) if stage in step), None) for name in READ_COLUMNS}
    return {
        name: [work for other, work in step.items() if other.partition(".")[0] == stage]
        for name, stage in made_by.items()
        if stage is not None
    }


def _read(frames: Frames, table: str, works: Iterable[Work]) -> dict[str, pl.DataFrame]:
    """Return the rows of finished works by attempt, and without rows under the empty name."""
    rows = (
        frames.rows(works, table)
        .select("attempt", "seq", *READ_COLUMNS[table], "key")
        .collect()
        .sort("seq")
        .drop("seq")
    )
    parts = rows.partition_by("attempt", as_dict=True, include_key=False)
    return {str(name): part for (name,), part in parts.items()} | {"": rows.clear().drop("attempt")}


def _step_rows(
    step: Mapping[str, Work], works: Mapping[str, Sequence[Work]], rows: Mapping[str, Mapping[str, pl.DataFrame]]
) -> StepRows:
    tables: dict[str, Any] = {name: _of(name, own, rows[name]) for name, own in works.items()}
    # As it was when it was packed: the config may be another one after a resume.
    budget = step["packing"].entry.section["packing"]["tokens_per_row"] if "packing" in step else 0
    return StepRows(**tables, tokens_per_row=budget)


def _of(table: str, works: Sequence[Work], rows: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    """Return the rows that works made of a table, in the order in which they were handed over."""
    attempts = [piece.attempt for work in works for piece in work.slices_of(table)]
    parts = [rows[attempt] for attempt in attempts if attempt in rows]
    return parts[0] if len(parts) == 1 else pl.concat([rows[""], *parts])


def rows_of_steps(library: StoreReader, works: Sequence[Mapping[str, Work]], *, shared: bool = False) -> list[StepRows]:
    """Return the rows that the work of steps, by stage, has made, read together; with `shared` as `read_steps` does.

    What was read is held by what names the rows. Steps that have all work in common have one object.
    """
    named = {_name(work): work for work in works}

    def read(names: list[tuple[tuple[str, ...], ...]]) -> dict[tuple[tuple[str, ...], ...], StepRows]:
        found = read_steps(library.store, [named[name] for name in names], shared=shared)
        return dict(zip(names, found, strict=True))

    found = library.cache.each_once(("compared rows", shared), list(named), read)
    return [found[_name(work)] for work in works]


def same_rows(a: Mapping[str, Work], b: Mapping[str, Work]) -> bool:
    """Say whether two steps, each its work by stage, have all rows in common."""
    return _name(a) == _name(b)


def _name(work: Mapping[str, Work]) -> tuple[tuple[str, ...], ...]:
    """Return what names all rows of a step: its stages, each with what names its rows."""
    stages = sorted(stage for stage in work if stage not in ("gate", EVALUATION))
    return tuple((stage, *work[stage].identity) for stage in stages)


SHOWN = 10
KEPT = "kept"


def differences_between(a: StepRows, b: StepRows) -> dict[str, Any]:
    """Return what differs over the traces and samples that both made; None where there is nothing to compare.

    Traces are the same where their ids are: those that were sampled anew have ids of their own.
    """
    if a is b:  # most steps of two runs that part late: nothing has to be looked for
        return _no_differences(a)
    equal = None if None in (a.weights, b.weights) else a.weights == b.weights
    # So is every step after two runs parted: to join what has nothing in common takes as long as to read it.
    if a.traces is not None and b.traces is not None and {*a.traces["trace_id"]}.isdisjoint(b.traces["trace_id"]):
        return {**_nothing_shared(a, b), "weights_equal": equal}
    return {**_trace_differences(a, b), **_sample_differences(a, b), "weights_equal": equal}


def _no_differences(rows: StepRows) -> dict[str, Any]:
    known = rows.numbers
    none_kept: list[str] | None = [] if "num_kept" in known else None
    no_distance = None if known.get("advantage_mean") is None else 0.0
    return {
        "num_shared_traces": known.get("num_traces"),
        "num_rewards_changed": 0 if "num_traces" in known else None,
        "kept_only_a": none_kept,
        "kept_only_b": none_kept,
        "num_shared_samples": known.get("num_samples"),
        "num_advantages_changed": 0 if "num_samples" in known else None,
        "max_advantage_difference": no_distance,
        "mean_advantage_difference": no_distance,
        "weights_equal": None if rows.weights is None else True,
    }


def _nothing_shared(a: StepRows, b: StepRows) -> dict[str, Any]:
    none_kept: list[str] | None = None if a.verdicts is None or b.verdicts is None else []
    none_changed = None if a.samples is None or b.samples is None else 0
    return {
        "num_shared_traces": 0,
        "num_rewards_changed": 0,
        "kept_only_a": none_kept,
        "kept_only_b": none_kept,
        "num_shared_samples": none_changed,
        "num_advantages_changed": none_changed,
        "max_advantage_difference": None,
        "mean_advantage_difference": None,
    }


def differences_together(pairs: Sequence[tuple[StepRows, StepRows]], num_equal: int) -> dict[str, Any]:
    """Return what differs over several steps, the pairs of both runs' rows in order.

    `num_equal` is how many samples with an advantage the steps have that both share.
    """
    parted = [pair for pair in pairs if pair[0] is not pair[1]]
    a, b = (join_steps(pair[side] for pair in parted) for side in (0, 1))
    found = differences_between(a, b)
    for shared in (_no_differences(pair[0]) for pair in pairs if pair[0] is pair[1]):
        for name in ("num_shared_traces", "num_rewards_changed", "num_shared_samples", "num_advantages_changed"):
            found[name] = _sum(found[name], shared[name])
        for name in ("kept_only_a", "kept_only_b", "max_advantage_difference"):
            found[name] = shared[name] if found[name] is None else found[name]
    both = a.samples is not None and b.samples is not None
    num_apart = shared_advantages(a, b)["difference"].count() if both else 0
    found["mean_advantage_difference"] = _weighted_mean(
        ((found["mean_advantage_difference"], num_apart), (0.0, num_equal))
    )
    last = [[pair[side].weights for pair in pairs if pair[side].weights is not None][-1:] for side in (0, 1)]
    return found | {"weights_equal": last[0] == last[1] if all(last) else None}


def _sum(*counts: int | None) -> int | None:
    known = [each for each in counts if each is not None]
    return sum(known) if known else None


def step_detail(a: StepRows, b: StepRows, most: int = SHOWN) -> dict[str, Any]:
    """Return the traces with another verdict, and the samples and groups that differ most; at most so many of each."""
    return {
        "verdicts": changed_verdicts(a, b).head(most).to_dicts(),
        "samples": changed_advantages(a, b).head(most).to_dicts(),
        "groups": changed_groups(a, b).head(most).to_dicts(),
    }


def changed_verdicts(a: StepRows, b: StepRows) -> pl.DataFrame:
    """Return the shared traces whose verdict is another: trace_id, and each run's `kept` or reason; in order of ids."""
    found = [trace_verdicts(rows) for rows in (a, b)]
    joined = found[0].join(found[1], on="trace_id", suffix="_b").rename({"outcome": "a", "outcome_b": "b"})
    return joined.filter(pl.col("a") != pl.col("b")).sort("trace_id")


def changed_advantages(a: StepRows, b: StepRows) -> pl.DataFrame:
    """Return the shared samples whose advantage is another, the greatest difference first: both, and b minus a."""
    joined = shared_advantages(a, b)
    return joined.filter(pl.col("difference") != 0).sort(
        pl.col("difference").abs(), "sample_id", descending=[True, False]
    )


def changed_groups(a: StepRows, b: StepRows) -> pl.DataFrame:
    """Return the shared groups that differ: each run's mean reward and traces kept, the greatest difference first."""
    farthest = pl.col("difference").abs().max().alias("max_advantage_difference")
    advantages = shared_advantages(a, b).group_by("group_id").agg(farthest)
    joined = _groups(a).join(_groups(b), on="group_id", suffix="_b").join(advantages, on="group_id", how="left")
    apart = (pl.col("reward_mean_b") - pl.col("reward_mean")).abs().fill_null(0)
    kept = (pl.col("num_kept_b") - pl.col("num_kept")).abs().fill_null(0)
    moved = pl.col("max_advantage_difference").fill_null(0)
    differing = joined.filter((apart > 0) | (kept > 0) | (moved > 0))
    ordered = differing.sort(moved, apart, kept, "group_id", descending=[True, True, True, False])
    return ordered.rename({"reward_mean": "reward_mean_a", "num_kept": "num_kept_a"})


def _trace_differences(a: StepRows, b: StepRows) -> dict[str, Any]:
    if a.traces is None or b.traces is None:
        return dict.fromkeys(("num_shared_traces", "num_rewards_changed", "kept_only_a", "kept_only_b"))
    joined = a.traces.join(b.traces, on="trace_id", suffix="_b")
    changed = joined.filter(~pl.col("reward").eq_missing(pl.col("reward_b")))
    judged = changed_verdicts(a, b) if a.verdicts is not None and b.verdicts is not None else None
    only = [None if judged is None else judged.filter(pl.col(run) == KEPT)["trace_id"].to_list() for run in "ab"]
    return {
        "num_shared_traces": joined.height,
        "num_rewards_changed": changed.height,
        "kept_only_a": only[0],
        "kept_only_b": only[1],
    }


def _sample_differences(a: StepRows, b: StepRows) -> dict[str, Any]:
    names = ("num_shared_samples", "num_advantages_changed", "max_advantage_difference", "mean_advantage_difference")
    if a.samples is None or b.samples is None:
        return dict.fromkeys(names)
    joined = shared_advantages(a, b)
    size = joined["difference"].abs()
    changed = joined.filter(pl.col("difference") != 0).height
    return dict(zip(names, (joined.height, changed, size.max(), size.mean()), strict=True))


def shared_advantages(a: StepRows, b: StepRows) -> pl.DataFrame:
    """Return one row for each sample of both: sample_id, group_id, advantages `a` and `b`, and difference, b - a."""
    frames = [table_columns(rows.samples, "sample_id", "group_id", "advantage") for rows in (a, b)]
    joined = frames[0].join(frames[1].drop("group_id"), on="sample_id", suffix="_b")
    both = joined.rename({"advantage": "a", "advantage_b": "b"})
    return both.with_columns((pl.col("b") - pl.col("a")).alias("difference"))


def _groups(rows: StepRows) -> pl.DataFrame:
    traces = table_columns(rows.traces, "group_id", "trace_id", "reward")
    joined = traces.join(trace_verdicts(rows), on="trace_id", how="left")
    return joined.group_by("group_id").agg(reward_mean=pl.col("reward").mean(), num_kept=num_kept(pl.col("outcome")))


def num_kept(outcome: pl.Expr) -> pl.Expr:
    """Return how many were kept, by their `outcome`; null where nothing was judged."""
    return pl.when(outcome.count() > 0).then((outcome == KEPT).sum().cast(pl.Int64))


def trace_verdicts(rows: StepRows) -> pl.DataFrame:
    """Return what the filters decided: trace_id, and `outcome`, `kept` or the filter's reason."""
    verdicts = table_columns(rows.verdicts, "trace_id", "keep", "reason")
    outcome = pl.when("keep").then(pl.lit(KEPT)).otherwise(pl.col("reason").cast(pl.String)).alias("outcome")
    return verdicts.select("trace_id", outcome)


def table_columns(frame: pl.DataFrame | None, *columns: str) -> pl.DataFrame:
    """Return columns of a table; without rows where it was not made."""
    types = {"advantage": pl.Float64, "reward": pl.Float64, "keep": pl.Boolean, "num_output_tokens": pl.Int64}
    if frame is None:
        return pl.DataFrame(schema={name: types.get(name, pl.String) for name in columns})
    return frame.select(columns)
