"""Checks the nodes of a message graph from a file, and gives them tokens: the file's own, or the renderer's."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tasks.exchange.episodes import GIVEN, RENDERED, SAMPLED, Render, Row, Unfit, paths

ROLES = ("system", "developer", "user", "assistant", "tool")
LARGEST_ID = 2**31


def check_nodes(nodes: Any, vocab_size: int) -> list[dict[str, Any]]:
    """Return the nodes of a message graph with their defaults filled in; raise Unfit where one cannot be a row."""
    if not isinstance(nodes, list):
        raise Unfit("nodes are no list")
    return [_node(number, node, vocab_size) for number, node in enumerate(nodes)]


def check_message(message: Any, where: str) -> None:
    """Raise Unfit unless `message` is an object with a role and a content that is text, parts or null."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, Mapping) else message
        raise Unfit("a message has no known role", f"{where}: {role!r}")
    content = message.get("content")
    parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
    if not (content is None or isinstance(content, str) or parts):
        raise Unfit("a message's content is neither text nor parts", where)


def _node(number: int, node: Any, vocab_size: int) -> dict[str, Any]:
    where = f"node {number}"
    if not isinstance(node, dict):
        raise Unfit("a node is no object", where)
    lists = {name: node.get(name) or [] for name in ("token_ids", "mask", "is_content", "logprobs")}
    whole = {"parent": None, "sampled": False, **node, **lists}
    parent = whole["parent"]
    if parent is not None and not (type(parent) is int and 0 <= parent < number):
        raise Unfit("a node's parent does not precede it", f"{where}: parent {parent!r}")
    check_message(whole.get("message"), where)
    if not isinstance(whole["sampled"], bool):
        raise Unfit("sampled is neither true nor false", where)
    _check_tokens(whole, where, vocab_size)
    return whole


def _check_tokens(node: Mapping[str, Any], where: str, vocab_size: int) -> None:
    tokens, mask, content = node["token_ids"], node["mask"], node["is_content"]
    limit = vocab_size or LARGEST_ID
    if not all(type(token) is int and 0 <= token < limit for token in tokens):
        raise Unfit("a token id is out of range", f"{where}: ids are whole numbers from 0 to {limit - 1}")
    if not all(isinstance(flag, bool) for flags in (mask, content) for flag in flags):
        raise Unfit("a mask holds something else than true and false", where)
    if len(mask) != len(tokens) or len(content) not in (0, len(tokens)):
        lengths = f"{len(tokens)} token ids, {len(mask)} in mask, {len(content)} in is_content"
        raise Unfit("per-token lists differ in length", f"{where}: {lengths}")
    if any(mask) and not node["sampled"]:
        raise Unfit("a mask is set on a message that was not sampled", where)
    _check_logprobs(node["logprobs"], sum(mask), where)


def _check_logprobs(logprobs: Sequence[Any], num_sampled: int, where: str) -> None:
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in logprobs):
        raise Unfit("a log-prob is no number", where)
    if logprobs and len(logprobs) != num_sampled:
        raise Unfit("log-probs and sampled tokens differ in number", f"{where}: {len(logprobs)} for {num_sampled}")
    with np.errstate(over="ignore"):
        values = np.asarray(logprobs, np.float64).astype(np.float32)
    if not (np.isfinite(values) & (values <= 0)).all():
        raise Unfit("a log-prob is not finite or above zero", where)


TOOL_FIELDS = ("name", "description", "parameters")
"""What of a tool a chat template may ask for."""


def origin_of(nodes: Sequence[Row], temperature: float | None) -> str:
    """Say where the tokens of a trace come from; see `SAMPLED`, `GIVEN` and `RENDERED`.

    Log-probs mean nothing without the temperature that they were taken at, nor at 0.
    """
    if not any(node["token_ids"] for node in nodes):
        return RENDERED if any(node["sampled"] for node in nodes) else SAMPLED
    scored = all(len(node["logprobs"]) == sum(node["mask"]) for node in nodes)
    return SAMPLED if scored and temperature != 0 else GIVEN


def render_tokens(nodes: Sequence[Row], tools: Sequence[Mapping[str, Any]], render: Render | None) -> list[Row]:
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
            render([openai_message(nodes[number]["message"]) for number in spoken], _tool_schemas(tools))
            if spoken
            else []
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


def _tool_schemas(tools: Sequence[Mapping[str, Any]]) -> list[Row] | None:
    plain = [tool if "function" in tool else _tool(tool) for tool in tools]
    return [dict(tool) for tool in plain] or None


def _tool(tool: Mapping[str, Any]) -> Row:
    return {"type": "function", "function": {name: tool[name] for name in TOOL_FIELDS if tool.get(name) is not None}}
