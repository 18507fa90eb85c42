"""Re-tokenised turns: replies whose text went back to the model as other tokens than those that it had sampled.

A renderer that cannot add to a conversation's tokens renders the whole of it anew. Where what comes out differs from
what was sampled, verifiers begins another branch there (verifiers.v1.graph): the reply is in the trace twice, once
sampled and once as a part of a later prompt. The sampled one is trained on, once, in its own branch.
"""

import json
from collections import Counter, defaultdict
from typing import Any

import pyarrow as pa

COLUMNS = ("trace_id", "message", "parent", "role", "sampled", "body")


def retokenised_turns(messages: pa.Table) -> dict[str, int]:
    """Return how many replies of which trace were tokenised again; traces without any are not there.

    `messages` has COLUMNS. A message that was not sampled counts, of role assistant, where one that was sampled says
    the same after the same conversation. Thoughts are not compared, for those are what templates take out.
    """
    traces: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in messages.select(COLUMNS).to_pylist():
        traces[row["trace_id"]].append(row)
    counts = {trace: _count(rows) for trace, rows in traces.items()}
    return {trace: count for trace, count in counts.items() if count}


def _count(rows: list[dict[str, Any]]) -> int:
    """Return how often a trace's replies were tokenised again; a number stands for a conversation up to a message."""
    numbers: dict[tuple[int | None, str], int] = {}
    conversations: dict[int, int] = {}
    sampled, again = set[int](), Counter[int]()
    for row in sorted(rows, key=lambda row: row["message"]):
        before = None if row["parent"] is None else conversations[row["parent"]]
        number = numbers.setdefault((before, _said(row["body"])), len(numbers))
        conversations[row["message"]] = number
        if row["sampled"]:
            sampled.add(number)
        elif row["role"] == "assistant":
            again[number] += 1
    return sum(again[number] for number in sampled)


def _said(body: str) -> str:
    """Return what a message says, whatever was thought before; an empty text is none."""
    message = json.loads(body)
    kept = {name: message.get(name) or None for name in ("role", "content", "tool_calls", "tool_call_id")}
    for call in kept["tool_calls"] or ():
        call["arguments"] = _canonical(call.get("arguments"))
    return json.dumps(kept, sort_keys=True)


def _canonical(arguments: Any) -> Any:
    """Return a call's arguments without what their writing decides: the order of names, and blanks."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (TypeError, ValueError):
        return arguments
