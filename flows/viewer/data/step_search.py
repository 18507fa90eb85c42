"""Searching: which traces say a text, in their messages, their ids or the text of their error."""

from collections.abc import Sequence

import polars as pl

from flows.viewer.data.step_traces import identity
from flows.viewer.library import Library
from storage.lineage import Work

ITSELF = ("trace_id", "group_id", "example_id", "assignment_id", "error_type", "error_message")
"""What is searched of a trace beside the content of its messages."""


def found(library: Library, run: str, frame: pl.DataFrame, text: str) -> pl.Series | None:
    """Return for each row of a frame of traces whether it holds a text; None where the text is empty.

    Upper and lower case are alike, in all scripts, letter by letter; nothing in the text has a meaning of its own. Only
    ids and content of the messages of the work that made these traces are read, and what was found is held.
    """
    if not text:
        return None
    works = [library.graph.works[key] for key in frame["key"].unique(maintain_order=True)]
    pattern = "(?i)" + pl.escape_regex(text.encode("utf-8", "replace").decode())
    name = ("step_search", text, tuple(identity(work) for work in works))
    saying = library.kept(name, lambda: _saying(library, run, works, pattern))
    itself = pl.any_horizontal(pl.col(each).str.contains(pattern).fill_null(False) for each in ITSELF)
    marks = frame.join(saying, on=["key", "trace_id"], how="left", maintain_order="left")
    return marks.select((itself | pl.col("says").is_not_null()).alias("found"))["found"]


def _saying(library: Library, run: str, works: Sequence[Work], pattern: str) -> pl.DataFrame:
    """Return the traces of which a message holds the pattern: key, trace_id, and says, which is true."""
    rows = library.frames(run).of(works, "messages").select("key", "trace_id", "content")
    saying = rows.filter(pl.col("content").str.contains(pattern)).select("key", "trace_id").unique()
    return saying.with_columns(says=True).collect()
