"""The head of a trace on a terminal: what it is, what became of it, its rewards, its times, its error."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl
from rich.console import RenderableType
from rich.text import Text

from flows.viewer import addresses
from flows.viewer.data.trace import Found, other_runs, outcome_of
from flows.viewer.library import Library
from flows.viewer.terminal.indented import Indented
from flows.viewer.texts import cut, one_line, visible
from flows.viewer.words import number, seconds
from flows.views.sentences import sentence

TRACEBACK = 4000
"""Characters of a traceback that are shown, from its end, where the error is."""
LINE = 200
SPANS = ("setup", "generation", "model", "scoring")


def head(library: Library, found: Found, rows: pl.DataFrame, whole: bool) -> Iterator[RenderableType]:
    """Yield the head of a trace; `rows` are its messages, and with `whole` nothing is cut."""
    row, outcome = found.row, outcome_of(library, found)
    yield Text.assemble((f"trace {one_line(found.trace_id, LINE)}", "bold"), "  ", _fate(outcome))
    yield _line(
        ("run", found.run), ("step", found.step), ("environment", row["environment"]), ("example", row["example_id"]),
        ("agent", row["agent"]), ("policy", row["policy_version"]), ("temperature", number(row["temperature"])),
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
    if others := other_runs(found):
        yield Text(visible(f"Also used by {', '.join(others)}: --run shows it as they have it."), "dim")
    yield Text(f"Page: {visible(addresses.trace(found.run, found.trace_id, found.key))}", "dim")
    yield from _error(row, whole)


def _fate(outcome: Mapping[str, Any]) -> Text:
    style = {"trained": "green", "evaluated": "cyan", "pending": "cyan", "errored": "red"}.get(
        outcome["fate"], "yellow"
    )
    detail = f": {one_line(outcome['detail'], LINE)}" if outcome["detail"] else ""
    return Text(f"{outcome['fate']}{detail}", style)


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
        yield Indented(Text(visible(_head(row["error_message"], whole))), 2)
    if row["error_traceback"]:
        text = row["error_traceback"]
        shown = text if whole else text[-TRACEBACK:]
        left_out = len(text) - len(shown)
        note = f"... {left_out} characters before this (--whole shows all)\n" if left_out else ""
        yield Indented(Text.assemble((note, "dim"), visible(shown)), 2)


def _head(text: str, whole: bool) -> str:
    shown, left_out = (text, 0) if whole else cut(text, TRACEBACK)
    return f"{shown}\n... {left_out} more characters (--whole shows all)" if left_out else shown
