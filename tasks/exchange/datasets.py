"""Traces as datasets: supervised samples, and pairs of a better and a worse answer to the same prompt."""

import json
from collections import defaultdict
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
            yield {"messages": [_message(one) for one in spoken], **_about(trace), "branch": branch, **_tools(trace)}


def preferences(group: Sequence[tuple[Row, Sequence[Row]]]) -> Iterator[Row]:
    """Yield the best and the worst answer to each prompt of a group, the first of each, where their rewards differ.

    Of a trace with several branches the last one counts, as in verifiers. Raises NotText.
    """
    answers: dict[tuple[str, str], list[tuple[float, Row, list[Row]]]] = defaultdict(list)
    for trace, messages in group:
        branches = paths([message["parent"] for message in messages])
        spoken = _spoken_messages([messages[number] for number in branches[-1]]) if branches else []
        if not spoken or trace["reward"] is None:
            continue
        # The prompt ends with the first answer; answers that part later are still answers to it.
        start = next(place for place, message in enumerate(spoken) if message["sampled"])
        said = [_message(one) for one in spoken]
        # The tools are part of the prompt: with others the same words ask something else.
        key = (trace["agent"], compact([said[:start], _tools(trace)]))
        answers[key].append((trace["reward"], trace, said))
    for (_, prompt), found in answers.items():
        best, worst = max(found, key=lambda one: one[0]), min(found, key=lambda one: one[0])
        if best[0] != worst[0]:
            start = len(json.loads(prompt)[0])
            yield {
                "prompt": best[2][:start],
                "chosen": best[2][start:],
                "rejected": worst[2][start:],
                "chosen_reward": best[0],
                "rejected_reward": worst[0],
                **{name: best[1][name] for name in ("environment", "example_id", "group_id")},
                "chosen_trace_id": best[1]["trace_id"],
                "rejected_trace_id": worst[1]["trace_id"],
            }


def _about(trace: Row) -> Row:
    return {name: trace[name] for name in ("trace_id", "environment", "example_id", "reward")}


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
