"""The same step of two runs, rollout by rollout: which are the same ones, and what each run made of them."""

from typing import Any

import polars as pl

from flows.viewer.data.compare import state_of
from flows.viewer.data.compare_reading import KeptReading, latest
from flows.viewer.data.groups import natural
from flows.viewer.data.step_traces import chains_of, of_chains
from flows.viewer.library import Library
from flows.viewer.page import NotThere
from flows.views.differences import Work, is_step, work_of
from flows.views.recorded_rows import Made
from flows.views.step_differences import KEPT

OF_TRACE = ("trace_id", "key", "group_id", "environment", "example_id", "agent")
OF_SIDE = ("reward", "fate", "advantage", "num_output_tokens", "error_class")
BOTH, ONLY_A, ONLY_B = "both", "a", "b"


def step_pair(library: Library, a: str, b: str, step: int) -> tuple[Made, Made]:
    """Return the rows that both runs made of a step, as `stagecoach diff` compares them: those of its last batch.

    Raises NotThere for an unknown run, or a step that neither has.
    """
    known = steps_of_both(library, a, b)
    if step not in known:
        near = ", ".join(str(each) for each in sorted(known, key=lambda each: (abs(each - step), each))[:5])
        nearest = f"the nearest are {near}" if near else "neither has made one yet"
        raise NotThere(f"neither {a!r} nor {b!r} has step {step}; {nearest}")
    one, other = KeptReading(library).made([works_of(library, run).get(step, {}) for run in (a, b)])
    return one, other


def steps_of_both(library: Library, a: str, b: str) -> list[int]:
    """Return the steps that either run has, in order. Raises NotThere for an unknown run."""
    works = [works_of(library, run) for run in (a, b)]
    return sorted({step for work in works for step, stages in work.items() if is_step(stages)})


def works_of(library: Library, run: str) -> Work:
    """Return a run's finished work by step and stage. Raises NotThere for an unknown run."""
    state = state_of(library, run)
    return latest(library, ("finished work", run), state, lambda: work_of(library.store, run, library.config(run)))


def compared_traces(library: Library, a: str, b: str, step: int) -> pl.DataFrame:
    """Return one row for each rollout of either run at a step, those of both once; in the order of a, then of b.

    Columns: trace_id; `side` (both, a or b); environment, example_id, agent; `group`, a number for the rollouts that
    are compared with each other, those of paired groups by the same agent; key_a and key_b, the work that made the
    trace, as each run uses it; group_a and group_b; and for each run, ending in _a and _b: reward, fate (`kept`, or
    the filter's reason; null where nothing was judged), advantage, num_output_tokens, error_class.
    Traces are the same where their ids are. Raises NotThere.
    """
    pair = step_pair(library, a, b, step)
    one, other = (_traces(library, run, step, made) for run, made in zip((a, b), pair, strict=True))
    joined = one.rename({name: f"{name}_a" for name in OF_SIDE}).join(
        other.rename({name: f"{name}_b" for name in OF_SIDE}), on="trace_id", how="full", suffix="_b", coalesce=False
    )
    one_alone = pl.when(pl.col("trace_id_b").is_null()).then(pl.lit(ONLY_A))
    side = one_alone.when(pl.col("trace_id").is_null()).then(pl.lit(ONLY_B)).otherwise(pl.lit(BOTH)).alias("side")
    shared = ("trace_id", "environment", "example_id", "agent", "group")
    found = joined.sort("place", "place_b", nulls_last=True, maintain_order=True).select(
        *(pl.coalesce(name, f"{name}_b") for name in shared[:1]),
        side,
        *(pl.coalesce(name, f"{name}_b") for name in shared[1:]),
        pl.col("key").alias("key_a"),
        "key_b",
        pl.col("group_id").alias("group_a"),
        pl.col("group_id_b").alias("group_b"),
        *(f"{name}_a" for name in OF_SIDE),
        *(f"{name}_b" for name in OF_SIDE),
    )
    return found.with_columns(_numbered(found))


