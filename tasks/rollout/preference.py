"""Preference: take the recorded rollouts of assigned pairs, as if they had been rolled out for this step.

An example is a pair: `chosen` and `rejected` are ids of traces, `traces` the key of the work that scored them last, and
`messages` the keys of that which sampled them. Reads assignments and examples; writes traces and messages.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from configs.run import View
from storage.schemas.stage_tables import MESSAGES, TRACES
from tasks.arrays.columns import with_column
from tasks.runtime.prefect_task import as_task
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Attempt, Stage, Tables

SIDES = ("chosen", "rejected")
"""What the members of a group are."""


class PreferenceLost(ValueError):
    """Rollouts of a pair are no longer in the store."""


@dataclass(frozen=True)
class PreferenceInputs:
    """The pairs that a step assigned, and what reads rows that other work recorded."""

    assignments: pa.Table
    examples: pa.Table
    recorded: Callable[[str, str], pa.Table]
    """Returns the rows of a table that the work of a key made. Raises PreferenceLost."""

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        recorded = partial(recorded_rows, attempt.context)
        return cls(attempt.table("assignments"), attempt.table("examples"), recorded)


def recorded_rows(context: RunContext, table: str, key: str) -> pa.Table:
    """Return the rows of a table that finished work of any run made. Raises PreferenceLost for work that is gone."""
    entry = context.store.ledger.find(key)
    if entry is None:
        raise PreferenceLost(
            f"the rollouts of {key} are no longer in the store: the run that sampled them was removed. Policies "
            "trained so far are safe; name other runs in data.runs, under a new name"
        )
    return pa.concat_tables([context.read(piece) for piece in entry.slices(table)])


def preference(inputs: PreferenceInputs, config: View) -> Tables:
    """Return the rollouts of assigned pairs: the first member of a group is the chosen one, the second the rejected.

    They keep their ids, tokens, rewards and policies; group and assignment are those of this step. A pair that comes
    twice, at the border of two epochs, has other ids the second time.
    """
    tasks = dict(zip(*(inputs.examples[name].to_pylist() for name in ("example_id", "task")), strict=True))
    traces, messages, uses = list[dict[str, Any]](), list[pa.Table](), Counter[str]()
    for row in inputs.assignments.to_pylist():
        pair = json.loads(tasks[row["example_id"]])
        own = pc.field("trace_id") == pair[SIDES[row["member"]]]
        (trace,) = inputs.recorded("traces", pair["traces"]).filter(own).select(TRACES.arrow.names).to_pylist()
        names = ("assignment_id", "group_id", "environment", "example_id")
        uses[trace["trace_id"]] += 1
        if (use := uses[trace["trace_id"]]) > 1:
            trace["trace_id"] += f".{use}"
        traces.append(trace | {name: row[name] for name in names} | {"staleness": 0})
        for key in pair["messages"]:
            rows = inputs.recorded("messages", key).filter(own).select(MESSAGES.arrow.names)
            messages.append(with_column(rows, "trace_id", pa.repeat(trace["trace_id"], rows.num_rows)))
    return {"traces": pa.Table.from_pylist(traces, schema=TRACES.arrow), "messages": pa.concat_tables(messages)}


STAGE = Stage(
    name="preference",
    version=1,
    reads=("assignments", "examples"),
    writes=("traces", "messages"),
    sections=(),
    read_inputs=PreferenceInputs.read,
    function=preference,
)
task = as_task(STAGE)
