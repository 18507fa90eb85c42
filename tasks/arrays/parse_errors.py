"""Parse errors: the turns that an environment could not read, which must not be trained on whatever they earned.

A sampled message is flagged by a true `parse_error`, wherever a rollout's own record has room for one:

- `extras` of the message itself, column `body` of messages: `{"role": ..., "extras": {"parse_error": true}}`;
- `extras` of its node in the trace's record: `{"nodes": [..., {"extras": {"parse_error": true}}]}`;
- the environment's notes on the trace, column `info`: `{"parse_errors": [3]}`, with the numbers of messages. The
  nodes and messages of verifiers have no room for extras, so this is the way for an environment of today. Anything
  but a list of numbers (how many there were, what went wrong) flags nothing.
"""

import json
from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.finding import Flags
from tasks.arrays.ragged import Integers

FLAG = "parse_error"


class StrangeFlag(ValueError):
    """An environment flagged a message that the trace does not have."""


def parse_error_flags(traces: pa.Table, messages: pa.Table, owner: Integers) -> Flags:
    """Return the sampled messages that are flagged; shape [messages]. `owner` has the trace row of each."""
    flagged: Flags = _has_flag_name(messages["body"])
    for row in np.flatnonzero(flagged):
        flagged[row] = _is_flagged(json.loads(messages["body"][int(row)].as_py()))
    named = _flagged_messages(traces)
    number = messages["message"].to_numpy()
    for row in np.flatnonzero(np.isin(owner, list(named))):
        flagged[row] |= number[row] in named[int(owner[row])]
    sampled: Flags = messages["sampled"].to_numpy().astype(np.bool_)
    return flagged & sampled


def check_flagged_messages(traces: pa.Table, messages: pa.Table, owner: Integers) -> None:
    """Raise StrangeFlag where a trace flags a message that it does not have: which turn was meant is not known."""
    if not (named := _flagged_messages(traces)):
        return
    known = set(zip(owner.tolist(), messages["message"].to_pylist(), strict=True))
    for trace, numbers in named.items():
        if strange := sorted(each for each in numbers if (trace, each) not in known):
            raise StrangeFlag(
                f"table traces: trace {traces['trace_id'][trace]} flags message {strange[0]} as unreadable "
                "(parse_error), and has none of that number. Nothing was trained; all that was sampled is safe. Let "
                "the environment name messages by their place in the trace, from 0 with the first of the prompt; "
                "leave rollouts recorded so far out with stagecoach quarantine."
            )


def _has_flag_name(column: "pa.ChunkedArray[Any]") -> Flags:
    """Return the rows in whose JSON the flag's name occurs at all: only those few are parsed."""
    found: Flags = pc.match_substring(column, f'"{FLAG}').to_numpy().astype(np.bool_)
    return found


def _is_flagged(value: Any) -> bool:
    extras = value.get("extras") if isinstance(value, dict) else None
    return isinstance(extras, dict) and bool(extras.get(FLAG))


def _flagged_messages(traces: pa.Table) -> dict[int, set[int]]:
    """Return the numbers of the messages that the records or notes of traces flag, by trace row."""
    named: dict[int, set[int]] = {}
    for column, read in (("record", _flagged_nodes), ("info", _noted_errors)):
        for row in np.flatnonzero(_has_flag_name(traces[column])).tolist():
            if numbers := read(json.loads(traces[column][row].as_py())):
                named.setdefault(row, set()).update(numbers)
    return named


def _flagged_nodes(record: Any) -> Collection[int]:
    nodes = record.get("nodes") or [] if isinstance(record, dict) else []
    return {number for number, node in enumerate(nodes) if _is_flagged(node)}


def _noted_errors(info: Any) -> Collection[int]:
    """Return the numbers that `parse_errors` lists; a count or a list of words is a note of another kind."""
    noted = info.get("parse_errors") if isinstance(info, dict) else None
    # By exact type: a bool is an int for isinstance, and names no message.
    return set(noted) if isinstance(noted, list) and all(type(each) is int for each in noted) else ()