def compared_groups(library: Library, a: str, b: str, step: int) -> pl.DataFrame:
    """Return one row for each group of rollouts of either run at a step, and each agent in it, by group_a.

    Groups at the same example are paired; where it has several in a step, the first with the first.
    Columns: group (as in `compared_traces`), group_a, group_b, environment, example_id, agent; num_shared (rollouts in
    both); for each run num_X, reward_X (mean, null where none was scored), kept_X (null where nothing was judged);
    difference (reward_b - reward_a); max_advantage_difference, over the samples of both, null where there are none.
    Raises NotThere.
    """
    rows = compared_traces(library, a, b, step)
    samples = compared_samples(library, a, b, step).join(rows.select("trace_id", "group"), on="trace_id")
    moved = samples.group_by("group").agg(max_advantage_difference=pl.col("difference").abs().max())
    facts = ("group_a", "group_b", "environment", "example_id", "agent")
    found = rows.group_by("group", maintain_order=True).agg(
        *(pl.col(name).drop_nulls().first() for name in facts),
        num_shared=(pl.col("side") == BOTH).sum().cast(pl.Int64),
        **_of_side("a"),
        **_of_side("b"),
    )
    found = found.with_columns(difference=pl.col("reward_b") - pl.col("reward_a"))
    return found.join(moved, on="group", how="left").sort("group")


def compared_samples(library: Library, a: str, b: str, step: int) -> pl.DataFrame:
    """Return one row for each training sample of both runs at a step, in order of ids.

    Columns: sample_id, trace_id, group_id, `a` and `b` (its advantages), difference (b - a). Raises NotThere.
    """
    one, other = (made.credits for made in step_pair(library, a, b, step))
    if one is None or other is None:
        kinds: dict[str, Any] = {"sample_id": pl.String, "trace_id": pl.String, "group_id": pl.String}
        return pl.DataFrame(schema=kinds | dict.fromkeys(("a", "b", "difference"), pl.Float64))
    joined = one.join(other.select("sample_id", b="advantage"), on="sample_id").sort("sample_id")
    return joined.select(
        "sample_id",
        pl.col("sample_id").str.replace(r"/[^/]*$", "").alias("trace_id"),
        "group_id",
        pl.col("advantage").alias("a"),
        "b",
        difference=pl.col("b") - pl.col("advantage"),
    )


def _traces(library: Library, run: str, step: int, made: Made) -> pl.DataFrame:
    """Return the rollouts of a run that count at a step, with their verdicts and advantages."""
    chains = chains_of(library, run, step) if made.traces is not None else []
    rows = of_chains(library, run, chains)
    ids = [] if made.traces is None else made.traces["trace_id"].to_list()
    rows = rows.filter(pl.col("trace_id").is_in(ids)).unique("trace_id", keep="last", maintain_order=True)
    fate = pl.when("keep").then(pl.lit(KEPT)).otherwise("reason").alias("fate")
    rows = rows.with_columns(fate, _group())
    return rows.select("place", *OF_TRACE, "group", *OF_SIDE)


def _group() -> pl.Expr:
    """Return what names a group in both runs: its example, which of the example's groups it is, and the agent."""
    number = pl.col("group_id").rank("dense").over("environment", "example_id")
    return pl.concat_str("environment", "example_id", number, "agent", separator="\0").alias("group")


def _numbered(rows: pl.DataFrame) -> pl.Series:
    """Return the groups as numbers in the order of a's ids; those that b alone has come last."""
    named = rows.group_by("group").agg(pl.col("group_a").drop_nulls().first(), pl.col("group_b", "agent").first())
    order = sorted(
        named.iter_rows(),
        key=lambda row: (row[1] is None, natural(row[1] or row[2] or ""), row[3], row[0]),
    )
    numbers = {row[0]: number for number, row in enumerate(order)}
    return pl.Series("group", [numbers[name] for name in rows["group"]], dtype=pl.Int64)


def _of_side(side: str) -> dict[str, pl.Expr]:
    mine = pl.col("side").is_in([BOTH, side])
    fate = pl.col(f"fate_{side}").filter(mine)
    kept = pl.when(fate.count() > 0).then((fate == KEPT).sum().cast(pl.Int64))
    return {
        f"num_{side}": mine.sum().cast(pl.Int64),
        f"reward_{side}": pl.col(f"reward_{side}").mean(),
        f"kept_{side}": kept,
    }
