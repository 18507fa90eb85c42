"""ECHO: GRPO on the tokens of the policy, cross-entropy on the tokens that its environment answered."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from configs.algorithms import EchoConfig
from tasks.advantage.algorithms.credit import AdvantageBreach, Credit, GroupedTraces, Weights
from tasks.advantage.algorithms.grpo import grpo
from tasks.arrays.columns import texts
from tasks.arrays.images import placeholders
from tasks.arrays.message_graph import Branches, find_branches
from tasks.arrays.ragged import Ragged
from tasks.runtime.imports import load_version


def keep_mask(kept: GroupedTraces, path: str, version: str, arguments: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Return, per token of the messages, flat, whether the function named by `path` keeps it.

    It is called with the table of the messages and `arguments`, and returns for each message one truth value per token.
    Raises AdvantageBreach where it returns anything else, NotImportable where it cannot be loaded or is not `version`.
    """
    found = load_version(path, version)(kept.messages, **deepcopy(dict(arguments)))
    try:
        # An empty list has no type of its own, and numpy would call it one of floats.
        rows = [np.asarray(row, np.bool_ if len(row) == 0 else None) for row in found]
    except (TypeError, ValueError) as error:
        raise _breach(path, f"it returned {type(found).__name__}, not lists of truth values ({error})") from error
    lengths = kept.mask.lengths.tolist()
    if len(rows) != len(lengths):
        raise _breach(path, f"it returned {len(rows)} lists for {len(lengths)} messages")
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row.dtype != np.bool_ or row.shape != (length,):
            name = f"message {kept.messages['message'][number]} of trace {kept.messages['trace_id'][number]}"
            raise _breach(path, f"for {name} it returned {row.dtype} {row.shape}, not {length} truth values")
    return np.concatenate([np.zeros(0, np.bool_), *rows])


def _breach(path: str, what: str) -> AdvantageBreach:
    return AdvantageBreach(
        f"keep_mask {path}: {what}. Nothing was trained; all that was sampled is safe. Let it return, for each message "
        "of the table that it is given, a list of booleans as long as the message's token_ids."
    )


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
        called: dict[str, str] = {}  # anew on each branch: ids of calls may come again on another
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


def echo(kept: GroupedTraces, settings: EchoConfig) -> Credit:
    """Return what grpo gives, with ce weight alpha on environment tokens of later turns; without any role, grpo's.

    Such a token is body and not template (`is_content`; a message of which that is unknown has none), was not sampled,
    and is of a message that comes after a sampled one on its branch and whose role has a section; a tool's also has to
    be one of `tool_names` where those are given, and `keep_mask` may leave it out. Rewards do not matter to it. Raises
    AdvantageBreach where `keep_mask` does not give one truth value for every token.
    """
    credit = grpo(kept, settings)
    if not (settings.system or settings.user or settings.tool):
        return credit
    alpha = _alphas(kept, settings)[kept.mask.row_of_value]
    of_images = placeholders(Ragged.of(kept.messages["token_ids"]), kept.owner, kept.traces)
    chosen = _content(kept) & ~kept.mask.values & ~of_images
    if settings.keep_mask:
        chosen &= keep_mask(kept, settings.keep_mask, settings.keep_mask_version, settings.arguments)
    return replace(credit, ce=np.where(chosen, alpha, np.float32(0)))


def _alphas(kept: GroupedTraces, settings: EchoConfig) -> Weights:
    """Return the weight that an environment token of each message would have, 0 where none has any."""
    branches = find_branches(kept.messages, kept.owner)
    role = np.array(texts(kept.messages["role"]), object)
    alpha = np.zeros(len(role), np.float32)
    for name, section in (("system", settings.system), ("user", settings.user), ("tool", settings.tool)):
        if section is not None:
            alpha[role == name] = section.alpha
    if settings.tool is not None and settings.tool.tool_names is not None:
        allowed = settings.tool.tool_names
        foreign = [row for row, name in tool_names(kept.messages, branches).items() if name not in allowed]
        alpha[foreign] = 0
    sampled = kept.messages["sampled"].to_numpy()
    alpha[sampled | ~_later(sampled, branches)] = 0
    return alpha


def _later(sampled: NDArray[np.bool_], branches: Branches) -> NDArray[np.bool_]:
    """Return, per message, whether a sampled one comes before it on its branch."""
    path = branches.path
    # Counted over all paths laid end to end, less what was counted before the own path began.
    before = np.concatenate(([0], np.cumsum(sampled[path.values])))
    later = np.zeros(len(sampled), np.bool_)
    later[path.values] = before[:-1] > np.repeat(before[path.offsets[:-1]], path.lengths)
    return later


def _content(kept: GroupedTraces) -> NDArray[np.bool_]:
    """Return, per token, whether it is known to be body."""
    known = Ragged.of(kept.messages["is_content"])
    # Empty where the server did not say it.
    whole = known.lengths == kept.mask.lengths
    content = np.zeros(len(kept.mask.values), np.bool_)
    content[whole[kept.mask.row_of_value]] = known.values[whole[known.row_of_value]]
    return content
