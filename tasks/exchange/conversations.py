"""Rows of messages, or of prompt and completion, with rewards: what evaluation scripts and datasets are written in.

`results.jsonl` of earlier verifiers is among them. A conversation becomes a trace of one branch; its tokens are the
renderer's.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.exchange.episodes import Episode, ImportContext, Origin, Row, Unfit, canonical, digest, first, mapping
from tasks.exchange.nodes import check_message
from tasks.exchange.traces import trace_rows

USED = ("messages", "prompt", "completion", "reward", "rewards", "metrics", "info", "tools", "trace_id", "group_id")
"""Fields with a meaning of their own; the others are the task's data."""
EXAMPLE_IDS = ("example_id", "task_id", "problem_id", "id")
"""Fields that may name the example, the first that is there; beside a group, `id` names the row."""


def is_conversation(line: Mapping[str, Any]) -> bool:
    """Tell whether a line has messages, or a prompt and a completion."""
    return line.get("messages") is not None or (line.get("prompt") is not None and line.get("completion") is not None)


def read_conversation(line: Row, origin: Origin, context: ImportContext, step: int | None, repeat: int) -> Episode:
    """Return the episode of a line; `repeat` tells equal lines apart. Raises Unfit where it cannot become rows."""
    if not is_conversation(line):
        raise Unfit("the line has neither `messages` nor `prompt` and `completion`")
    messages = _messages(line)
    replies = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies or replies[-1] != len(messages) - 1:
        raise Unfit("the conversation does not end with an assistant message")
    prompt = (
        messages[: replies[0]]
        if line.get("messages") is not None
        else messages[: len(_conversation(line["prompt"], ""))]
    )
    trace_id = str(line.get("trace_id") or digest("conversation", canonical(line), str(repeat)))
    trace = _trace(line, trace_id, messages, prompt)
    row, rows = trace_rows(trace, context, {"file": origin.number, "line": origin.line, "conversation": True})
    data = trace["task"]["data"]
    group, kind = line.get("group_id"), line.get("task")
    named = first(*(line.get(name) for name in EXAMPLE_IDS if group is None or name != "id"))
    return Episode(
        origin=origin,
        episode_id=trace_id,
        environment=context.environment or str(first(_name(line), kind if isinstance(kind, str) else None, "imported")),
        example_id=digest(canonical(prompt)) if named is None else str(named),
        task=canonical(data),
        group=None if group is None else str(group),
        step=step,
        traces=[row],
        messages=rows,
        same=canonical(prompt),  # other fields may be of the row: how long it took, what it cost
    )


def _name(line: Mapping[str, Any]) -> Any:
    return first(*(line[name] for name in ("environment", "env_id", "env_name") if isinstance(line.get(name), str)))


def _messages(line: Mapping[str, Any]) -> list[Row]:
    found = (
        _conversation(line["messages"], "user")
        if line.get("messages") is not None
        else _conversation(line["prompt"], "user") + _conversation(line["completion"], "assistant")
    )
    for number, message in enumerate(found):
        check_message(message, f"message {number}")
    # Parquet fills in fields that only other rows have.
    return [{name: value for name, value in message.items() if value is not None} for message in found]


def _conversation(value: Any, role: str) -> list[Row]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise Unfit("messages are neither text nor a list of messages")
    return [dict(message) for message in value]


def _trace(line: Mapping[str, Any], trace_id: str, messages: Sequence[Row], prompt: Sequence[Row]) -> Row:
    """Return the conversation in verifiers' form, so that it can be scored again and exported like any other."""
    first_reply = len(prompt)
    nodes = [
        {
            "parent": number - 1 if number else None,
            "message": message,
            # An assistant message within the prompt was not sampled for this task.
            "sampled": message["role"] == "assistant" and number >= first_reply,
        }
        for number, message in enumerate(messages)
    ]
    data = {name: value for name, value in line.items() if name not in USED and value is not None}
    return {
        "version": 1,
        "id": trace_id,
        "task": {"type": "WireTaskData", "data": {"idx": 0, **data, "prompt": _prompt(prompt)}},
        "agent": {"config": {}, "name": "agent", "trainable": True},
        "tools": _tools(line.get("tools")),
        "nodes": nodes,
        "rewards": _rewards(line),
        "metrics": _numbers(line.get("metrics")),
        "info": dict(mapping(_parse(line.get("info")))),
        "is_completed": True,
        "ok": True,
        "errors": [],
        "timing": {"start": 0.0},
    }


def _prompt(prompt: Sequence[Row]) -> Any:
    alone = len(prompt) == 1 and prompt[0]["role"] == "user" and isinstance(prompt[0].get("content"), str)
    return prompt[0]["content"] if alone else list(prompt)


def _rewards(line: Mapping[str, Any]) -> Row:
    """Return the named rewards; a line without any was not scored, which is not a reward of zero."""
    if line.get("reward") is not None:
        return {"reward": {"score": _number(line["reward"], "reward"), "weight": 1.0}}
    return {name: {"score": score, "weight": 1.0} for name, score in _numbers(line.get("rewards")).items()}


def _numbers(values: Any) -> dict[str, float]:
    return {name: _number(value, name) for name, value in mapping(_parse(values)).items() if value is not None}


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unfit("a reward or metric is no number", f"{name}: {value!r}")
    return float(value)


def _tools(value: Any) -> list[Row]:
    tools = _parse(value) or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Unfit("tools are no list of objects")
    return [dict(tool.get("function", tool)) for tool in tools]


def _parse(value: Any) -> Any:
    """Return what a JSON text says: Parquet files often hold objects so."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise Unfit("a field is neither an object nor JSON", value[:40]) from error
