"""Demonstration: turn assigned rows of a demonstrations file into traces, as if they had been rolled out.

Reads assignments and examples; writes traces and messages, and images with their tensors where there are any.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa

from configs.run import View
from storage.schemas.stage_tables import MESSAGES, TRACES
from tasks.arrays.images import TYPES
from tasks.inference.trace_rows.failures import Failure
from tasks.inference.trace_rows.image_tensors import tensors_of
from tasks.inference.trace_rows.images import extract_images
from tasks.inference.trace_rows.rows import RolloutOrigin, row_without_trace
from tasks.runtime.prefect_task import as_task
from tasks.runtime.services import Renderer, require
from tasks.runtime.stage import Attempt, Stage, Tables

ID_LENGTH = 16
"""Hex characters of the work's key in a trace's id."""


@dataclass(frozen=True)
class DemonstrationInputs:
    """The demonstrations that a step assigned, and the model's renderer."""

    assignments: pa.Table
    examples: pa.Table
    step: int
    key: str
    render: Renderer

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        tables = attempt.table("assignments"), attempt.table("examples")
        return cls(*tables, attempt.step, attempt.key, require(attempt.services.render))


def demonstration(inputs: DemonstrationInputs, config: View) -> Tables:
    """Render every assigned demonstration; one that is too long is an error row, not a silent cut.

    Ids of traces begin with the work's key: a finding about one run's trace shall name no trace of another's.
    """
    render = inputs.render
    tasks = dict(zip(*(inputs.examples[name].to_pylist() for name in ("example_id", "task")), strict=True))
    traces, messages = [], []
    for row in inputs.assignments.to_pylist():
        example = json.loads(tasks[row["example_id"]])
        nodes = render(example["messages"], *([example["tools"]] if "tools" in example else []))
        num_tokens = sum(len(node["token_ids"]) for node in nodes)
        # Cut, it would teach to end in the middle of an answer.
        too_long = num_tokens > config.data.max_length
        trace = _trace(row, (inputs.step, inputs.key), nodes, num_tokens, config.data.max_length if too_long else None)
        if types := getattr(render, "token_types", None):
            trace["record"] = json.dumps({TYPES: types}, separators=(",", ":"))
        traces.append(trace)
        messages += [{**node, "trace_id": trace["trace_id"]} for node in nodes]
    made = extract_images(
        pa.Table.from_pylist(traces, schema=TRACES.arrow), pa.Table.from_pylist(messages, schema=MESSAGES.arrow)
    )
    return made | (tensors_of(made["images"], config.model) if "images" in made else {})


def _trace(
    row: dict[str, Any], work: tuple[int, str], nodes: Iterable[dict[str, Any]], num_tokens: int, limit: int | None
) -> dict[str, Any]:
    step, key = work
    trace_id = f"{key[:ID_LENGTH]}-{row['assignment_id']}"
    text = f"{num_tokens} tokens, data.max_length is {limit}"
    failure = Failure("environment", "TooLong", text) if limit else None
    num_output = sum(sum(node["mask"]) for node in nodes)
    # Nothing was measured, and equal inputs shall give equal rows.
    return row_without_trace(failure, RolloutOrigin(row, "", step, step, 1.0), started_at=0.0, seconds=0.0) | {
        "trace_id": trace_id,
        "episode_id": trace_id,
        "agent": "demonstrator",
        "num_turns": sum(1 for node in nodes if node["sampled"]),
        "num_branches": 1,
        "num_input_tokens": num_tokens - num_output,
        "num_output_tokens": num_output,
    }


STAGE = Stage(
    name="demonstration",
    version=2,
    reads=("assignments", "examples"),
    writes=("traces", "messages", "images", "image_tensors"),
    optional=("images", "image_tensors"),
    sections=("data", "model"),
    read_inputs=DemonstrationInputs.read,
    function=demonstration,
    services=("render",),
)
task = as_task(STAGE)
