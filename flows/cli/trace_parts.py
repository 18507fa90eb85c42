"""What is printed of a trace: its outcome, its rewards, its messages, and its tokens in colour.

Texts of models and environments are made visible (flows.reporting.formats) and put into rich texts, which are never
read as markup. A pipe, or NO_COLOR, gets plain text without any escape.
"""

import os
import re
import sys
from typing import Any

import polars as pl
from rich.console import Console, RenderableType

from flows.queries.messages import branches
from flows.queries.messages import messages as read_messages
from flows.queries.request import BadQuestion, plain
from flows.queries.store_reader import StoreReader
from flows.queries.tokens import tokens as read_tokens
from flows.queries.trace import FoundTrace, outcome_of
from flows.viewer.terminal import conversation, head, token_list

WIDTH = 120
"""Columns of output that goes into a pipe or a file."""


def terminal() -> Console:
    """Return a console for texts of others: nothing in them is markup, and NO_COLOR is no escape at all."""
    plainly = bool(os.environ.get("NO_COLOR"))
    wide = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else WIDTH
    return Console(width=wide, color_system=None if plainly else "auto", markup=False, emoji=False, highlight=False)


def trace_parts(
    reader: StoreReader, rollout: FoundTrace, span: str, colour: str, tokens: bool, out: Console
) -> list[RenderableType]:
    """Return all that is printed of a trace; `out` is where, for there may be no colours."""
    rows = within(read_messages(reader, rollout), span)
    listed = token_list(reader, rollout, rows["message"].to_list()) if tokens else None
    return [*head(reader, rollout), *(listed or conversation(reader, rollout, rows, colour, out))]


def within(rows: pl.DataFrame, span: str) -> pl.DataFrame:
    """Return the messages of a span: 4, 3:7, 3: or :7; all where it is empty. Raises BadQuestion without any."""
    if not span:
        return rows
    match = re.fullmatch("([0-9]{1,9})|([0-9]{0,9}):([0-9]{0,9})", span)
    if match is None:
        raise BadQuestion(f"--messages {span}: write 4, 3:7, 3: or :7; both ends are included")
    highest = int(rows["message"].to_list()[-1])
    first, last = (int(match[1] or match[part] or end) for part, end in ((2, 0), (3, highest)))
    shown = rows.filter(pl.col("message").is_between(first, last))
    if shown.is_empty():
        raise BadQuestion(f"--messages {span}: no message has such a number; the last is {highest}")
    return shown


def as_values(reader: StoreReader, rollout: FoundTrace, span: str) -> dict[str, Any]:
    """Return a trace as plain values: its row, its outcome, its messages and all of their tokens."""
    rows = read_messages(reader, rollout)
    selected = within(rows, span)
    values = {
        "run": rollout.run,
        "step": rollout.step,
        "key": rollout.key,
        "trace": dict(rollout.row),
        "outcome": outcome_of(reader, rollout),
        "branches": branches(rows),
        "messages": selected.to_dicts(),
        "tokens": read_tokens(reader, rollout, selected["message"].to_list()).to_dicts(),
    }
    return {name: plain(value) for name, value in values.items()}
