"""Messages: the nodes of a trace's graph, their texts, and the ways through them. Tokens are in `data.tokens`."""

from collections.abc import Sequence

import numpy as np
import polars as pl
import pyarrow as pa

from flows.queries.store_reader import Library
from flows.viewer.data.trace import Found
from storage.read.lineage import Work
from tasks.arrays.message_graph import drop_rejected, find_branches

GRAPH = ("trace_id", "message", "parent", "sampled")
Path = list[int]


def messages(library: Library, found: Found) -> pl.DataFrame:
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


def message_works(library: Library, found: Found, table: str = "messages") -> Sequence[Work]:
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


def rejected(found: Found, rows: pl.DataFrame) -> list[int]:
    """Return the messages that came to nothing: attempts at shortening the conversation that were thrown away.

    No sample goes through them (tasks.arrays.message_graph). `rows` as `messages` gives them.
    """
    trace = pa.table({"trace_id": [found.trace_id], "record": [found.row["record"]]})
    graph = rows.select(pl.lit(found.trace_id).alias("trace_id"), *GRAPH[1:])
    kept = drop_rejected(trace, graph.to_arrow(compat_level=pl.CompatLevel.oldest()))
    return sorted(set(rows["message"]) - set(kept["message"].to_pylist()))
