"""One trace as a run uses it: found by its id, its row, its outcome and what decided it, and its samples.

View `rollouts` has the outcomes of all rollouts.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import polars as pl

from flows.queries.notes import notes_of
from flows.queries.request import NotThere
from flows.queries.row_lineage import UnknownId, find_rows, identify, policy_version
from flows.queries.step_history import StepLineage, present
from flows.queries.store_reader import StoreReader, has_lost_rows
from flows.queries.views import select, select_of_trace
from storage.read.frames import Frames
from storage.read.lineage import Work

STORAGE = ("run", "key", "attempt", "seq")
"""Columns of storage that a trace's row is shown without; `step` stays."""


@dataclass(frozen=True)
class FoundTrace:
    """A trace, and the work of one run that it went through."""

    run: str
    lineage: StepLineage
    row: Mapping[str, Any]
    """All columns of the table `traces`, and `step`."""

    @property
    def trace_id(self) -> str:
        """Its whole id."""
        return str(self.row["trace_id"])

    @property
    def key(self) -> str:
        """The key of the work that made it, as the run uses it: its scoring again, where there was one."""
        return self.lineage.traces.key

    @property
    def step(self) -> int:
        """The step that it was sampled for; of an evaluation the version that was scored."""
        return self.lineage.traces.step


def find_trace(reader: StoreReader, run: str, trace_id: str, key: str = "") -> FoundTrace:
    """Return a trace of a run, by its id or the first eight characters of it or more.

    `key` is the work that made it, which saves a search through the run; where it is not there, the run is searched.
    Raises NotThere, also where the beginning is that of several.
    """
    history, frames = reader.history(run), reader.frames(run)
    works = {work.key: work for work in history.rollouts}
    # A link names the work that made the trace: its rows are read instead of those of every step.
    hinted = [work for name, work in works.items() if key and name.startswith(key)]
    try:
        nodes = hinted and find_rows(frames, "trace", hinted, pl.col("trace_id") == trace_id).roots
        nodes = nodes or identify(frames, trace_id, "trace").roots
    except UnknownId as error:
        hints = [f"it is one of {', '.join(runs)}"] if (runs := _runs_with(reader, trace_id)) else []
        if has_lost_rows(reader, list(works.values()), "traces"):
            hints.append("rows of its traces were dropped for their age (`stagecoach maintain --retain`)")
        raise NotThere("; ".join((str(error), *hints))) from error
    # Rollouts of one id may have been made at several steps, as in a replay: the last one counts. While they are scored
    # again, those that are not yet are in the work that sampled them alone.
    made = max((frames.graph.works[node.key] for node in nodes), key=lambda work: (work.key in works, work.step))
    rows = frames.rows([made], "traces").filter(trace_id=nodes[0].id).drop(STORAGE)
    return FoundTrace(run, history.lineage(made), rows.collect().row(0, named=True))


def trace_use(reader: StoreReader, trace_id: str, run: str = "") -> FoundTrace:
    """Return a trace by its id, or the first eight characters of it or more, as a run uses it.

    Without a run it is as the run has it that computed it first. Raises NotThere.
    """
    if run:
        return find_trace(reader, run, trace_id)
    nodes = identify(reader.frames(), trace_id, "trace").roots
    work = min((reader.graph.works[node.key] for node in nodes), key=attrgetter("age"))
    # The run that made it may have been removed since; then the first that uses it.
    run = work.computed_by if work.computed_by in work.runs else work.runs[0]
    return find_trace(reader, run, nodes[0].id, work.key)


def _runs_with(reader: StoreReader, trace_id: str) -> list[str]:
    try:
        nodes = identify(reader.frames(), trace_id, "trace").roots
    except UnknownId:
        return []
    return sorted({run for node in nodes for run in reader.graph.works[node.key].runs})


def outcome_of(reader: StoreReader, trace: FoundTrace) -> dict[str, Any]:
    """Return what the run made of the trace, as `stagecoach why` has it of each run, with its quarantines and notes."""
    frames = reader.frames()
    return {**use_of(frames, trace.lineage, trace.row), "quarantines": quarantines_of(frames, trace.trace_id)} | {
        "notes": notes_of(reader.store, trace_id=trace.trace_id)
    }


def other_runs(trace: FoundTrace) -> list[str]:
    """Return the other runs that use the same rows."""
    return [run for run in trace.lineage.traces.runs if run != trace.run]


