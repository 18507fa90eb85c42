"""Figures and rows of the steps of two runs: what each step measured, and the rollouts and samples that differ.

Figures are those that finished steps wrote to table `metrics`; an unfinished step has none. Rows are joined by their
ids. Of steps that both runs share no row is read.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import polars as pl

from flows.queries.metrics import read_metrics
from flows.queries.request import NotThere
from flows.queries.rollouts import traces_of
from flows.queries.store_reader import StoreReader
from storage.read.lineage import Work
from tasks.metrics.figures import MEANINGS
from tasks.stages import EVALUATION, makers

MEASURES = (
    *("loss", "rl_loss", "ce_loss", "ref_kl_loss", "grad_norm", "entropy", "mismatch_kl", "masked_fraction"),
    *("learning_rate",),
)
"""What the learner measures of an update; of a step, its mean over the updates."""
FIGURES = (*MEANINGS, *MEASURES)
"""The figures of a step, by the names that `stagecoach diff` has them by."""
REASONS = "reasons/"
METRICS = {f"batch/{name}": name for name in MEANINGS} | {f"updates/{name}/mean": name for name in MEASURES}
Stages = Mapping[str, Work]
"""The finished work of one step, by the names of stages in replays."""
Works = Mapping[int, Stages]
"""The finished work of a run by step; an evaluation is at the version of its policy."""


def is_step(stages: Stages) -> bool:
    """Return whether a step has more work than imports and evaluations."""
    return not stages.keys() <= {"policy_import", "examples", EVALUATION}


def steps_of_either(works: Sequence[Works]) -> list[int]:
    """Return the steps that any of the runs has, in order."""
    return sorted({step for work in works for step, stages in work.items() if is_step(stages)})


def step_figures(library: StoreReader, works: Works, weights: Mapping[int, str]) -> dict[int, dict[str, Any]]:
    """Return by finished step its FIGURES, `reasons` (rollouts left out, by reason) and `weights` (a digest).

    A figure that was not measured is None or has no entry.
    """
    named = pl.col("name").is_in([*METRICS]) | pl.col("name").str.starts_with(REASONS)
    finished = {step: stages["metrics"] for step, stages in works.items() if "metrics" in stages}
    written = read_metrics(library.frames(), finished.values(), where=named & (pl.col("scope") == ""))
    figures: dict[int, dict[str, Any]] = {}
    for step, work in finished.items():
        values = {name: value for (_, name), value in written.get(work.key, {}).items()}
        row: dict[str, Any] = {figure: values[name] for name, figure in METRICS.items() if name in values}
        row |= {name: int(value) for name, value in row.items() if name.startswith("num_")}
        if "num_kept" in row:
            counts = {name: int(value) for name, value in values.items() if name.startswith(REASONS)}
            row["reasons"] = {name.removeprefix(REASONS): count for name, count in counts.items()}
        if step in weights:
            row = {name: row.get(name) for name in MEASURES} | row | {"weights": weights[step]}
        figures[step] = row
    return figures


def made_weights(library: StoreReader, works: Works) -> dict[int, str]:
    """Return by trained step the digest of the weights that its last update made."""
    trained = {step: stages["training"] for step, stages in works.items() if "training" in stages}
    rows = library.frames().rows(trained.values(), "updates").select("key", "version", "update", "weights_sha256")
    last = dict(rows.collect().sort("version", "update").select("key", "weights_sha256").iter_rows())
    return {step: last[work.key] for step, work in trained.items() if work.key in last}


ROWS = {"traces": ("trace_id", "reward"), "verdicts": ("trace_id", "keep"), "samples": ("sample_id", "advantage")}
"""Columns that are compared, by table; rows of two runs are joined by the first."""
_MOVED = (pl.col("advantage_b") - pl.col("advantage")).abs()
_BETWEEN: Mapping[str, Mapping[str, pl.Expr]] = {
    "traces": {
        "num_shared_traces": pl.len().cast(pl.Int64),
        "num_rewards_changed": (~pl.col("reward").eq_missing(pl.col("reward_b"))).sum().cast(pl.Int64),
    },
    "verdicts": {
        "kept_only_a": pl.col("trace_id").filter(pl.col("keep") & ~pl.col("keep_b")).sort().implode(),
        "kept_only_b": pl.col("trace_id").filter(pl.col("keep_b") & ~pl.col("keep")).sort().implode(),
    },
    "samples": {
        "num_shared_samples": pl.len().cast(pl.Int64),
        "num_advantages_changed": (_MOVED != 0).sum().cast(pl.Int64),
        "max_advantage_difference": _MOVED.max(),
        "mean_advantage_difference": _MOVED.mean(),
    },
}
BETWEEN: Mapping[str, Any] = {
    **{"num_shared_traces": pl.Int64, "num_rewards_changed": pl.Int64},
    **{"kept_only_a": pl.List(pl.String), "kept_only_b": pl.List(pl.String)},
    **{"num_shared_samples": pl.Int64, "num_advantages_changed": pl.Int64},
    **{"max_advantage_difference": pl.Float64, "mean_advantage_difference": pl.Float64, "weights_equal": pl.Boolean},
}
"""What differs over the rows that both runs made of a step; traces and samples are shared if their ids are the same."""


def step_differences(
    library: StoreReader,
    works: Sequence[Works],
    figures: Mapping[int, Mapping[str, Any]],
    weights: Sequence[Mapping[int, str]],
) -> dict[int, dict[str, Any]]:
    """Return BETWEEN by step of either run; None where one of the runs has nothing to compare.

    `figures` are those of the first run, `weights` the digests of both. Of steps that both share no row is read.
    """
    found: dict[int, dict[str, Any]] = {}
    apart: dict[int, list[Stages]] = {}
    for step in steps_of_either(works):
        pair = [work.get(step, {}) for work in works]
        digests = [each.get(step) for each in weights]
        found[step] = dict.fromkeys(BETWEEN) | {"weights_equal": digests[0] == digests[1] if all(digests) else None}
        if "metrics" in pair[0] and _identity(pair[0]) == _identity(pair[1]):
            found[step] |= _no_differences(figures[step])
        else:
            apart[step] = pair
    for table, values in _BETWEEN.items():
        pairs = {step: pair for step, pair in apart.items() if all(_makers(stages, table) for stages in pair)}
        joined = _joined_rows(library, pairs, table)
        rows = {row.pop("step"): row for row in joined.group_by("step").agg(**values).to_dicts()}
        nothing = joined.clear().select(**values).row(0, named=True)
        for step in pairs:
            found[step] |= rows.get(step, nothing)
    return found


def _identity(stages: Stages) -> list[tuple[str, ...]]:
    return sorted((stage, *work.identity) for stage, work in stages.items() if stage not in ("gate", EVALUATION))


def _makers(stages: Stages, table: str) -> list[Work]:
    """Return the work of a step that made the rows of a table that count: several where groups were refilled."""
    # The last stage that makes a table counts: rollouts that were scored again, not as they were sampled.
    role = next((stage for stage in makers(table) if stage in stages), None)
    return [work for name, work in stages.items() if name.partition(".")[0] == role]


def _joined_rows(library: StoreReader, pairs: Mapping[int, Sequence[Stages]], table: str) -> pl.DataFrame:
    """Return the rows of a table that both runs made, joined by id: `step`, and ROWS, those of b ending in `_b`."""
    sides = []
    for side in (0, 1):
        works = {work.key: (step, work) for step, pair in pairs.items() for work in _makers(pair[side], table)}
        named = [(key, step) for key, (step, _) in works.items()]
        steps = pl.DataFrame(named, {"key": pl.String, "step": pl.Int64}, orient="row")
        rows = library.frames().rows([work for _, work in works.values()], table).select("key", *ROWS[table])
        sides.append(rows.collect().join(steps, on="key").drop("key"))
    return sides[0].join(sides[1], on=["step", ROWS[table][0]], suffix="_b")


def _no_differences(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return BETWEEN of a step that both runs share, by the figures that it wrote."""
    moved = None if figures.get("advantage_mean") is None else 0.0
    return {
        "num_shared_traces": figures.get("num_traces"),
        "num_rewards_changed": 0 if "num_traces" in figures else None,
        "kept_only_a": [] if "num_kept" in figures else None,
        "kept_only_b": [] if "num_kept" in figures else None,
        "num_shared_samples": figures.get("num_samples"),
        "num_advantages_changed": 0 if "num_samples" in figures else None,
        "max_advantage_difference": moved,
        "mean_advantage_difference": moved,
    }


