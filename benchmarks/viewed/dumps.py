"""The alternative: rollouts as text, a file of JSON lines for each step, read with a loop in Python.

Each line is one rollout with its messages, tokens and log-probs: what systems write that keep a run's rollouts as text,
and what a dashboard over such files has to read before it can draw a curve, fill a table or show one rollout.
"""

import json
from pathlib import Path

import polars as pl

from flows.queries.step_history import StepHistory
from storage.read.frames import Frames

OWN = ("record", "run", "key", "attempt", "seq", "step")
"""Columns of traces that such a file would not have: they are the store's own, or said by messages already."""


def dump(frames: Frames, run: str, directory: Path, steps: range) -> dict[int, Path]:
    """Write the rollouts of some steps of a run; return the file of each step."""
    directory.mkdir(parents=True)
    works = {
        lineage.traces.step: lineage.traces
        for lineage in StepHistory(frames.graph, run).lineages
        if lineage.for_training
    }
    files = {}
    for step in steps:
        traces = frames.rows([works[step]], "traces").drop(OWN).collect().to_dicts()
        columns = ("trace_id", "role", "content", "token_ids", "mask", "logprobs")
        messages = frames.rows([works[step]], "messages").select(columns).collect()
        own = {
            str(name): rows
            for (name,), rows in messages.partition_by("trace_id", as_dict=True, include_key=False).items()
        }
        files[step] = directory / f"step_{step}.jsonl"
        with files[step].open("w") as lines:
            for trace in traces:
                said = own.get(trace["trace_id"], pl.DataFrame()).to_dicts()
                lines.write(json.dumps({**trace, "messages": said}, default=str) + "\n")
    return files


def read_rewards(files: list[Path]) -> dict[str, float]:
    """Return the mean reward of each step, as a chart of a run needs it."""
    means = {}
    for path in files:
        with path.open() as lines:
            rewards = [json.loads(line)["reward"] for line in lines]
        scored = [each for each in rewards if each is not None]
        means[path.name] = sum(scored) / len(scored)
    return means


def read_best(path: Path, num_rows: int = 100) -> list[dict[str, object]]:
    """Return the rollouts of a step with the highest rewards, as a table of a step needs them."""
    with path.open() as lines:
        rows = [json.loads(line) for line in lines]
    return sorted(rows, key=lambda row: -(row["reward"] or 0.0))[:num_rows]


def read_one(path: Path, trace_id: str) -> dict[str, object]:
    """Return one rollout out of a step."""
    with path.open() as lines:
        return next(row for row in map(json.loads, lines) if row["trace_id"] == trace_id)
