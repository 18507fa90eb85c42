"""Searching: which traces say a text, in their messages and tool calls, their ids or the text of their error."""

import json
from collections.abc import Sequence

import polars as pl

from flows.queries.store_reader import Library
from flows.viewer.data.step_columns import parsed
from storage.read.lineage import Work, row_identities

ITSELF = ("trace_id", "group_id", "example_id", "assignment_id", "error_type", "error_message")
"""What is searched of a trace beside its messages."""
MORE = r'"(tool_calls|reasoning_content)"\s*:\s*["\[{]'
"""What the body of a message holds that says more than its content."""


def found(library: Library, run: str, frame: pl.DataFrame, text: str) -> pl.Series | None:
    """Return for each row of a frame of traces whether it holds a text; None where the text is empty.

    Upper and lower case are alike, in all scripts, letter by letter; nothing in the text has a meaning of its own. Only
    what the messages say, of the work that made these traces, is read, and what was found is held.
    """
    if not text:
        return None
    works = [library.graph.works[key] for key in frame["key"].unique(maintain_order=True)]
    pattern = "(?i)" + pl.escape_regex(text.encode("utf-8", "replace").decode())
    name = ("step_search", text, row_identities(works))
    saying = library.kept(name, lambda: _saying(library, run, works, pattern))
    itself = pl.any_horizontal(pl.col(each).str.contains(pattern).fill_null(False) for each in ITSELF)
    joined = frame.join(saying, on=["key", "trace_id"], how="left", maintain_order="left")
    return joined.select((itself | pl.col("says").is_not_null()).alias("found"))["found"]


def _saying(library: Library, run: str, works: Sequence[Work], pattern: str) -> pl.DataFrame:
    """Return the traces of which a message holds the pattern: key, trace_id, and says, which is true."""
    rows = library.frames(run).rows(works, "messages").select("key", "trace_id", "content", "body")
    says = pl.col("content").str.contains(pattern).fill_null(False)
    # Bodies are kept of those messages alone whose content is not all that they say.
    more = pl.when(~says & pl.col("body").str.contains(MORE)).then("body")
    read = (
        rows.select("key", "trace_id", says=says, body=more)
        .filter(pl.col("says") | pl.col("body").is_not_null())
        .collect()
    )
    beside = read.filter(pl.col("body").is_not_null())
    texts = pl.Series("texts", [said_beside(body) for body in beside["body"]], pl.List(pl.String))
    saying = beside.select("key", "trace_id", texts).explode("texts").filter(pl.col("texts").str.contains(pattern))
    both = pl.concat([read.filter("says").select("key", "trace_id"), saying.select("key", "trace_id")])
    return both.unique().with_columns(says=True)


def said_beside(body: str) -> list[str]:
    """Return what a message says beside its content: its thoughts, and names and arguments of its tool calls."""
    said = parsed(body)
    calls = said.get("tool_calls")
    found = [said.get("reasoning_content")]
    for call in calls if isinstance(calls, list) else ():
        inner = call.get("function", call) if isinstance(call, dict) else {}
        found += [inner.get("name"), inner.get("arguments")] if isinstance(inner, dict) else []
    return [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in found if each]
