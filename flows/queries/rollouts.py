"""Rollouts as frames: those of a step or an evaluation, and those around a trace."""

from collections.abc import Collection, Sequence
from typing import Any

import polars as pl

from flows.queries.notes import ROLLOUT_NOTES
from flows.queries.request import NotThere, nearest_numbers
from flows.queries.scores import first_round, set_name
from flows.queries.step_history import StepLineage
from flows.queries.store_reader import StoreReader
from flows.queries.trace import FoundTrace
from flows.queries.views import select
from storage.read.lineage import Work, row_identities
from storage.read.views import all_views, quote
from tasks.stages import EVALUATION_ASSIGNMENT


def rollout_columns(
    reader: StoreReader, run: str, lineages: Sequence[StepLineage], columns: Collection[str]
) -> pl.DataFrame:
    """Return columns of view `rollouts` for some lineages of a run, in recorded order; each is read once and held.

    Rollouts for training come before those that score policies.
    """
    frames, names = reader.frames(run), [name for name in all_views()["rollouts"].columns if name in columns]
    identity = row_identities(work for lineage in lineages for work in lineage.works)
    pieces = [piece for lineage in lineages for piece in lineage.traces.slices_of("traces")]
    num_expired = len(frames.store.slices.expired_slices.find(pieces))
    # Notes come and go, and rows expire, all of a slice at once; all else is of finished rows.
    versions = {name: reader.mark if name in ROLLOUT_NOTES and name != "trace_id" else "" for name in names}

    def read(missing: list[tuple[str, str]]) -> dict[tuple[str, str], pl.Series]:
        listed = ", ".join(quote(name) for name, _ in missing)
        rows = select(frames, lineages, f"select {listed} from rollouts")
        return {(name, version): rows[name] for name, version in missing}

    held = reader.cache.each_once(("rollouts", run, identity, num_expired), [*versions.items()], read)
    return pl.DataFrame([*held.values()])


def rounds_of(reader: StoreReader, run: str, works: Sequence[Work]) -> pl.DataFrame:
    """Return for each work of rollouts its `key`, the `set` (empty for the one without a name) and the `round`."""
    config = reader.config(run)
    assigned = {key: work.entry for key, work in reader.graph.works.items() if work.stage == EVALUATION_ASSIGNMENT}
    firsts = [(work.key, *first_round(assigned, work.inputs[EVALUATION_ASSIGNMENT])) for work in works]
    rows = [(key, set_name(config, assigned.get(first)), number) for key, first, number in firsts]
    return pl.DataFrame(rows, schema={"key": pl.String, "set": pl.String, "round": pl.Int64}, orient="row")


UNLISTED = {"attempt", "seq", "length", "note", "tags"}
"""Columns of view `rollouts` that lists of rollouts lack, beside those that are read only where they are named."""


def evaluation_traces(reader: StoreReader, run: str, version: int, set_name: str | None = None) -> pl.DataFrame:
    """Return the same of what a run's policy of a version did on held-out examples; see `traces_of`.

    Further columns: `set`, empty for the one without a name, `round`, 0-based, and `replaced`, whether the rollout was
    made again in a later round because it had failed. None for `set_name` are all sets. Raises NotThere.
    """
    lineages = evaluation_lineages(reader, run, version)
    rounds = rounds_of(reader, run, [lineage.traces for lineage in lineages])
    rows = traces_of(reader, run, lineages).join(rounds, on="key", how="left", maintain_order="left")
    # A rollout that is made again answers the same assignment in a later round.
    last_round = pl.col("round").max().over("set", "assignment_id")
    rows = rows.with_columns(replaced=pl.col("round") < last_round)
    return rows if set_name is None else rows.filter(set=set_name)


def lineages_of(reader: StoreReader, run: str, step: int) -> list[StepLineage]:
    """Return the work that each batch of rollouts of a step went through; several where groups were replaced.

    Raises NotThere, which names the steps that there are.
    """
    return _at(reader, run, step, for_training=True)


def evaluation_lineages(reader: StoreReader, run: str, version: int) -> list[StepLineage]:
    """Return the work of the evaluations of a policy by its version: a set each, and its rounds. Raises NotThere."""
    return _at(reader, run, version, for_training=False)


def steps_of(reader: StoreReader, run: str, for_training: bool = True) -> list[int]:
    """Return the steps of a run that have rollouts, or the versions of its policies that were evaluated."""
    return sorted(
        {lineage.traces.step for lineage in reader.history(run).lineages if lineage.for_training == for_training}
    )


def _at(reader: StoreReader, run: str, step: int, for_training: bool) -> list[StepLineage]:
    lineages = [lineage for lineage in reader.history(run).lineages if lineage.for_training == for_training]
    of_step = [lineage for lineage in lineages if lineage.traces.step == step]
    if not of_step:
        steps = {lineage.traces.step for lineage in lineages}
        near = nearest_numbers(steps, step)
        missing = f"rollouts at step {step}" if for_training else f"evaluation of policy {step}"
        hint = f"the nearest are at {near}" if near else "it has none at all"
        raise NotThere(f"run {run!r} has no {missing}; {hint}")
    return sorted(of_step, key=lambda lineage: (lineage.traces.entry.finished_at, lineage.traces.key))


def traces_of(
    reader: StoreReader, run: str, lineages: Sequence[StepLineage], more: Collection[str] = ()
) -> pl.DataFrame:
    """Return one row for each trace of some lineages of a run, in the order in which the stages handed them over.

    Columns: `place` (its number in that order, 0-based), `key` (of the work that made it) and `step`; those of the
    table traces that hold one value (reward, error_class, num_turns, ...; rewards and metrics are JSON);
    `outcome` and `detail` as `flows.queries.trace` and `stagecoach why` have them, `stale`, `seconds` (set-up,
    generation and scoring), `num_tokens`; of the verdict `keep`, `reason`, `detected` (a list of names) and of the
    samples `advantage`, `baseline` and `num_samples`, null where no verdict, or no sample, is there (yet); `trained`.
    Groups that were replaced, and work of which only parts are done, are there too. `more` names further columns of
    view `rollouts`.
    """
    view = all_views()["rollouts"]
    rows = rollout_columns(reader, run, lineages, (view.columns.keys() - view.hidden - UNLISTED) | {*more})
    return rows.with_row_index("place").cast({"place": pl.Int64})


MATE = ("trace_id", "agent", "reward", "advantage", "outcome")


def neighbours_of_trace(reader: StoreReader, trace: FoundTrace) -> dict[str, Any]:
    """Return where a trace stands in its batch of rollouts: `place` (0-based), `num_traces`, `previous` and `next`.

    Both are ids, None at the ends. `mates` are the traces of its group and of its episode, itself too, by agent and
    assignment, with the columns `MATE`.
    """
    rows = traces_of(reader, trace.run, [trace.lineage])
    ids = rows["trace_id"].to_list()
    place = ids.index(trace.trace_id)
    previous, _, following = [None, *ids, None][place : place + 3]
    of_group, of_episode = (pl.col(name) == trace.row[name] for name in ("group_id", "episode_id"))
    mates = rows.filter(of_group | of_episode).sort("agent", _member(), "assignment_id").select(MATE).to_dicts()
    return {"place": place, "num_traces": len(ids), "previous": previous, "next": following, "mates": mates}


def _member() -> pl.Expr:
    """Return the number of a rollout within its group, the end of its assignment's id."""
    return pl.col("assignment_id").str.split("/").list.last().cast(pl.Int64, strict=False)
