"""The tokens of a trace's messages: as the file has them, or made by the renderer and known to be so."""

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.exchange.episodes import GIVEN, RENDERED, SAMPLED, Render, Row, paths
from tasks.exchange.problems import Unfit

SPECIFIED = ("name", "description", "parameters")
"""What of a tool a chat template may ask for."""


def origin_of(nodes: Sequence[Row], temperature: float | None) -> str:
    """Say where the tokens of a trace come from; see `SAMPLED`, `GIVEN` and `RENDERED`.

    Log-probs mean nothing without the temperature that they were taken at, nor at 0.
    """
    if not any(node["token_ids"] for node in nodes):
        return RENDERED if any(node["sampled"] for node in nodes) else SAMPLED
    scored = all(len(node["logprobs"]) == sum(node["mask"]) for node in nodes)
    return SAMPLED if scored and temperature != 0 else GIVEN


def rendered(nodes: Sequence[Row], tools: Sequence[Mapping[str, Any]], render: Render | None) -> list[Row]:
    """Return the nodes with tokens that the renderer makes of them, every path from the root by itself.

    Only what a policy would sample of messages that were sampled is in the mask. What follows the last reply of a path
    has no tokens. Raises Unfit where there is no renderer, and where two paths render a message that they share to
    different tokens.
    """
    if render is None:
        raise Unfit("there are no token ids, and no model was named to make them (--model DIR, model.renderer=NAME)")
    made: dict[int, Row] = {}
    for path in paths([node["parent"] for node in nodes]):
        replies = [place for place, number in enumerate(path) if nodes[number]["message"]["role"] == "assistant"]
        spoken = path[: replies[-1] + 1] if replies else []
        rows = (
            render([openai_message(nodes[number]["message"]) for number in spoken], _specified(tools)) if spoken else []
        )
        for number, row in zip(spoken, rows, strict=True):
            if made.setdefault(number, row)["token_ids"] != row["token_ids"]:
                raise Unfit("branches render a message they share to different tokens", f"node {number}")
    return [{**node, **_tokens(node, made.get(number))} for number, node in enumerate(nodes)]


def _tokens(node: Row, row: Row | None) -> Row:
    if row is None:
        return {"token_ids": [], "mask": [], "is_content": [], "logprobs": []}
    mask = [flag and node["sampled"] for flag in row["mask"]]
    return {"token_ids": row["token_ids"], "mask": mask, "is_content": row["is_content"], "logprobs": []}


def openai_message(message: Mapping[str, Any]) -> Row:
    """Return a message in the form that chat templates are written for, without fields that are null."""
    calls = message.get("tool_calls") or []
    named = [call if "function" in call else _function(call) for call in calls]
    kept = {name: value for name, value in message.items() if value is not None and name != "provider_state"}
    return {**kept, "content": message.get("content") or "", **({"tool_calls": named} if named else {})}


def _function(call: Mapping[str, Any]) -> Row:
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call.get("id", ""), "type": "function", "function": function}


def _specified(tools: Sequence[Mapping[str, Any]]) -> list[Row] | None:
    plain = [tool if "function" in tool else _tool(tool) for tool in tools]
    return [dict(tool) for tool in plain] or None


def _tool(tool: Mapping[str, Any]) -> Row:
    return {"type": "function", "function": {name: tool[name] for name in SPECIFIED if tool.get(name) is not None}}
