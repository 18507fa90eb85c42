"""Tool names: which tool gave a result, by the message itself or by the call that it answers."""

import json
from typing import Any

import pyarrow as pa

from tasks.branches import Branches
from tasks.columns import texts


def tool_names(messages: pa.Table, branches: Branches) -> dict[int, str | None]:
    """Return the name of the tool of every message of role tool, by row; None where nothing says it.

    That is the message's own name, or else that of the function in the call with its `tool_call_id`, by an assistant
    earlier on its branch: ids need not differ between branches.
    """
    role = texts(messages["role"])
    bodies = {
        row: _body(text) for row, text in enumerate(texts(messages["body"])) if role[row] in ("assistant", "tool")
    }
    names: dict[int, str | None] = {}
    for start, end in zip(branches.path.offsets[:-1], branches.path.offsets[1:], strict=True):
        called: dict[str, str] = {}
        for row in branches.path.values[start:end].tolist():
            if role[row] == "assistant":
                called |= _calls(bodies[row])
            elif role[row] == "tool":
                names[row] = bodies[row].get("name") or called.get(bodies[row].get("tool_call_id", ""))
    return names


def _body(text: str) -> dict[str, Any]:
    found = json.loads(text)
    return found if isinstance(found, dict) else {}


def _calls(body: dict[str, Any]) -> dict[str, str]:
    """Return the names of the functions that an assistant's message calls, by the call's id."""
    found: dict[str, str] = {}
    for call in body.get("tool_calls") or ():
        if isinstance(call, dict) and call.get("id") and (name := _name(call)):
            found[call["id"]] = name
    return found


def _name(call: dict[str, Any]) -> str | None:
    """Return the function's name, in either of the two forms of a call."""
    function = call.get("function")
    return call.get("name") or (function.get("name") if isinstance(function, dict) else None)
