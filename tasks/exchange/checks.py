"""What must hold of a trace's messages before anything is made of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tasks.exchange.problems import Unfit

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
