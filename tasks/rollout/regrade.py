"""Regrade: score recorded traces again with the environments' reward functions of today; nothing is sampled.

Reads examples, traces, messages, and images where there are any; writes traces and regrades.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from configs.run import View
from storage.schemas.stage_tables import REGRADES, TRACES
from tasks.arrays.columns import texts, with_column
from tasks.inference.trace_rows.images import extract_known_images, restore_images
from tasks.runtime.prefect_task import as_task
from tasks.runtime.services import GraderService, require
from tasks.runtime.stage import Attempt, Stage, Tables

SCORED = ("reward", "rewards", "metrics", "info")
ERRORS = ("error_class", "error_type", "error_message", "error_traceback")


class GradingBreach(ValueError):
    """The graders did not answer for exactly the traces that can be scored."""


@dataclass(frozen=True)
class RegradeInputs:
    """Recorded rollouts, their examples and images, and the graders."""

    examples: pa.Table
    traces: pa.Table
    messages: pa.Table
    images: pa.Table | None
    graders: GraderService

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        tables = attempt.table("examples"), attempt.table("traces"), attempt.table("messages")
        return cls(*tables, attempt.optional_table("images"), require(attempt.services.graders))


def regrade(inputs: RegradeInputs, config: View) -> Tables:
    """Return the traces, in order, with the rewards, metrics and notes of today, and a row of regrades for each scored.

    Errored rollouts stay as they are and are not scored. A trace whose scoring fails becomes an errored one, so that no
    baseline sees it; its named rewards say what could still be computed. Raises GradingBreach where a trace is left
    out.
    """
    traces, images = inputs.traces, inputs.images
    whole = restore_images(traces, inputs.messages, images)
    found = inputs.graders.scores(inputs.examples, whole["traces"], whole["messages"])
    scores = {row["trace_id"]: row for row in found.to_pylist()}
    wanted = texts(traces.filter(pc.is_null(traces["error_class"]))["trace_id"])
    if len(scores) != found.num_rows or scores.keys() != set(wanted):
        differing = sorted(scores.keys() ^ set(wanted)) or ["the same trace twice"]
        raise GradingBreach(
            f"table traces, column trace_id: {len(wanted)} traces can be scored, the graders answered {found.num_rows} "
            f"times, first {differing[0]}. Nothing of this regrading is in the store; what was recorded is as it was."
        )
    rescored = extract_known_images(_with_scores(whole["traces"], scores), images)
    return {"traces": rescored, "regrades": _regrade_rows(traces, scores)}


def _with_scores(traces: pa.Table, scores: Mapping[str, Mapping[str, Any]]) -> pa.Table:
    names = texts(traces["trace_id"])
    columns = {name: [scores.get(i, {}).get(name) for i in names] for name in (*SCORED, *ERRORS)}
    columns["scoring_seconds"] = [scores.get(i, {}).get("seconds") for i in names]
    was_scored = pa.array([i in scores for i in names])
    # Column by column, and only for traces that were scored: the errors of the others are those of their rollouts.
    for name, values in columns.items():
        now = pc.if_else(was_scored, pa.array(values, TRACES.arrow.field(name).type), traces[name])
        traces = with_column(traces, name, now)
    return traces


def _regrade_rows(traces: pa.Table, scores: Mapping[str, Mapping[str, Any]]) -> pa.Table:
    """Return the row of regrades for each trace that was scored, in the order of the traces."""
    rows = []
    for before in traces.select(["trace_id", "environment", "example_id", "reward", "rewards"]).to_pylist():
        if (now := scores.get(before["trace_id"])) is not None:
            old = {"reward_before": before.pop("reward"), "rewards_before": before.pop("rewards")}
            new = {name: now[name] for name in ("reward", "rewards", "error_type", "error_message", "seconds")}
            rows.append({**before, **old, **new, "changed": old["reward_before"] != now["reward"]})
    return pa.Table.from_pylist(rows, schema=REGRADES.arrow)


STAGE = Stage(
    name="regrade",
    version=1,
    reads=("examples", "traces", "messages"),
    writes=("traces", "regrades"),
    sections=("environments", "environment_judges"),
    read_inputs=RegradeInputs.read,
    function=regrade,
    services=("graders",),
    optional=("images",),
)
task = as_task(STAGE)
