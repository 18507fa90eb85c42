"""One trace on a terminal: what became of it, its rewards, its messages, and its tokens in colour.

Texts that a model or an environment wrote are made visible (flows.viewer.texts) and put into rich texts, which are
never read as markup. Into a pipe, or with NO_COLOR, goes plain text without any escape.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Console, RenderableType

from configs.run import RunConfig
from flows.viewer import addresses
from flows.viewer.data.messages import branches, messages
from flows.viewer.data.tokens import tokens
from flows.viewer.data.trace import Found, outcome_of
from flows.viewer.data.trace_use import trace_use
from flows.viewer.library import Library
from flows.viewer.page import BadQuestion, plain
from flows.viewer.terminal.colours import MEASURES
from flows.viewer.terminal.trace_head import head
from flows.viewer.terminal.trace_messages import conversation
from flows.viewer.terminal.trace_tokens import listed
from storage.errors import border

WIDTH = 120
"""Columns of output that goes into a pipe or a file."""
NARROWEST = 20
"""Columns that can be asked for at least."""


@dataclass(frozen=True)
class Wanted:
    """What of a trace is printed."""

    colour: str = ""
    """Of `colours.MEASURES`; empty for the one that says most, as on the page of a trace."""
    branch: int | None = None
    span: str = ""
    """Numbers of messages, both included: 4, 3:7, 3:, :7; all of them where it is empty."""
    tokens: bool = False
    """One line for each token, with everything that was measured of it."""
    text: bool = False
    """Messages as texts, not as tokens."""
    whole: bool = False
    """Nothing is cut."""


def main(
    text: str,
    wanted: Wanted,
    store: str = "",
    run: str = "",
    width: int | None = None,
    as_json: bool = False,
    save: str = "",
) -> int:
    """Print a trace, or write its page to a file; return the exit status.

    Raises NotThere, BadQuestion, and LayoutError where there is no store.
    """
    if wanted.colour and wanted.colour not in MEASURES:
        raise BadQuestion(f"--color {wanted.colour}: there are {', '.join(MEASURES)}")
    if width is not None and width < NARROWEST:
        raise BadQuestion(f"--width {width}: at least {NARROWEST}, or nothing can be read")
    library, out = Library.at(store or RunConfig().store), terminal(width)
    with border("reading the tables", library.store.root.address):
        found = trace_use(library, text, library.latest() if run == "latest" else run)
        if save:
            from flows.viewer.web.pages_to_files import save_page

            parts: list[RenderableType] = [
                save_page(library, addresses.trace(found.run, found.trace_id, found.key), Path(save))
            ]
        elif as_json:
            parts = [json.dumps(as_values(library, found, wanted), allow_nan=False)]
        else:
            parts = told(library, found, wanted, out)
    for part in parts:
        print(part) if isinstance(part, str) else out.print(part)
    return 0


def terminal(width: int | None = None) -> Console:
    """Return a console for texts of others: nothing in them is markup, and NO_COLOR is no escape at all."""
    plainly = bool(os.environ.get("NO_COLOR"))
    wide = width or (None if sys.stdout.isatty() or os.environ.get("COLUMNS") else WIDTH)
    return Console(width=wide, color_system=None if plainly else "auto", markup=False, emoji=False, highlight=False)


def told(library: Library, found: Found, wanted: Wanted, out: Console) -> list[RenderableType]:
    """Return all that is printed of a trace; `out` is where, for there may be no colours, and little room."""
    rows = messages(library, found)
    own = within(rows, wanted)
    draw = listed if wanted.tokens else conversation
    return [*head(library, found, rows, wanted.whole), *draw(library, found, rows, own, wanted, out)]


def within(rows: pl.DataFrame, wanted: Wanted) -> pl.DataFrame:
    """Return the messages of the branch and the span that are asked for. Raises BadQuestion where there are none."""
    if wanted.branch is not None:
        paths = branches(rows)
        if not 0 <= wanted.branch < len(paths):
            raise BadQuestion(f"--branch {wanted.branch}: the trace has {len(paths)}, numbered from 0")
        rows = rows.filter(pl.col("message").is_in(paths[wanted.branch]))
    if not wanted.span:
        return rows
    first, last = _ends(wanted.span)
    found = rows.filter(pl.col("message") >= first)
    found = found if last is None else found.filter(pl.col("message") <= last)
    if found.is_empty():
        highest = rows["message"].to_list()[-1]
        raise BadQuestion(f"--messages {wanted.span}: no message has such a number; the last is {highest}")
    return found


def _ends(span: str) -> tuple[int, int | None]:
    first, colon, last = span.partition(":")
    if not all(each == "" or (each.isascii() and each.isdecimal()) for each in (first, last)) or span == ":":
        raise BadQuestion(f"--messages {span}: write 4, 3:7, 3: or :7; both ends are included")
    if not colon:
        return int(first), int(first)
    return int(first or 0), int(last) if last else None


def as_values(library: Library, found: Found, wanted: Wanted) -> dict[str, Any]:
    """Return a trace as plain JSON values: its row, what became of it, its messages and all of their tokens."""
    rows = messages(library, found)
    own = within(rows, wanted)
    values = {
        "run": found.run,
        "step": found.step,
        "key": found.key,
        "trace": dict(found.row),
        "outcome": outcome_of(library, found),
        "branches": branches(rows),
        "messages": own.to_dicts(),
        "tokens": tokens(library, found, own["message"].to_list()).to_dicts(),
    }
    shown: dict[str, Any] = json.loads(json.dumps(plain(values), default=str))
    return shown