def total_figures(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures over several steps: sums of counts, and of all others the mean of the steps that have one.

    The least and greatest reward are those of all steps, and the weights those of the last.
    """
    values = {name: [step[name] for step in steps if step.get(name) is not None] for step in steps for name in step}
    total: dict[str, Any] = {name: _total(name, values[name]) for name in FIGURES if name in values}
    if "reasons" in values:
        total["reasons"] = dict(sum(map(Counter[str], values["reasons"]), Counter[str]()))
    return total | ({"weights": values["weights"][-1]} if "weights" in values else {})


def total_differences(steps: Sequence[Mapping[str, Any]], weights: Sequence[Mapping[int, str]]) -> dict[str, Any]:
    """Return BETWEEN over several steps; `weights_equal` is of the last weights that each run made.

    The mean difference of advantages is over all shared samples.
    """
    total: dict[str, Any] = {}
    for name in BETWEEN:
        rows = [row["between"] for row in steps if row["between"][name] is not None]
        values = [row[name] for row in rows]
        if name.startswith("kept_only"):
            total[name] = [trace_id for ids in values for trace_id in ids] if rows else None
        elif name == "mean_advantage_difference":
            counts = [row["num_shared_samples"] for row in rows]
            total[name] = fmean(values, counts) if sum(counts) else None
        else:
            total[name] = _total(name, values)
    last = [[digests[row["step"]] for row in steps if row["step"] in digests][-1:] for digests in weights]
    return total | {"weights_equal": last[0] == last[1] if all(last) else None}


_ENDS = {"reward_min": min, "reward_max": max, "max_advantage_difference": max}


def _total(name: str, values: Sequence[Any]) -> Any:
    if not values:
        return None
    return sum(values) if name.startswith("num_") else _ENDS.get(name, fmean)(values)


EXAMPLE = ("trace_id", "environment", "example_id", "agent")
OF_SIDE = ("reward", "outcome", "advantage")
BOTH, KEPT = "both", "kept"


def compared_traces(library: StoreReader, a: str, b: str, step: int) -> pl.DataFrame:
    """Return one row for each rollout of either run in the last batch of a step, those of both once, a's first.

    Columns: trace_id; `side` (both, a or b); environment, example_id, agent; and for each run, ending in _a and _b: key
    (of the work that made the trace), group_id, reward, outcome (`kept`, the filter's reason, or null where nothing was
    judged), advantage. Raises NotThere.
    """
    known = {number for run in (a, b) for number in library.history(run).steps}
    if step not in known:
        near = ", ".join(map(str, sorted(known, key=lambda number: (abs(number - step), number))[:5]))
        nearest = f"the nearest are {near}" if near else "neither has made one yet"
        raise NotThere(f"neither {a!r} nor {b!r} has step {step}; {nearest}")
    one, other = (_step_traces(library, run, step, side) for run, side in ((a, "a"), (b, "b")))
    rows = one.join(other, on=EXAMPLE, how="full", coalesce=True).sort("place_a", "place_b", nulls_last=True)
    lone = pl.when(pl.col("key_b").is_null()).then(pl.lit("a")).when(pl.col("key_a").is_null()).then(pl.lit("b"))
    return rows.with_columns(side=lone.otherwise(pl.lit(BOTH))).drop("place_a", "place_b")


def _step_traces(library: StoreReader, run: str, step: int, side: str) -> pl.DataFrame:
    past = library.history(run).steps.get(step)
    rows = traces_of(library, run, past.lineages if past else ())
    outcome = pl.when("keep").then(pl.lit(KEPT)).otherwise(pl.col("reason").cast(pl.String)).alias("outcome")
    rows = rows.unique("trace_id", keep="last", maintain_order=True).with_columns(outcome)
    of_side = [pl.col(name).alias(f"{name}_{side}") for name in ("place", "key", "group_id", *OF_SIDE)]
    return rows.select(*EXAMPLE, *of_side)


def compared_samples(library: StoreReader, a: str, b: str, step: int) -> pl.DataFrame:
    """Return one row for each training sample of both runs at a step, the greatest difference of advantages first.

    Columns: sample_id, trace_id, group_id, `a` and `b` (advantages) and difference (b - a).
    """
    columns, sides = ("sample_id", "trace_id", "group_id", "advantage"), []
    for run in (a, b):
        past = library.history(run).steps.get(step)
        credits = [past.work["advantage"]] if past and "advantage" in past.work else []
        sides.append(library.frames().rows(credits, "samples").select(columns).collect())
    joined = sides[0].join(sides[1].select("sample_id", b="advantage"), on="sample_id").rename({"advantage": "a"})
    rows = joined.with_columns(difference=pl.col("b") - pl.col("a"))
    return rows.sort(pl.col("difference").abs(), "sample_id", descending=[True, False], nulls_last=True)


def compared_groups(library: StoreReader, a: str, b: str, step: int) -> pl.DataFrame:
    """Return one row for each example of either run at a step and each agent in it, a's first.

    Columns: environment, example_id, agent; num_shared (rollouts of both); for each run group_X (its first group at the
    example), num_X, reward_X (mean, null where none was scored) and kept_X (null where nothing was judged); difference
    (reward_b - reward_a); max_advantage_difference over shared samples, null without one. Raises NotThere.
    """
    traces = compared_traces(library, a, b, step)
    samples = compared_samples(library, a, b, step).group_by("trace_id").agg(pl.col("difference").abs().max())
    values: dict[str, pl.Expr] = {"num_shared": (pl.col("side") == BOTH).sum().cast(pl.Int64)}
    for side in "ab":
        outcome = pl.col(f"outcome_{side}")
        values[f"group_{side}"] = pl.col(f"group_id_{side}").drop_nulls().first()
        values[f"num_{side}"] = pl.col(f"key_{side}").count().cast(pl.Int64)
        values[f"reward_{side}"] = pl.col(f"reward_{side}").mean()
        values[f"kept_{side}"] = pl.when(outcome.count() > 0).then((outcome == KEPT).sum().cast(pl.Int64))
    groups = traces.join(samples, on="trace_id", how="left", maintain_order="left").group_by(
        "environment", "example_id", "agent", maintain_order=True
    )
    rows = groups.agg(**values, max_advantage_difference=pl.col("difference").max())
    return rows.with_columns(difference=pl.col("reward_b") - pl.col("reward_a"))


def step_detail(library: StoreReader, a: str, b: str, step: int, most: int = 10) -> dict[str, Any]:
    """Return the shared traces with another verdict, and the samples and groups that differ most; `most` of each."""
    traces, groups = compared_traces(library, a, b, step), compared_groups(library, a, b, step)
    verdicts = traces.filter(pl.col("outcome_a") != pl.col("outcome_b")).sort("trace_id")
    kept, moved = pl.col("kept_b") - pl.col("kept_a"), "max_advantage_difference"
    changes = [each.abs().fill_null(0) for each in (pl.col(moved), pl.col("difference"), kept)]
    groups = groups.filter((pl.col("num_shared") > 0) & pl.any_horizontal(change > 0 for change in changes))
    names = {"group_id": "group_a", "reward_mean_a": "reward_a", "num_kept_a": "kept_a"}
    names |= {"reward_mean_b": "reward_b", "num_kept_b": "kept_b", moved: moved}
    samples = compared_samples(library, a, b, step).filter(pl.col("difference") != 0)
    return {
        "verdicts": verdicts.select("trace_id", a="outcome_a", b="outcome_b").head(most).to_dicts(),
        "samples": samples.drop("trace_id").head(most).to_dicts(),
        "groups": groups.sort(*changes, "group_a", descending=[True, True, True, False])
        .select(**names)
        .head(most)
        .to_dicts(),
    }
