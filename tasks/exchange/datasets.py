"""Traces as datasets: supervised samples."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks.exchange.episodes import Row, compact, paths
from tasks.exchange.traces import openai_message

FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
"""What a message of a dataset may hold."""


class NotText(ValueError):
    """A message holds something that a dataset of text has no place for."""


def samples(trace: Row, messages: Sequence[Row]) -> Iterator[Row]:
    """Yield one row for each branch of a trace, up to its last sampled message; none where nothing was sampled.

    Raises NotText for a message with parts that are no text.
    """
    for branch, path in enumerate(paths([message["parent"] for message in messages])):
        spoken = _spoken_messages([messages[number] for number in path])
        if spoken:
            about = {name: trace[name] for name in ("trace_id", "environment", "example_id", "reward")}
            yield {"messages": [_message(one) for one in spoken], **about, "branch": branch, **_tools(trace)}


def _tools(trace: Row) -> Row:
    """Return the tools that the model was offered, as JSON, where there are any."""
    tools = json.loads(trace["record"]).get("tools")
    return {"tools": compact(tools)} if tools else {}


def _spoken_messages(messages: Sequence[Row]) -> Sequence[Row]:
    """Return the messages up to the last that was sampled; none where none was."""
    last = max((place for place, message in enumerate(messages) if message["sampled"]), default=-1)
    return messages[: last + 1]


def _message(row: Mapping[str, Any]) -> Row:
    message = openai_message(json.loads(row["body"]) or {"role": row["role"], "content": row["content"]})
    return {name: _field(name, message[name], row) for name in FIELDS if message.get(name) is not None}


def _field(name: str, value: Any, row: Mapping[str, Any]) -> Any:
    if name != "content" or isinstance(value, str):
        return value
    if any(part.get("type") != "text" for part in value):
        raise NotText(
            f"trace {row['trace_id']}, message {row['message']}: its content has parts that are no text, which a "
            "dataset of text cannot hold. Nothing was written. Leave such traces out (--where), or use verifiers' form."
        )
    return "\n".join(part["text"] for part in value)