_SAMPLES = """
select sample_id, branch, path, reward, baseline, advantage, num_tokens, "row", "update", weights
from training_samples
left join (
    select sample_id,
        {rl_weights: rl_weights, ce_weights: ce_weights, ref_kl_weights: ref_kl_weights} as weights
    from batch_samples
    join sample_weights on sample_weights.key = batch_key and sample_weights."row" = batch_samples."row"
        and sample_weights.place = batch_samples.place
    where trace_id = $id
) as packed using (sample_id)
where trace_id = $id
order by branch
"""


def samples(reader: StoreReader, trace: FoundTrace) -> pl.DataFrame:
    """Return the samples of a trace by branch, with their places in the batch, as view `training_samples` has them.

    `weights` are the sums of the weights of its tokens by component, as view `sample_weights` has them.
    """
    return select_of_trace(reader.frames(), trace.lineage, trace.trace_id, _SAMPLES)


TRACE = (
    *("trace_id", "assignment_id", "environment", "example_id", "group_id", "agent", "trainable", "policy_key"),
    *("policy_version", "staleness", "reward", "num_input_tokens", "num_output_tokens", "error_class"),
    *("error_type", "error_message"),
)
"""Columns of a rollout's trace that are returned."""
JUDGED = ("judge", "score", "weight", "answer", "prompt", "cost", "error_type", "error_message")
"""Columns of what judges said of a rollout."""


_DECIDED_SAMPLES = """
select sample_id, reward, baseline, advantage, num_tokens, "row", "update"
from training_samples
where trace_id = $id
order by branch
"""


def explain(reader: StoreReader, text: str, run: str = "") -> dict[str, Any]:
    """Return a rollout, its outcome in a run or in every run that uses it, and the quarantines that it is in.

    Raises UnknownId.
    """
    roots = identify(reader.frames(run), text, "trace").roots
    keys = {name: root.key for root in roots for name in reader.graph.works[root.key].runs if run in ("", name)}
    traces = [find_trace(reader, name, roots[0].id, key) for name, key in sorted(keys.items())]
    return {
        "trace": {name: traces[0].row[name] for name in ("step", *TRACE)},
        "runs": [use_of(reader.frames(), trace.lineage, trace.row) for trace in traces],
        "quarantines": quarantines_of(reader.frames(), roots[0].id),
    }


def quarantines_of(frames: Frames, trace_id: str) -> list[dict[str, Any]]:
    """Return the quarantines that a rollout is in, as plain values."""
    return [
        {name: value for name, value in vars(quarantine).items() if name != "trace_ids"}
        for quarantine in frames.store.quarantines.all()
        if trace_id in quarantine.trace_ids
    ]


def use_of(frames: Frames, lineage: StepLineage, trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one run made of the rollout, with the numbers that decided.

    `lineage` is the run's work that the rollout went through, `trace` its row with the columns `TRACE`.
    """
    trace_id, regraded = trace["trace_id"], "regrades" in lineage.traces.tables
    judged = frames.rows([lineage.traces], "judgements") if "judgements" in lineage.traces.tables else None
    judgements = judged.filter(trace_id=trace_id).collect().to_dicts() if judged is not None else []
    verdict = _row(frames, lineage.verdicts, "verdicts", trace_id)
    decision = _row(frames, lineage.decision, "decisions")
    rollout = select(frames, [lineage], "select outcome, detail from rollouts where trace_id = $id", id=trace_id)
    groups = select(frames, [lineage], "select * from group_rewards where group_id = $id", id=trace["group_id"])
    outcome, detail = rollout.row(0)
    return {
        "run": lineage.run,
        "state": frames.store.runs.events(lineage.run)[-1].event,
        "step": lineage.traces.step,
        "outcome": outcome,
        "detail": detail,
        "reward": trace["reward"],
        "verdict": verdict and {**verdict, "evidence": json.loads(verdict["evidence"])},
        "group": groups.drop("run", "key").row(0, named=True),
        "samples": select(frames, [lineage], _DECIDED_SAMPLES, id=trace_id).to_dicts(),
        "decision": decision and {**decision, "figures": json.loads(decision["figures"])},
        "regrade": _row(frames, lineage.traces if regraded else None, "regrades", trace_id),
        "judgements": [{name: row[name] for name in JUDGED} for row in judgements],
        "policy": f"{lineage.run}:{policy_version(lineage.updates)}" if lineage.updates else None,
        "keys": {work.stage: work.key for work in lineage.works if work},
    }


def _row(frames: Frames, work: Work | None, table: str, trace_id: str | None = None) -> dict[str, Any] | None:
    """Return the first row of a table that a work made, of one rollout if it is named; None where there is none."""
    rows = frames.rows(present(work), table)
    rows = rows if trace_id is None else rows.filter(trace_id=trace_id)
    return next(rows.drop("run", "step", "key", "attempt", "seq").collect().iter_rows(named=True), None)
