"""The traces of a step, or of an evaluation: one row each, with what the stages after sampling made of it.

Only the rows of that step's work are read, and of those only the columns that hold one value a trace.
"""

from collections.abc import Iterable, Sequence

import polars as pl

from flows.queries.outcomes import EXPIRED, outcomes_of
from flows.queries.request import NotThere
from flows.queries.step_history import StepLineage
from flows.queries.store_reader import Library
from flows.viewer.data.step_evaluations import rounds_of
from storage.read.lineage import Work, row_identities
from tasks.metrics.accounting import TRAINED

NAMES = (
    *("trace_id", "group_id", "example_id", "environment", "agent", "assignment_id", "episode_id", "trainable"),
    *("reward", "stop_condition", "is_truncated", "num_turns", "num_branches", "num_input_tokens", "num_output_tokens"),
    *("error_class", "error_type", "error_message", "policy_key", "policy_version", "staleness", "temperature"),
    *("started_at", "setup_seconds", "generation_seconds", "model_seconds", "scoring_seconds", "rewards", "metrics"),
)
"""What is read of a trace; as in `storage.schemas.stage_tables.TRACES`."""
OF_OUTCOME = ("outcome", "detail", "stale", "num_tokens", "num_sampled_tokens", "seconds")


def traces(library: Library, run: str, step: int) -> pl.DataFrame:
    """Return one row for each trace of a step as a run uses it, in the order in which the stages handed them over.

    Columns: `place` (its number in that order, 0-based), `key` (of the work that made it) and `step`; those of the
    table traces that hold one value (`NAMES`: reward, error_class, num_turns, ...; rewards and metrics are JSON);
    `outcome` and `detail` as `flows.queries.outcomes` and `stagecoach why` have them, `stale`, `seconds` (set-up,
    generation and scoring), `num_tokens`; of the verdict `keep`, `reason`, `detected` (a list of names) and of the
    samples `advantage`, `baseline` and `num_samples`, null where no verdict, or no sample, is there (yet); `trained`.
    Groups that were replaced, and work of which only parts are done, are there too.
    Raises NotThere for an unknown run or step.
    """
    return traces_of(library, run, lineages_of(library, run, step))


def evaluation_traces(library: Library, run: str, version: int, set_name: str | None = None) -> pl.DataFrame:
    """Return the same of what a run's policy of a version did on held-out examples; see `traces`.

    Further columns: `set`, empty for the one without a name, `round`, 0-based, and `replaced`, whether the rollout was
    made again in a later round because it had failed. None for `set_name` are all sets. Raises NotThere.
    """
    found = evaluation_lineages(library, run, version)
    rounds = rounds_of(library, run, [lineage.traces for lineage in found])
    rows = traces_of(library, run, found).join(rounds, on="key", how="left", maintain_order="left")
    later = rows.select("set", "assignment_id", pl.col("round").alias("later")).unique()
    again = rows.join(later, on=["set", "assignment_id"]).filter(pl.col("later") > pl.col("round"))
    rows = rows.with_columns(replaced=pl.col("trace_id").is_in(again["trace_id"].implode()))
    return rows if set_name is None else rows.filter(pl.col("set") == set_name)


def lineages_of(library: Library, run: str, step: int) -> list[StepLineage]:
    """Return the work that each batch of rollouts of a step went through; several where groups were replaced.

    Raises NotThere, which names the steps that there are.
    """
    return _at(library, run, step, for_training=True)


def evaluation_lineages(library: Library, run: str, version: int) -> list[StepLineage]:
    """Return the work of the evaluations of a policy by its version: a set each, and its rounds. Raises NotThere."""
    return _at(library, run, version, for_training=False)


def steps_of(library: Library, run: str, for_training: bool = True) -> list[int]:
    """Return the steps of a run that have rollouts, or the versions of its policies that were evaluated."""
    return sorted(
        {lineage.traces.step for lineage in library.history(run).lineages if lineage.for_training == for_training}
    )


