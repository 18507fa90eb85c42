"""The rollouts of a step or an evaluation as frames: one row each, in groups, beside the other attempts."""

import re
from collections.abc import Iterable, Sequence

import polars as pl

from configs.run import content
from flows.queries.outcomes import EXPIRED, outcomes_of
from flows.queries.request import NotThere
from flows.queries.step_history import StepLineage
from flows.queries.store_reader import StoreReader
from flows.queries.trace import FoundTrace, index
from storage.keys import canonical_json
from storage.read.lineage import Graph, Work, row_identities
from tasks.metrics.accounting import ERRORED, FILTERED, STOPPED, TRAINED
from tasks.stages import EVALUATION_ASSIGNMENT


def rounds_of(library: StoreReader, run: str, works: Sequence[Work]) -> pl.DataFrame:
    """Return for each work of rollouts its `key`, the `set` (empty for the one without a name) and the `round`."""
    sets = library.config(run).evaluation.of_sets()
    names = {canonical_json(content(each)): name for name, each in reversed(sets.items())}
    rows = [(work.key, *_place(library.graph, work, names)) for work in works]
    return pl.DataFrame(rows, schema={"key": pl.String, "set": pl.String, "round": pl.Int64}, orient="row")


def _place(graph: Graph, work: Work, names: dict[str, str]) -> tuple[str, int]:
    """Go back to the first assignment of an evaluation: later ones try again what failed before."""
    assigned, number = graph.works.get(work.inputs[EVALUATION_ASSIGNMENT]), 0
    while assigned and assigned.inputs.get(EVALUATION_ASSIGNMENT) in graph.works:
        assigned, number = graph.works[assigned.inputs[EVALUATION_ASSIGNMENT]], number + 1
    said = assigned.entry.section.get("evaluation") if assigned else None
    return (names.get(canonical_json(said), "") if said is not None else ""), number


NAMES = (
    *("trace_id", "group_id", "example_id", "environment", "agent", "assignment_id", "episode_id", "trainable"),
    *("reward", "stop_condition", "is_truncated", "num_turns", "num_branches", "num_input_tokens", "num_output_tokens"),
    *("error_class", "error_type", "error_message", "policy_key", "policy_version", "staleness", "temperature"),
    *("started_at", "setup_seconds", "generation_seconds", "model_seconds", "scoring_seconds", "rewards", "metrics"),
)
"""What is read of a trace; as in `storage.schemas.stage_tables.TRACES`."""
OF_OUTCOME = ("outcome", "detail", "stale", "num_tokens", "num_sampled_tokens", "seconds")


def traces(library: StoreReader, run: str, step: int) -> pl.DataFrame:
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


def evaluation_traces(library: StoreReader, run: str, version: int, set_name: str | None = None) -> pl.DataFrame:
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


def lineages_of(library: StoreReader, run: str, step: int) -> list[StepLineage]:
    """Return the work that each batch of rollouts of a step went through; several where groups were replaced.

    Raises NotThere, which names the steps that there are.
    """
    return _at(library, run, step, for_training=True)


def evaluation_lineages(library: StoreReader, run: str, version: int) -> list[StepLineage]:
    """Return the work of the evaluations of a policy by its version: a set each, and its rounds. Raises NotThere."""
    return _at(library, run, version, for_training=False)


def steps_of(library: StoreReader, run: str, for_training: bool = True) -> list[int]:
    """Return the steps of a run that have rollouts, or the versions of its policies that were evaluated."""
    return sorted(
        {lineage.traces.step for lineage in library.history(run).lineages if lineage.for_training == for_training}
    )


