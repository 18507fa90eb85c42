"""Preference: take the recorded rollouts of assigned pairs, as if they had been rolled out for this step.

An example is a pair: `chosen` and `rejected` are ids of traces, `traces` the key of the work that scored them last, and
`messages` the keys of that which sampled them. Reads assignments and examples; writes traces and messages.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from configs.run import View
from storage.schemas.contract import Table
from storage.schemas.stage_tables import MESSAGES, TRACES
from tasks.arrays.columns import with_column
from tasks.runtime.prefect_task import as_task
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Attempt, Stage, Tables

Row = tuple[str, str]
"""Key of work, and the id of a trace that it made."""


class PreferenceLost(ValueError):
    """Rollouts of a pair are no longer in the store."""


@dataclass(frozen=True)
class PreferenceInputs:
    """The pairs that a step assigned, and where the rows are that other work recorded."""

    assignments: pa.Table
    examples: pa.Table
    context: RunContext

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        return cls(attempt.table("assignments"), attempt.table("examples"), attempt.context)

    def read_rows(self, table: Table, wanted: Iterable[Row]) -> dict[Row, pa.Table]:
        """Return the rows of each trace, by the key of its finished work and its id; what work made is read once.

        Raises PreferenceLost for lost work.
        """
        names, found = dict[str, list[str]](), dict[Row, pa.Table]()
        for key, name in wanted:
            names.setdefault(key, []).append(name)
        for key in names:
            entry = self.context.store.ledger.find(key)
            if entry is None:
                raise PreferenceLost(
                    f"the rollouts of {key} are no longer in the store: the run that sampled them was removed. "
                    "Policies trained so far are safe; name other runs in data.runs, under a new name"
                )
            chosen = pc.field("trace_id").isin(names[key])
            rows = pa.concat_tables([self.context.read(piece).filter(chosen) for piece in entry.slices(table.name)])
            rows = rows.select(table.arrow.names)
            found |= {(key, name): rows.filter(pc.field("trace_id") == name) for name in names[key]}
        return found


def preference(inputs: PreferenceInputs, config: View) -> Tables:
    """Return the rollouts of assigned pairs: the first member of a group is the chosen one, the second the rejected.

    They keep their ids, tokens, rewards and policies; group and assignment are those of this step. A pair that comes
    twice, at the border of two epochs, has other ids the second time.
    """
    tasks = dict(zip(*(inputs.examples[name].to_pylist() for name in ("example_id", "task")), strict=True))
    assigned = inputs.assignments.drop(["member", "seed"]).to_pylist()
    pairs = [json.loads(tasks[row["example_id"]]) for row in assigned]
    names = [
        pair["rejected" if row["assignment_id"].endswith("/1") else "chosen"]
        for row, pair in zip(assigned, pairs, strict=True)
    ]
    scored = inputs.read_rows(TRACES, [(pair["traces"], name) for pair, name in zip(pairs, names, strict=True)])
    sampled = inputs.read_rows(
        MESSAGES, [(key, name) for pair, name in zip(pairs, names, strict=True) for key in pair["messages"]]
    )
    traces, messages, uses = list[dict[str, Any]](), list[pa.Table](), Counter[str]()
    for row, pair, name in zip(assigned, pairs, names, strict=True):
        own = name + (f".{uses[name]}" if uses[name] else "")
        uses[name] += 1
        for trace in scored[pair["traces"], name].to_pylist():
            traces.append(trace | row | {"trace_id": own, "staleness": 0})
        for key in pair["messages"]:
            rows = sampled[key, name]
            messages.append(with_column(rows, "trace_id", pa.repeat(own, rows.num_rows)))
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