def _at(library: Library, run: str, step: int, for_training: bool) -> list[StepLineage]:
    every = [lineage for lineage in library.history(run).lineages if lineage.for_training == for_training]
    found = [lineage for lineage in every if lineage.traces.step == step]
    if not found:
        known = sorted({lineage.traces.step for lineage in every})
        near = ", ".join(str(each) for each in sorted(known, key=lambda each: (abs(each - step), each))[:5])
        what = f"rollouts at step {step}" if for_training else f"evaluation of policy {step}"
        raise NotThere(f"run {run!r} has no {what}; {f'the nearest are at {near}' if near else 'it has none at all'}")
    return sorted(found, key=lambda lineage: (lineage.traces.entry.finished_at, lineage.traces.key))


def traces_of(library: Library, run: str, found: Sequence[StepLineage]) -> pl.DataFrame:
    """Return the traces of some lineages of a run in their order, with columns as in `traces`; read once and held."""
    known = tuple(row_identities(lineage.works) for lineage in found)
    return library.kept(("step_traces", known), lambda: _joined(library, run, list(found)))


def _joined(library: Library, run: str, found: list[StepLineage]) -> pl.DataFrame:
    frames = library.frames(run)
    rows = _in_order(frames.rows([lineage.traces for lineage in found], "traces"), found)
    outcomes = outcomes_of(frames, found).unique(["key", "trace_id"]).select("key", "trace_id", *OF_OUTCOME)
    rows = rows.join(outcomes, on=["key", "trace_id"], how="left", maintain_order="left")
    for of_table in (_verdicts(library, run, found), _samples(library, run, found)):
        rows = rows.join(of_table, on=["key", "trace_id"], how="left", maintain_order="left")
    return rows.with_columns(trained=pl.when(pl.col("outcome") != EXPIRED).then(pl.col("outcome") == TRAINED))


def _in_order(read: pl.LazyFrame, found: list[StepLineage]) -> pl.DataFrame:
    """Return rows of traces by lineage, then as the parts of the work were handed over; tables keep no order."""
    pieces = [piece.attempt for lineage in found for piece in lineage.traces.slices_of("traces")]
    order = pl.DataFrame({"attempt": pieces}, schema={"attempt": pl.String}).with_row_index("part")
    rows = read.select("key", "attempt", "step", "seq", *NAMES).collect()
    rows = rows.join(order, on="attempt").sort("part", "seq", maintain_order=True).drop("part", "attempt", "seq")
    return rows.with_row_index("place").with_columns(pl.col("place").cast(pl.Int64))


def _verdicts(library: Library, run: str, found: list[StepLineage]) -> pl.DataFrame:
    rows = library.frames(run).rows(_present(lineage.verdicts for lineage in found), "verdicts")
    read = rows.select(pl.col("key").alias("of"), "trace_id", "keep", "reason", "detected").collect()
    return _of_traces(read, {lineage.traces.key: lineage.verdicts for lineage in found})


def _samples(library: Library, run: str, found: list[StepLineage]) -> pl.DataFrame:
    """Return what the samples of each trace say of it; its advantage and baseline are the same in all of them."""
    rows = library.frames(run).rows(_present(lineage.credits for lineage in found), "credits")
    read = rows.select(pl.col("key").alias("of"), "trace_id", "advantage", "baseline").collect()
    each = read.group_by("of", "trace_id").agg(
        pl.col("advantage").drop_nulls().first(),
        pl.col("baseline").drop_nulls().first(),
        num_samples=pl.len().cast(pl.Int64),
    )
    return _of_traces(each, {lineage.traces.key: lineage.credits for lineage in found})


def _of_traces(rows: pl.DataFrame, made: dict[str, Work | None]) -> pl.DataFrame:
    """Return rows of further work, `of`, under the `key` of the traces that they are about."""
    pairs = [(key, work.key) for key, work in made.items() if work is not None]
    keys = pl.DataFrame(pairs, schema={"key": pl.String, "of": pl.String}, orient="row")
    return rows.join(keys, on="of").drop("of").unique(["key", "trace_id"])


def _present(works: Iterable[Work | None]) -> list[Work]:
    return list({work.key: work for work in works if work is not None}.values())
