"""Made-up rollouts of assignments, as the rows that sampling leaves: quick, varied, and the same every time."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.rehearsed.outcomes import Outcome, outcomes
from benchmarks.rehearsed.records import record
from benchmarks.rehearsed.shapes import Shape
from benchmarks.rehearsed.tokens import Streams, make_gibberish, make_loops, streams
from benchmarks.rehearsed.wording import spoken
from storage.schemas.contract import FLAGS, FLOATS, TOKENS
from storage.schemas.stage_tables import MESSAGES, TRACES
from tasks.runtime.stage import Policy, Tables

BEGINNING = datetime(2026, 1, 5, 8, tzinfo=UTC)
STEP_SECONDS = 90.0


@dataclass(frozen=True)
class Sampling:
    """With what rollouts are made: the policy and the step, and the course that every one takes if that is given."""

    policy: Policy
    step: int
    shape: Shape | None = None


def rollouts(assignments: Sequence[Mapping[str, Any]], sampling: Sampling) -> Tables:
    """Return the traces and messages of some assignments; they depend on those, on the policy and on nothing else."""
    names = [_digest(sampling.policy.key, row["assignment_id"], str(row["seed"])) for row in assignments]
    chance = np.random.default_rng(int(names[0][:16], 16))
    ends = outcomes(assignments, sampling.policy.version, chance)
    if sampling.shape is not None:
        ends = [Outcome(sampling.shape, {"answer": (float(number % 2), 1.0)}) for number in range(len(ends))]
    made = streams([end.shape for end in ends], 0.25 + 0.5 * float(np.exp(-sampling.policy.version / 80)), chance)
    _mishaps(made, ends)
    spans = chance.gamma(4.0, 1.5, len(ends)) + 0.5
    messages = _messages(made, names, [end.shape for end in ends])
    return {"traces": _traces(assignments, sampling, names, ends, made, spans), "messages": messages}


def _digest(*parts: str) -> str:
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:32]


def _mishaps(made: Streams, ends: Sequence[Outcome]) -> None:
    """Spoil the last message of the rollouts that loop or babble."""
    last = np.cumsum([len(end.shape.roles) for end in ends]) - 1
    make_loops(made, [int(last[place]) for place, end in enumerate(ends) if end.loops])
    make_gibberish(made, [int(last[place]) for place, end in enumerate(ends) if end.gibberish])


def _messages(made: Streams, names: Sequence[str], shapes: Sequence[Shape]) -> pa.Table:
    roles = [role for shape in shapes for role in shape.roles]
    calls = [number in shape.calls for shape in shapes for number in range(len(shape.roles))]
    texts = [spoken(made.text(message)) for message in range(len(roles))]
    columns = {
        "trace_id": pa.array([names[trace] for trace in made.trace], pa.string()),
        "message": pa.array(made.number, pa.int32()),
        "parent": pa.array([parent for shape in shapes for parent in shape.parents], pa.int32()),
        "role": pa.array(roles, pa.string()),
        "content": pa.array([None if call else text for call, text in zip(calls, texts, strict=True)], pa.string()),
        "body": pa.array([_body(*each) for each in zip(roles, texts, calls, strict=True)], pa.string()),
        "sampled": pa.array(made.sampled),
        "token_ids": made.token_ids.arrow(TOKENS),
        "mask": made.mask.arrow(FLAGS),
        "is_content": made.is_content.arrow(FLAGS),
        "logprobs": made.logprobs.arrow(FLOATS),
    }
    return pa.table(columns, schema=MESSAGES.arrow)


def _body(role: str, text: str, call: bool) -> str:
    """Return a message as JSON; texts are plain words, which need no escapes."""
    if call:
        asked = f'{{"id":"call_0","type":"function","name":"calc","arguments":"{{\\"expression\\": \\"{text}\\"}}"}}'
        return f'{{"role":"assistant","content":null,"reasoning_content":null,"tool_calls":[{asked}]}}'
    more = ',"tool_call_id":"call_0","name":"calc"' if role == "tool" else ""
    return f'{{"role":"{role}","content":"{text}"{more}}}'


def _traces(
    assignments: Sequence[Mapping[str, Any]],
    sampling: Sampling,
    names: Sequence[str],
    ends: Sequence[Outcome],
    made: Streams,
    spans: np.ndarray[Any, np.dtype[np.float64]],
) -> pa.Table:
    """Return the rows of traces; `spans` are the seconds that each was generated in."""
    outputs = made.sums(made.mask.values, len(ends))
    inputs = made.sums(~made.mask.values, len(ends))
    began = BEGINNING + timedelta(seconds=STEP_SECONDS * sampling.step)
    rows = []
    for place, (row, end) in enumerate(zip(assignments, ends, strict=True)):
        start = began + timedelta(milliseconds=40 * place)
        seconds = round(float(spans[place]), 3)
        seen = {name: row[name] for name in ("assignment_id", "group_id", "environment", "example_id")}
        rows.append(
            seen
            | _outcome_columns(end)
            | {"trace_id": names[place], "episode_id": names[place][::-1], "started_at": start}
            | {"num_input_tokens": int(inputs[place]), "num_output_tokens": int(outputs[place])}
            | {"generation_seconds": seconds, "model_seconds": round(seconds * 0.7, 3)}
            | {"record": _record(row, end, start.timestamp(), seconds)}
        )
    fixed = {"agent": "agent", "trainable": True, "temperature": 1.0, "setup_seconds": 0.25}
    fixed |= {"policy_key": sampling.policy.key, "policy_version": sampling.policy.version}
    fixed |= {"staleness": sampling.step - sampling.policy.version}
    return pa.Table.from_pylist([row | fixed for row in rows], schema=TRACES.arrow)


def _outcome_columns(end: Outcome) -> dict[str, Any]:
    """Return the columns that say how a rollout ended."""
    failed = end.ending
    scores = {name: {"score": score, "weight": weight} for name, (score, weight) in end.rewards.items()}
    stop = "harness_error" if failed else "max_turns" if end.truncated else "agent_completed"
    last = len(end.shape.roles) - 1
    return {
        "reward": end.reward,
        "rewards": json.dumps(scores),
        "metrics": json.dumps({"num_calls": len(end.shape.calls)}),
        "info": json.dumps({"parse_errors": [last]} if end.unreadable else {}),
        "stop_condition": stop,
        "is_truncated": end.truncated,
        "num_turns": sum(end.shape.sampled),
        "num_branches": end.shape.num_branches,
        "error_class": failed and failed.error_class,
        "error_type": failed and failed.error_type,
        "error_message": failed and failed.message,
        "error_traceback": failed and failed.traceback,
        "scoring_seconds": 0.0 if failed else 0.125,
    }


def _record(row: Mapping[str, Any], end: Outcome, began: float, seconds: float) -> str:
    if not end.shape.roles:
        return "{}"
    return record(row["environment"], row["example_id"], row["seed"], end.shape.sampled, began, seconds)
