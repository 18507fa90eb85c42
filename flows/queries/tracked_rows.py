"""What is sent of a run to W&B and TensorBoard: a row for each step and evaluation, and tables of sample rollouts.

The rows of a recorded run are those that the run itself would have sent, read from the store.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from configs.run import RunConfig
from configs.services import NoTracking, TrackingSection
from flows.queries.metrics import StepNumbers, numbers
from flows.queries.scores import recorded_evaluations
from flows.queries.store_reader import StoreReader
from flows.reporting.figures import evaluation_figures, step_figures
from flows.reporting.formats import cut
from flows.reporting.tracking import TrackedRow, is_sampled
from storage.read.lineage import Work
from storage.schemas.stage_tables import TABLES
from tasks.runtime.stored_rows import StoredRows, rows_of

TEXT = 4000
"""Characters of a prompt or a reply that are sent."""
_OF_TRACES = ("trace_id", "environment", "example_id", "agent", "reward", "num_output_tokens", "error_class")
_OF_MESSAGES = ("trace_id", "message", "role", "content", "sampled")
_OF_SAMPLES = ("trace_id", "advantage")
OF_TABLES = ("traces", "messages", "samples")
"""What is read for sample rollouts."""
Samples = list[dict[str, Any]]


def recorded_rows(reader: StoreReader, run: str, config: RunConfig) -> Iterator[TrackedRow]:
    """Yield the rows of a recorded run, by step. Raises NotThere.

    `config` says which steps have sample rollouts (`tracking`), and which policy an evaluation is of.
    """
    scored = (
        each.scores_in(reader.store, config).described for each in recorded_evaluations(reader.store, run, config)
    )
    rows = [TrackedRow(each["version"], evaluation_figures(each)) for each in scored]
    rows += [_step_row(reader, each, config.tracking) for each in numbers(reader, run) if each.work.finished]
    # An evaluation of the policy that a step began with comes before the step.
    return iter(sorted(rows, key=attrgetter("step")))


def _step_row(reader: StoreReader, of: StepNumbers, config: NoTracking | TrackingSection) -> TrackedRow:
    if isinstance(config, NoTracking) or not is_sampled(of.step, config):
        return TrackedRow(of.step, step_figures(of.values))
    samples = recorded_samples(reader, of, config.num_samples)
    return TrackedRow(of.step, step_figures(of.values), samples)


def recorded_samples(reader: StoreReader, of: StepNumbers, count: int) -> Samples:
    """Return sample rollouts of a recorded step."""
    works = tuple(of.work.work.values())
    tables = {name: _rows(reader, works, name) for name in OF_TABLES}
    return sample_rollouts(tables, count)


def _rows(reader: StoreReader, works: Sequence[Work], table: str) -> StoredRows | None:
    pieces = [piece for work in works for piece in work.slices_of(table)]

    def read(number: int, columns: Sequence[str] | None) -> pa.Table:
        return reader.store.read([pieces[number]], columns)

    return StoredRows(TABLES[table].arrow, len(pieces), read) if pieces else None


def sample_rollouts(tables: Mapping[str, pa.Table | StoredRows | None], count: int) -> Samples:
    """Return some rollouts as plain values: those with the least and the highest reward, and others between them.

    `tables` are the step's traces and messages, and its samples where there are any; without the first two the step has
    no rollouts of its own, as in a replay from a later stage, and there are no samples.
    """
    traces, messages = tables.get("traces"), tables.get("messages")
    if traces is None or messages is None:
        return []
    rows = sorted(rows_of(traces).table(_OF_TRACES).to_pylist(), key=_by_reward)
    most = min(count, len(rows))
    # Evenly over the order of rewards, both ends included.
    chosen = [rows[round(place * (len(rows) - 1) / max(1, most - 1))] for place in range(most)]
    texts = _texts(rows_of(messages), [row["trace_id"] for row in chosen])
    advantages = _advantages(tables.get("samples"))
    return [_sample(row, texts.get(row["trace_id"], []), advantages) for row in chosen]


def _by_reward(row: Mapping[str, Any]) -> tuple[bool, float, str]:
    return row["reward"] is not None, row["reward"] or 0.0, row["trace_id"]


def _texts(messages: StoredRows, trace_ids: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the messages of some traces, in order."""
    wanted = pa.array(trace_ids, pa.string())
    found: dict[str, list[dict[str, Any]]] = {}
    for part in messages.parts(_OF_MESSAGES):
        for row in part.filter(pc.is_in(part["trace_id"], value_set=wanted)).to_pylist():
            found.setdefault(row["trace_id"], []).append(row)
    return {name: sorted(own, key=lambda row: row["message"]) for name, own in found.items()}


def _advantages(samples: pa.Table | StoredRows | None) -> dict[str, float]:
    if samples is None:
        return {}
    return {row["trace_id"]: row["advantage"] for row in rows_of(samples).table(_OF_SAMPLES).to_pylist()}


def _sample(
    row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], advantages: Mapping[str, float]
) -> dict[str, Any]:
    first = next((place for place, each in enumerate(messages) if each["sampled"]), len(messages))
    return {
        "trace": row["trace_id"],
        "environment": row["environment"],
        "example": row["example_id"],
        "agent": row["agent"],
        "prompt": _conversation(messages[:first]),
        "reply": _conversation(messages[first:]),
        "reward": row["reward"],
        "advantage": advantages.get(row["trace_id"]),
        "output_tokens": row["num_output_tokens"],
        "error": row["error_class"] or "",
    }


def _conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return messages as one text, each with its role where there are several."""
    texts = [each["content"] or "" for each in messages]
    if len(messages) > 1:
        texts = [f"{each['role']}: {text}" for each, text in zip(messages, texts, strict=True)]
    return cut("\n".join(texts), TEXT)[0]
