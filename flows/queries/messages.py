"""Messages of a trace: the nodes of its graph, their order, and the part of a conversation that a page shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from flows.queries.store_reader import StoreReader
from flows.queries.trace import FoundTrace
from storage.read.lineage import Work
from tasks.arrays.message_graph import BrokenGraph, drop_rejected, find_branches

GRAPH = ("trace_id", "message", "parent", "sampled")
Path = list[int]


def messages(library: StoreReader, found: FoundTrace) -> pl.DataFrame:
    """Return the messages of a trace in order: message, parent, role, content, body, sampled and counts of its tokens.

    `num_tokens` are those that the message adds, `num_sampled` the ones of them that the policy sampled.
    """
    rows = library.frames().rows(message_works(library, found), "messages")
    rows = rows.filter(pl.col("trace_id") == found.trace_id).sort("message")
    return rows.select(
        "message",
        "parent",
        "role",
        "content",
        "body",
        "sampled",
        num_tokens=pl.col("token_ids").list.len().cast(pl.Int64),
        num_sampled=pl.col("mask").list.sum().cast(pl.Int64),
    ).collect()


def message_works(library: StoreReader, found: FoundTrace, table: str = "messages") -> Sequence[Work]:
    """Return the work that made the trace's messages, or its images: not its scoring again, which takes them."""
    made = found.lineage.traces
    return [made] if table in made.tables else library.graph.sources(made, table)


def branches(rows: pl.DataFrame) -> list[Path]:
    """Return the ways from a root to each leaf, by the leaves' numbers; each a list of messages.

    `rows` are of one trace and have the columns message and parent. Raises BrokenGraph (tasks.arrays.message_graph).
    """
    graph = rows.select(pl.lit("").alias("trace_id"), "message", "parent").to_arrow()
    found = find_branches(graph, np.zeros(len(rows), np.int64)).path
    numbers = rows["message"].to_numpy()
    return [numbers[way].tolist() for way in np.split(found.values, found.offsets[1:-1])] if len(rows) else []


def rejected(found: FoundTrace, rows: pl.DataFrame) -> list[int]:
    """Return the messages that came to nothing: attempts at shortening the conversation that were thrown away.

    No sample goes through them (tasks.arrays.message_graph). `rows` as `messages` gives them.
    """
    trace = pa.table({"trace_id": [found.trace_id], "record": [found.row["record"]]})
    graph = rows.select(pl.lit(found.trace_id).alias("trace_id"), *GRAPH[1:])
    kept = drop_rejected(trace, graph.to_arrow(compat_level=pl.CompatLevel.oldest()))
    return sorted(set(rows["message"]) - set(kept["message"].to_pylist()))


WINDOW = 100
"""Messages that a page shows."""
MOST_HITS = 50
"""Places that a search tells."""
AROUND = 60
"""Characters beside what was searched for."""


@dataclass(frozen=True)
class Line:
    """One message in the order of reading."""

    message: int
    branch: int
    """The first branch through it."""
    goes_on_from: int | None
    """The message that it follows, where that is not the one read just before; -1 for another beginning."""


@dataclass(frozen=True)
class MessageView:
    """A message graph in the order of reading: branch by branch, what branches share once."""

    lines: list[Line]
    paths: list[Path]
    broken: str
    """What is wrong with a graph that has no paths; then messages are read by their numbers."""


def reading(rows: pl.DataFrame, branch: int | None = None) -> MessageView:
    """Return messages in the order of reading: all, or those of one branch."""
    try:
        paths = branches(rows)
    except BrokenGraph as error:
        return MessageView([Line(each, 0, None) for each in rows["message"]], [], str(error))
    chosen = list(enumerate(paths)) if branch is None else [(branch, paths[branch])]
    return MessageView(_lines(chosen), paths, "")


def _lines(paths: Sequence[tuple[int, Path]]) -> list[Line]:
    found: list[Line] = []
    seen: set[int] = set()
    for number, path in paths:
        for place, message in enumerate(path):
            if message in seen:
                continue
            seen.add(message)
            before = path[place - 1] if place else None
            follows = not found or before == found[-1].message
            found.append(Line(message, number, None if follows else -1 if before is None else before))
    return found


def hits(rows: pl.DataFrame, wanted: str) -> list[dict[str, Any]]:
    """Return the messages that hold a text, in any case: message, and what stands around it first; at most MOST_HITS.

    Texts are looked for as they were said, in content and in the whole message (calls and thoughts too).
    """
    if not wanted:
        return []
    found: list[dict[str, Any]] = []
    low = wanted.casefold()
    for row in rows.select("message", "content", "body").iter_rows(named=True):
        for text in (row["content"] or "", row["body"]):
            at = text.casefold().find(low)
            if at >= 0:
                around = text[max(0, at - AROUND) : at + len(wanted) + AROUND]
                found.append({"message": row["message"], "around": around, "before": at > AROUND})
                break
        if len(found) == MOST_HITS:
            break
    return found
