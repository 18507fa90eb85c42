"""tracked_rows: what W&B and TensorBoard get of a recorded run, read from the store: the rows that it sent itself.

A row for each step and evaluation, and tables of sample rollouts.
"""

from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import polars as pl
import pyarrow as pa

from configs.run import RunConfig
from configs.services import NoTracking
from flows.queries.metrics import StepNumbers, numbers
from flows.queries.scores import recorded_evaluations
from flows.queries.store_reader import StoreReader
from flows.reporting.figures import evaluation_figures, step_figures
from flows.reporting.tracking import TrackedRow, is_sampled
from storage.read.views import select
from storage.schemas.stage_tables import TABLES
from tasks.runtime.stored_rows import StoredRows, rows_of

TEXT = 4000
"""Characters of a prompt or a reply that are sent."""
COLUMNS = {
    "traces": ("trace_id", "environment", "example_id", "agent", "reward", "num_output_tokens", "error_class"),
    "messages": ("trace_id", "message", "role", "content", "sampled"),
    "samples": ("trace_id", "advantage"),
}
"""What is read for sample rollouts, by table."""
Samples = list[dict[str, Any]]


def recorded_rows(reader: StoreReader, run: str, config: RunConfig) -> list[TrackedRow]:
    """Return the rows of a recorded run, by step. Raises NotThere.

    `config` says which steps have sample rollouts (`tracking`), and which policy an evaluation is of.
    """
    scored = [
        entry.scores_in(reader.store, config).described for entry in recorded_evaluations(reader.store, run, config)
    ]
    rows = [TrackedRow(entry["version"], evaluation_figures(entry)) for entry in scored]
    for entry in numbers(reader, run):
        if entry.work.finished:
            tracking, samples = config.tracking, None
            if not isinstance(tracking, NoTracking) and is_sampled(entry.step, tracking):
                samples = recorded_samples(reader, entry, tracking.num_samples)
            rows.append(TrackedRow(entry.step, step_figures(entry.values), samples or ()))
    # An evaluation of the policy that a step began with comes before the step.
    return sorted(rows, key=attrgetter("step"))


def recorded_samples(reader: StoreReader, of: StepNumbers, count: int) -> Samples:
    """Return sample rollouts of a recorded step."""
    slices = {name: [piece for work in of.work.work.values() for piece in work.slices_of(name)] for name in COLUMNS}
    tables = {name: reader.store.read(own, list(COLUMNS[name])) for name, own in slices.items() if own}
    return sample_rollouts(tables, count)


_SAMPLES = """
with parts as (
    select *, message < coalesce(min(message) filter (where sampled) over (partition by trace_id), 2147483647) as given
    from messages
),
sides as (
    select trace_id, given, string_agg(if(several, role || ': ', '') || coalesce(content, ''), chr(10) order by message)
        as said
    from (select *, count(*) over (partition by trace_id, given) > 1 as several from parts)
    group by trace_id, given
),
conversations as (
    select trace_id, left(max(said) filter (where given), $most) as prompt,
        left(max(said) filter (where not given), $most) as reply
    from sides
    group by trace_id
),
credits as (select trace_id, last(advantage) as advantage from samples group by trace_id)
select trace_id as trace, environment, example_id as example, agent, coalesce(prompt, '') as prompt,
    coalesce(reply, '') as reply, reward, advantage, num_output_tokens as output_tokens,
    coalesce(error_class, '') as error
from chosen
left join conversations using (trace_id)
left join credits using (trace_id)
order by place
"""


def sample_rollouts(tables: Mapping[str, pa.Table | StoredRows | None], count: int) -> Samples:
    """Return some rollouts as plain values: those with the least and the highest reward, and others between them.

    `tables` are the step's traces and messages, and its samples where there are any; without the first two the step has
    no rollouts of its own, as in a replay from a later stage, and there are no samples. A prompt is what stands before
    the first sampled message; its messages have their roles where there are several.
    """
    stored = {name: rows_of(rows) for name, rows in tables.items() if rows is not None}
    if not {"traces", "messages"} <= stored.keys():
        return []
    rows = _frame(stored, "traces").sort(pl.col("reward").is_not_null(), "reward", "trace_id")
    most = min(count, rows.height)
    # Evenly over the order of rewards, both ends included.
    places = [round(place * (rows.height - 1) / max(1, most - 1)) for place in range(most)]
    chosen = rows[places].with_row_index("place")
    of_chosen = pl.col("trace_id").is_in(chosen["trace_id"].implode())
    relations = {"chosen": lambda: chosen} | {
        name: partial(_frame, stored, name, of_chosen) for name in ("messages", "samples")
    }
    return select(relations, _SAMPLES, most=TEXT).to_dicts()


def _frame(stored: Mapping[str, StoredRows], table: str, where: pl.Expr | bool = True) -> pl.DataFrame:
    """Return rows of a table that meet a condition, a part at a time; none of a table that is missing."""
    empty = pl.DataFrame(TABLES[table].stored.empty_table()).select(COLUMNS[table])
    parts = stored[table].parts(COLUMNS[table]) if table in stored else ()
    return pl.concat([empty, *(pl.DataFrame(pl.from_arrow(part)).filter(where) for part in parts)])