def _at(library: StoreReader, run: str, step: int, for_training: bool) -> list[StepLineage]:
    every = [lineage for lineage in library.history(run).lineages if lineage.for_training == for_training]
    found = [lineage for lineage in every if lineage.traces.step == step]
    if not found:
        known = sorted({lineage.traces.step for lineage in every})
        near = ", ".join(str(each) for each in sorted(known, key=lambda each: (abs(each - step), each))[:5])
        what = f"rollouts at step {step}" if for_training else f"evaluation of policy {step}"
        raise NotThere(f"run {run!r} has no {what}; {f'the nearest are at {near}' if near else 'it has none at all'}")
    return sorted(found, key=lambda lineage: (lineage.traces.entry.finished_at, lineage.traces.key))


def traces_of(library: StoreReader, run: str, found: Sequence[StepLineage]) -> pl.DataFrame:
    """Return the traces of some lineages of a run in their order, with columns as in `traces`; read once and held."""
    known = tuple(row_identities(lineage.works) for lineage in found)
    return library.cached(("step_traces", known), lambda: _joined(library, run, list(found)))


def _joined(library: StoreReader, run: str, found: list[StepLineage]) -> pl.DataFrame:
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


def _verdicts(library: StoreReader, run: str, found: list[StepLineage]) -> pl.DataFrame:
    rows = library.frames(run).rows(_present(lineage.verdicts for lineage in found), "verdicts")
    read = rows.select(pl.col("key").alias("of"), "trace_id", "keep", "reason", "detected").collect()
    return _of_traces(read, {lineage.traces.key: lineage.verdicts for lineage in found})


def _samples(library: StoreReader, run: str, found: list[StepLineage]) -> pl.DataFrame:
    """Return what the samples of each trace say of it; its advantage and baseline are the same in all of them."""
    rows = library.frames(run).rows(_present(lineage.samples for lineage in found), "samples")
    read = rows.select(pl.col("key").alias("of"), "trace_id", "advantage", "baseline").collect()
    each = read.group_by("of", "trace_id").agg(
        pl.col("advantage").drop_nulls().first(),
        pl.col("baseline").drop_nulls().first(),
        num_samples=pl.len().cast(pl.Int64),
    )
    return _of_traces(each, {lineage.traces.key: lineage.samples for lineage in found})


def _of_traces(rows: pl.DataFrame, made: dict[str, Work | None]) -> pl.DataFrame:
    """Return rows of further work, `of`, under the `key` of the traces that they are about."""
    pairs = [(key, work.key) for key, work in made.items() if work is not None]
    keys = pl.DataFrame(pairs, schema={"key": pl.String, "of": pl.String}, orient="row")
    return rows.join(keys, on="of").drop("of").unique(["key", "trace_id"])


def _present(works: Iterable[Work | None]) -> list[Work]:
    return list({work.key: work for work in works if work is not None}.values())


SORTS = ("group", "example", "environment", "mean", "spread", "baseline", "size", "kept")
"""What groups can be sorted by; `group` is the order of their ids, numbers in them by value."""
_BY = {"example": "example_id", "mean": "reward_mean", "spread": "reward_spread", "size": "num_traces"}
_DIGITS = re.compile(r"(\d+)")


def groups(library: StoreReader, run: str, step: int) -> pl.DataFrame:
    """Return one row for each group of a step and each agent in it, for agents earn different things.

    Columns: `group_id`, `agent`, `environment`, `example_id`, `num_traces`, `num_scored`, `reward_mean`,
    `reward_spread` (standard deviation over the scored ones, of the whole group and no sample of more), `reward_min`,
    `reward_max`; `baseline`, null where there is none or the members have different ones; `num_kept` (null before the
    filters), `num_trained` (null where that is not known any more), `num_filtered`, `num_errored`, `num_stopped`.
    Those that were stopped are in no reward. Raises NotThere.
    """
    return of_traces(traces(library, run, step))


