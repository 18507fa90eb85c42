"""Rejected attempts: replies by which a harness tried to shorten a conversation, and from which nothing went on.

A harness whose context runs full asks the model for a summary and goes on from it. One that it throws away has no part
in what the rollout was rewarded for. verifiers links such requests to each other (`semantic_parents` of a trace's
record), and does not count what ends in an attempt that nothing followed as a training sample (verifiers.v1.trace).
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tasks.columns import texts

ATTEMPT, ACCEPTED = "compaction_attempt", "compaction"
"""Types of links: to a request for a summary, and from a summary to the first request that goes on from it."""

Row = dict[str, Any]


def without_rejected(traces: pa.Table, messages: pa.Table) -> pa.Table:
    """Return the messages, in order, without rejected attempts and what was said for the sake of these alone.

    Turns before an attempt stay: they led to the reward. So does a trace's first message, where nothing else would.
    """
    marked = traces.filter(pc.match_substring(traces["record"], ATTEMPT)).select(["trace_id", "record"])
    if not marked.num_rows:
        return messages
    rows: dict[str, list[Row]] = {name: [] for name in texts(marked["trace_id"])}
    own = messages.filter(pc.is_in(messages["trace_id"], value_set=marked["trace_id"].combine_chunks()))
    for row in own.select(["trace_id", "message", "parent", "sampled"]).to_pylist():
        rows[row["trace_id"]].append(row)
    gone = {
        (trace["trace_id"], number)
        for trace in marked.to_pylist()
        for number in _gone(_attempts(json.loads(trace["record"])), rows[trace["trace_id"]])
    }
    names = zip(texts(messages["trace_id"]), messages["message"].to_pylist(), strict=True)
    return messages.filter(pa.array([name not in gone for name in names], pa.bool_()))


def _attempts(record: Row) -> set[int]:
    """Return the messages of a trace that are attempts from which nothing went on."""
    links = [node.get("semantic_parents") or () for node in record.get("nodes", ())]
    accepted = {link["node"] for each in links for link in each if link["type"] == ACCEPTED}
    tried = {number for number, each in enumerate(links) if any(link["type"] == ATTEMPT for link in each)}
    return tried - accepted


def _gone(attempts: set[int], rows: Sequence[Row]) -> set[int]:
    """Return the numbers of a trace's messages that go: attempts at an end, and what leads to nothing but these."""
    children = Counter(row["parent"] for row in rows)
    found, above = set[int](), set[int | None]()
    for row in sorted(rows, key=lambda row: row["message"], reverse=True):
        number = row["message"]
        if not children[number] and (number in attempts or (number in above and not row["sampled"])):
            found.add(number)
            above.add(row["parent"])
            children[row["parent"]] -= 1
    return found if len(found) < len(rows) else found - {min(found)}
