"""Windows onto a conversation: the order in which a message graph is read, and the part of it that a page shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from flows.viewer.data.messages import Path, branches
from tasks.arrays.message_graph import BrokenGraph

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
class Reading:
    """A message graph in the order of reading: branch by branch, what branches share once."""

    lines: list[Line]
    paths: list[Path]
    broken: str
    """What is wrong with a graph that has no paths; then messages are read by their numbers."""


def reading(rows: pl.DataFrame, branch: int | None = None) -> Reading:
    """Return messages in the order of reading: all, or those of one branch."""
    try:
        paths = branches(rows)
    except BrokenGraph as error:
        return Reading([Line(each, 0, None) for each in rows["message"]], [], str(error))
    chosen = list(enumerate(paths)) if branch is None else [(branch, paths[branch])]
    return Reading(_lines(chosen), paths, "")


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