def of_traces(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the groups of a frame of traces in order of their ids, numbers in them by value; see `groups`."""
    reward = pl.col("reward").filter(pl.col("outcome") != STOPPED)
    baselines = pl.col("baseline").drop_nulls().unique()
    counts = {name: (pl.col("outcome") == outcome).sum() for name, outcome in _OUTCOMES.items()}
    found = frame.group_by("group_id", "agent", maintain_order=True).agg(
        pl.col("environment", "example_id").first(),
        num_traces=pl.len(),
        num_scored=reward.count(),
        reward_mean=reward.mean(),
        reward_spread=reward.std(ddof=0),
        reward_min=reward.min(),
        reward_max=reward.max(),
        baseline=pl.when(baselines.len() == 1).then(baselines.first()),
        num_kept=pl.when(pl.col("keep").count() > 0).then(pl.col("keep").sum()),
        num_trained=pl.when(pl.col("trained").is_not_null().all()).then(pl.col("trained").sum()),
        **counts,
    )
    whole = pl.col("^num_.*$").cast(pl.Int64)
    order = sorted(range(found.height), key=lambda at: (natural(found["group_id"][at]), found["agent"][at]))
    return found.with_columns(whole)[order]


_OUTCOMES = {"num_filtered": FILTERED, "num_errored": ERRORED, "num_stopped": STOPPED}


def in_order(rows: pl.DataFrame, sort: str, descending: bool) -> pl.DataFrame:
    """Return groups by one of SORTS; what has no value comes last, what is equal in the order that it had."""
    if sort == "group":
        return rows.reverse() if descending else rows
    by = {"kept": "num_kept"}.get(sort, _BY.get(sort, sort))
    return rows.sort(by, descending=descending, nulls_last=True, maintain_order=True)


def natural(text: str) -> list[tuple[int, int, str]]:
    """Return a key by which texts sort as people count: 3-10 after 3-2."""
    parts = _DIGITS.split(text)
    return [(1, int(part[:18]), part) if at % 2 else (0, 0, part) for at, part in enumerate(parts)]


MATE = (
    "trace_id",
    "key",
    "agent",
    "episode_id",
    "assignment_id",
    "reward",
    "advantage",
    "outcome",
    "detail",
    "error_class",
    "num_output_tokens",
)


def mates(library: StoreReader, found: FoundTrace) -> pl.DataFrame:
    """Return the traces of its group that the same agent made, itself too, by assignment; columns as in `MATE`."""
    own = traces_of(library, found.run, [found.lineage])
    same = (pl.col("group_id") == found.row["group_id"]) & (pl.col("agent") == found.row["agent"])
    return own.filter(same).sort(_member(), "assignment_id").select(MATE)


def episode(library: StoreReader, found: FoundTrace) -> pl.DataFrame:
    """Return the other traces of the same episode, those of other agents, in order; columns as in `MATE`."""
    own = traces_of(library, found.run, [found.lineage])
    same = (pl.col("episode_id") == found.row["episode_id"]) & (pl.col("trace_id") != found.trace_id)
    return own.filter(same).select(MATE)


def largest_advantage(library: StoreReader, found: FoundTrace) -> float | None:
    """Return the size of the largest advantage of its batch of rollouts: what colours are measured by."""
    size = traces_of(library, found.run, [found.lineage])["advantage"].abs().max()
    return None if size is None else float(str(size))


def history(library: StoreReader, found: FoundTrace) -> pl.DataFrame:
    """Return all attempts of the same agent at the same example over the run, by step; itself too.

    Columns: those of `trace_index.INDEX`, and `for_training`: false where the attempt scored a policy.
    """
    lineages = library.history(found.run).lineages
    rows = index(library, [lineage.traces for lineage in lineages])
    training = [lineage.traces.key for lineage in lineages if lineage.for_training]
    same = [pl.col(name) == found.row[name] for name in ("environment", "example_id", "agent")]
    rows = rows.filter(*same).with_columns(for_training=pl.col("key").is_in(training))
    return rows.sort("step", "for_training", maintain_order=True)


def _member() -> pl.Expr:
    """Return the number of a rollout within its group, the end of its assignment's id."""
    return pl.col("assignment_id").str.split("/").list.last().cast(pl.Int64, strict=False)
