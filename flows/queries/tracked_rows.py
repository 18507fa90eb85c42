"""tracked_rows: what W&B and TensorBoard get of a recorded run, read from the store: the rows that it sent itself.

A row for each step and evaluation, and tables of sample rollouts.
"""

from collections.abc import Mapping, Sequence
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
from flows.reporting.formats import cut
from flows.reporting.tracking import TrackedRow, is_sampled
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


def sample_rollouts(tables: Mapping[str, pa.Table | StoredRows | None], count: int) -> Samples:
    """Return some rollouts as plain values: those with the least and the highest reward, and others between them.

    `tables` are the step's traces and messages, and its samples where there are any; without the first two the step has
    no rollouts of its own, as in a replay from a later stage, and there are no samples.
    """
    traces, messages, samples = (tables.get(name) for name in COLUMNS)
    if traces is None or messages is None:
        return []
    rows = sorted(rows_of(traces).table(COLUMNS["traces"]).to_pylist(), key=_by_reward)
    most = min(count, len(rows))
    # Evenly over the order of rewards, both ends included.
    chosen = [rows[round(place * (len(rows) - 1) / max(1, most - 1))] for place in range(most)]
    credits = [] if samples is None else rows_of(samples).table(COLUMNS["samples"]).to_pylist()
    advantages = {row["trace_id"]: row["advantage"] for row in credits}
    texts = _texts(rows_of(messages), [row["trace_id"] for row in chosen])
    return [
        {
            **{"trace": row["trace_id"], "environment": row["environment"], "example": row["example_id"]},
            **{"agent": row["agent"], **texts.get(row["trace_id"], {"prompt": "", "reply": ""})},
            **{"reward": row["reward"], "advantage": advantages.get(row["trace_id"])},
            **{"output_tokens": row["num_output_tokens"], "error": row["error_class"] or ""},
        }
        for row in chosen
    ]


def _by_reward(row: Mapping[str, Any]) -> tuple[bool, float, str]:
    return row["reward"] is not None, row["reward"] or 0.0, row["trace_id"]


def _texts(messages: StoredRows, trace_ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the prompt and the reply of some traces: messages up to the first sampled one, and the others."""
    parts = [pl.DataFrame(pl.from_arrow(part)) for part in messages.parts(COLUMNS["messages"])]
    if not parts:  # a live step whose rollouts all failed
        return {}
    rows = pl.concat([part.filter(pl.col("trace_id").is_in(trace_ids)) for part in parts]).sort("message")
    texts = {}
    for (name,), own in rows.group_by("trace_id"):
        first = own["sampled"].arg_max() if own["sampled"].any() else own.height
        texts[str(name)] = {"prompt": _conversation(own[:first]), "reply": _conversation(own[first:])}
    return texts


def _conversation(messages: pl.DataFrame) -> str:
    """Return messages as one text, each with its role where there are several."""
    text = pl.col("content").fill_null("")
    texts = messages.select(pl.format("{}: {}", "role", text) if messages.height > 1 else text).to_series()
    return cut("\n".join(texts), TEXT)[0]
