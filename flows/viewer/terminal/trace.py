"""`stagecoach trace`: the outcome of a rollout, its rewards, its messages, and its tokens in colour.

Texts that a model or an environment wrote are made visible (flows.reporting.formats) and put into rich texts, which are
never read as markup. Into a pipe, or with NO_COLOR, goes plain text without any escape.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Console, RenderableType
from rich.text import Text

from configs.store import default_store
from flows.queries.messages import branches, messages
from flows.queries.notes import note_line
from flows.queries.request import BadQuestion, plain
from flows.queries.sentences import sentence
from flows.queries.store_reader import StoreReader
from flows.queries.tokens import token_policies, tokens
from flows.queries.trace import FoundTrace, other_runs, outcome_of, trace_use
from flows.reporting.formats import number, one_line, seconds, visible
from flows.viewer import addresses
from flows.viewer.terminal.trace_body import MEASURES, Indented, Wanted, conversation, text_cut, token_list
from storage.read.damage import reading

WIDTH = 120
"""Columns of output that goes into a pipe or a file."""
NARROWEST = 20
"""Columns that can be asked for at least."""


def main(
    text: str,
    wanted: Wanted,
    store: str = "",
    run: str = "",
    width: int | None = None,
    as_json: bool = False,
    save: str = "",
    force: bool = False,
) -> int:
    """Print a trace, or write its page to a file; return the exit status.

    Raises NotThere, BadQuestion, and LayoutError where there is no store.
    """
    if wanted.colour and wanted.colour not in MEASURES:
        raise BadQuestion(f"--color {wanted.colour}: there are {', '.join(MEASURES)}")
    if width is not None and width < NARROWEST:
        raise BadQuestion(f"--width {width}: at least {NARROWEST}, or nothing can be read")
    library, out = StoreReader.at(store or default_store(), most_bytes=None), terminal(width)
    with reading(library.store):
        found = trace_use(library, text, library.latest() if run == "latest" else run)
        if save:
            # Templates and pages are loaded for this alone: the command answers sooner without them.
            from flows.viewer.rendering import save_page

            address = addresses.trace(found.run, found.trace_id, found.key)
            parts: list[RenderableType] = [save_page(library, address, Path(save), force)]
        elif as_json:
            parts = [json.dumps(as_values(library, found, wanted), allow_nan=False)]
        else:
            parts = trace_parts(library, found, wanted, out)
    for part in parts:
        print(part) if isinstance(part, str) else out.print(part)
    return 0


def terminal(width: int | None = None) -> Console:
    """Return a console for texts of others: nothing in them is markup, and NO_COLOR is no escape at all."""
    plainly = bool(os.environ.get("NO_COLOR"))
    wide = width or (None if sys.stdout.isatty() or os.environ.get("COLUMNS") else WIDTH)
    return Console(width=wide, color_system=None if plainly else "auto", markup=False, emoji=False, highlight=False)


def trace_parts(library: StoreReader, found: FoundTrace, wanted: Wanted, out: Console) -> list[RenderableType]:
    """Return all that is printed of a trace; `out` is where, for there may be no colours, and little room."""
    rows = messages(library, found)
    own = within(rows, wanted)
    draw = token_list if wanted.tokens else conversation
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
    # int() would take digits of other scripts and underscores too, which are mistakes here.
    if not all(each == "" or (each.isascii() and each.isdecimal()) for each in (first, last)) or span == ":":
        raise BadQuestion(f"--messages {span}: write 4, 3:7, 3: or :7; both ends are included")
    if not colon:
        return int(first), int(first)
    return int(first or 0), int(last) if last else None


def as_values(library: StoreReader, found: FoundTrace, wanted: Wanted) -> dict[str, Any]:
    """Return a trace as plain JSON values: its row, its outcome, its messages and all of their tokens."""
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
    # Times and the like become texts once, here, so that whoever prints it has JSON values alone.
    shown: dict[str, Any] = json.loads(json.dumps(plain(values), default=str))
    return shown


TRACEBACK = 4000
"""Characters of a traceback that are shown, from its end, where the error is."""
LINE = 200
SPANS = ("setup", "generation", "model", "scoring")


def head(library: StoreReader, found: FoundTrace, rows: pl.DataFrame, whole: bool) -> Iterator[RenderableType]:
    """Yield the head of a trace; `rows` are its messages, and with `whole` nothing is cut."""
    row, outcome = found.row, outcome_of(library, found)
    yield Text.assemble((f"trace {one_line(found.trace_id, LINE)}", "bold"), "  ", _outcome(outcome))
    yield _line(
        ("run", found.run), ("step", found.step), ("environment", row["environment"]), ("example", row["example_id"]),
        ("agent", row["agent"]), ("policy", _policies(library, found)), ("temperature", number(row["temperature"])),
    )  # fmt: skip
    yield _line(
        ("messages", len(rows)), ("branches", row["num_branches"]), ("turns", row["num_turns"]),
        ("tokens in", row["num_input_tokens"]), ("sampled", row["num_output_tokens"]),
        ("ended by", row["stop_condition"]), ("truncated", "yes" if row["is_truncated"] else "no"),
    )  # fmt: skip
    yield _line(*((f"{name}", seconds(row[f"{name}_seconds"])) for name in SPANS))
    yield _rewards(row)
    yield Text(visible(sentence({"trace": row}, outcome)))
    for each in outcome["quarantines"]:
        yield Text(visible(f"It is in quarantine {each['quarantine']}: {each['reason']} (where {each['where']})."))
    for each in outcome["notes"]:
        yield Text(visible(note_line(each)))
    if others := other_runs(found):
        yield Text(visible(f"Also used by {', '.join(others)}: --run shows it as they have it."), "dim")
    yield Text(f"Page: {visible(addresses.trace(found.run, found.trace_id, found.key))}", "dim")
    yield from _error(row, whole)


def _policies(library: StoreReader, found: FoundTrace) -> str:
    """Return the version of the policy that sampled a trace, of several each with its number of tokens."""
    counts = token_policies(library, found).group_by("policy_version").agg(pl.col("num_tokens").sum())
    versions = [f"{version} ({count} tokens)" for version, count in counts.sort("policy_version").iter_rows()]
    return ", ".join(versions) or str(found.row["policy_version"])


def _outcome(outcome: Mapping[str, Any]) -> Text:
    style = {"trained": "green", "evaluated": "cyan", "pending": "cyan", "errored": "red"}.get(
        outcome["outcome"], "yellow"
    )
    detail = f": {one_line(outcome['detail'], LINE)}" if outcome["detail"] else ""
    return Text(f"{outcome['outcome']}{detail}", style)


def _line(*pairs: tuple[str, Any]) -> Text:
    """Return names with their values on a line; a value that is not there is a dash."""
    text = Text()
    for place, (name, value) in enumerate(pairs):
        text.append("   " if place else "").append(f"{name} ", "dim")
        text.append("\u2013" if value is None else one_line(str(value), LINE))
    return text


def _rewards(row: Mapping[str, Any]) -> Text:
    """Return the reward with the parts that it is the sum of; not scored is not zero."""
    text = Text.assemble(("reward ", "dim"), (number(row["reward"], 4), "bold"))
    for place, (name, part) in enumerate(_object(row["rewards"]).items()):
        text.append(" = " if not place else " + ", "dim").append(one_line(name, 60)).append(" ")
        if isinstance(part, dict):
            text.append(f"{_figure(part.get('score'))} x {_figure(part.get('weight'))}")
        else:
            text.append("not scored")
    for name, value in _object(row["metrics"]).items():
        text.append("   ").append(f"{one_line(name, 60)} ", "dim").append(_figure(value))
    return text


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _figure(value: Any) -> str:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return number(value, 4)
    return one_line(str(value), 60)


def _error(row: Mapping[str, Any], whole: bool) -> Iterator[RenderableType]:
    if not row["error_class"]:
        return
    kind = f"{row['error_class']} error{': ' + row['error_type'] if row['error_type'] else ''}"
    yield Text(f"\n{one_line(kind, LINE)}", "bold red")
    if row["error_message"]:
        yield Indented(text_cut(row["error_message"], whole, most=TRACEBACK), 2)
    if row["error_traceback"]:
        text = row["error_traceback"]
        shown = text if whole else text[-TRACEBACK:]
        left_out = len(text) - len(shown)
        note = f"... {left_out} characters before this (--whole shows all)\n" if left_out else ""
        yield Indented(Text.assemble((note, "dim"), visible(shown)), 2)
