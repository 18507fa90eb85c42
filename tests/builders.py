"""Small valid rows and tables for tests, by the contract: give what matters, the rest is filled in."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from configs.run import RunConfig, View
from storage.schemas.stage_tables import TABLES
from tasks.runtime.stage import Stage


def table(name: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows as a table of exactly the contract's schema; every column must be given and none besides."""
    schema = TABLES[name].arrow
    for row in rows:
        assert set(row) == set(schema.names), f"{name}: {set(row) ^ set(schema.names)} should not be, or are missing"
    return pa.Table.from_pylist([dict(row) for row in rows], schema=schema)


def example(example_id: str = "e0", environment: str = "reverse", split: str = "train") -> dict[str, Any]:
    """Return a row of examples."""
    return {"environment": environment, "example_id": example_id, "split": split, "task": "{}"}


def trace(trace_id: str = "t0", *, group_id: str = "g0", reward: float | None = 1.0, **others: Any) -> dict[str, Any]:
    """Return a row of traces: a finished, trainable, single-turn rollout unless said otherwise."""
    row = {
        "trace_id": trace_id,
        "episode_id": f"episode-{trace_id}",
        "assignment_id": f"{group_id}/{trace_id}",
        "group_id": group_id,
        "environment": "reverse",
        "example_id": "e0",
        "agent": "agent",
        "trainable": True,
        "policy_key": "policy",
        "policy_version": 0,
        "staleness": 0,
        "temperature": 1.0,
        "reward": reward,
        "rewards": "{}",
        "metrics": "{}",
        "info": "{}",
        "stop_condition": "stop",
        "is_truncated": False,
        "num_turns": 1,
        "num_branches": 1,
        "num_input_tokens": 3,
        "num_output_tokens": 2,
        "error_class": None,
        "error_type": None,
        "error_message": None,
        "error_traceback": None,
        "started_at": datetime(2026, 1, 1, tzinfo=UTC),
        "setup_seconds": 0.0,
        "generation_seconds": 1.0,
        "model_seconds": 1.0,
        "scoring_seconds": 0.0,
        "record": "{}",
    }
    assert set(others) <= set(row), f"traces has no {set(others) - set(row)}"
    return row | others


def failed(trace_id: str = "t0", *, error_class: str = "timeout", **others: Any) -> dict[str, Any]:
    """Return a row of traces whose rollout failed before it was scored."""
    given = {"reward": None, "error_type": "TimeoutError", "error_message": "too slow", "stop_condition": None}
    return trace(trace_id, **(given | {"error_class": error_class} | others))


def message(
    trace_id: str = "t0",
    number: int = 0,
    *,
    parent: int | None = None,
    tokens: Sequence[int] = (1, 2, 3),
    sampled: bool = False,
    **others: Any,
) -> dict[str, Any]:
    """Return a row of messages; when sampled, all its tokens are, each with a log-prob of -1."""
    row = {
        "trace_id": trace_id,
        "message": number,
        "parent": parent,
        "role": "assistant" if sampled else "user",
        "content": "text",
        "body": "{}",
        "sampled": sampled,
        "token_ids": list(tokens),
        "mask": [sampled] * len(tokens),
        "is_content": [],
        "logprobs": [-1.0 if sampled else 0.0] * len(tokens),
    }
    assert set(others) <= set(row), f"messages has no {set(others) - set(row)}"
    return row | others


def exchange(
    trace_id: str = "t0", prompt: Sequence[int] = (1, 2, 3), completion: Sequence[int] = (4, 5), **others: Any
) -> list[dict[str, Any]]:
    """Return a prompt and its sampled completion; `others` are columns of the completion."""
    answer = message(trace_id, 1, parent=0, tokens=completion, sampled=True, **others)
    return [message(trace_id, 0, tokens=prompt), answer]


def verdict(
    trace_id: str = "t0", *, group_id: str = "g0", reason: str | None = None, detected: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a row of verdicts: kept unless there is a reason."""
    return {
        "trace_id": trace_id,
        "group_id": group_id,
        "keep": reason is None,
        "reason": reason,
        "detected": list(detected),
        "evidence": "{}",
    }


def view(stage: Stage, **sections: Any) -> View:
    """Return the stage's view of a config with these sections and defaults elsewhere; the seed is 7."""
    return View(RunConfig.model_validate({"seed": 7} | sections), stage.sections, stage.name)
