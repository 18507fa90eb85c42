"""Parse errors: the turns that an environment could not read, which must not be trained on whatever they earned.

A sampled message is flagged by a true `parse_error`, wherever a rollout's own record has room for one:

- `extras` of the message itself, column `body` of messages: `{"role": ..., "extras": {"parse_error": true}}`;
- `extras` of its node in the trace's record: `{"nodes": [..., {"extras": {"parse_error": true}}]}`;
- what the environment noted of the trace, column `info`: `{"parse_errors": [3]}`, with the numbers of messages. The
  nodes and messages of verifiers have no room for extras, so this is the way for an environment of today.
"""

import json
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tasks.ragged import Integers

Flags = npt.NDArray[np.bool_]
FLAG = "parse_error"


def unreadable(traces: pa.Table, messages: pa.Table, owner: Integers) -> Flags:
    """Return the sampled messages that are flagged; shape [messages]. `owner` has the trace row of each."""
    flagged: Flags = _mentions(messages["body"])
    for row in np.flatnonzero(flagged):
        flagged[row] = _says(json.loads(messages["body"][int(row)].as_py()))
    number = messages["message"].to_numpy()
    for trace in np.flatnonzero(_mentions(traces["record"]) | _mentions(traces["info"])):
        of_trace = traces.slice(int(trace), 1)
        named = _named(json.loads(of_trace["record"][0].as_py()), json.loads(of_trace["info"][0].as_py()))
        flagged[(owner == trace) & np.isin(number, list(named))] = True
    sampled: Flags = messages["sampled"].to_numpy().astype(np.bool_)
    return flagged & sampled


def _mentions(column: "pa.ChunkedArray[Any]") -> Flags:
    """Return the rows in whose JSON the flag's name occurs at all: few are worth taking apart."""
    found: Flags = pc.match_substring(column, f'"{FLAG}').to_numpy().astype(np.bool_)
    return found


def _says(value: Any) -> bool:
    extras = value.get("extras") if isinstance(value, dict) else None
    return isinstance(extras, dict) and bool(extras.get(FLAG))


def _named(record: Any, info: Any) -> Collection[int]:
    """Return the numbers of the messages that a trace's record or notes flag."""
    nodes = record.get("nodes") or [] if isinstance(record, dict) else []
    noted = info.get("parse_errors") or [] if isinstance(info, dict) else []
    return {number for number, node in enumerate(nodes) if _says(node)} | {int(number) for number in noted}
