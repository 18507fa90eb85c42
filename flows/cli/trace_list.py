"""print_list: the list of a step's page on a terminal, filtered and sorted by the same code."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import polars as pl
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.queries.request import NotThere, plain
from flows.queries.rollout_list import DERIVED, LEFT, TraceChoice, choose
from flows.queries.rollout_search import filter_traces, run_rollouts
from flows.queries.rollouts import evaluation_traces, lineages_of, steps_of, traces_of
from flows.queries.step import figures as figures_of_step
from flows.queries.store_reader import StoreReader
from flows.reporting import formats
from flows.reporting.formats import one_line
from storage.read.damage import reading

WIDEST, WIDEST_PIPED = 32, 400
"""Characters of one cell, on a terminal and in a pipe: there, a whole id has to be found."""
STYLES = {"trained": "green", "errored": "red", "filtered": "yellow", "quarantined": "yellow", "refused": "yellow"}
"""The colour of an outcome; others have none."""
OF_RUN = ("step", "reward", "advantage", "outcome", "detail", "num_output_tokens", "environment", "example_id")
"""What is shown of the traces of a whole run where nobody chose columns."""
OF_TERMINAL = ("reward", "advantage", "outcome", "detail", "num_output_tokens", "example_id")
"""What a terminal shows of the traces of a step, beside their replies."""
GAP, ID_CHARS = 2, 8
"""Blanks between columns, and characters of a trace's id on a terminal: as many name it in a command."""
MIN_REPLY_CHARS = 24
"""The reply takes what the other columns leave of a line, at least this many characters."""


class TraceSource(NamedTuple):
    """The rollouts to list: of a step, of the evaluation of a version, or with `where` alone of the whole run."""

    step: int | None
    version: int | None
    set_name: str | None
    where: str


def print_list(reader: StoreReader, run: str, source: TraceSource, choice: TraceChoice, as_json: bool) -> None:
    """Print rollouts of a run, one in a line, or as JSON. Raises NotThere and BadQuestion."""
    piped = not sys.stdout.isatty()
    with reading(reader.store):
        run, with_replies = reader.latest() if run == "latest" else run, not (piped or as_json or choice.columns)
        if source.where and source.step is None and source.version is None:
            choice = replace(choice, columns=choice.columns or OF_RUN)
        elif with_replies:
            choice = replace(choice, columns=OF_TERMINAL)
        title, frame = _frame(reader, run, source, choice)
        frame = filter_traces(reader, run, frame, source.where) if source.where else frame
        _, listed = choose(frame, choice)
        figures = figures_of_step(frame)
        replies = _replies(reader, run, listed["rows"]) if with_replies else {}
    if as_json:
        print(json.dumps(plain({"run": run, "of": title, "figures": figures, "traces": listed})))
        return
    # In a pipe no line is wrapped: a line is a trace, to be searched and counted.
    out = Console(width=100_000 if piped else None, markup=False, emoji=False, highlight=False)
    out.print(Text(_headline(run, title, figures)))
    if listed["rows"]:
        _print_rows(out, listed, replies, piped)
    out.print(Text(_ending(listed)))


def _frame(reader: StoreReader, run: str, source: TraceSource, choice: TraceChoice) -> tuple[str, pl.DataFrame]:
    """Return the title of a list, and its traces."""
    if source.version is not None:
        frame = evaluation_traces(reader, run, source.version, source.set_name)
        return f"evaluation of policy {source.version}", frame
    steps = steps_of(reader, run)
    if source.where and source.step is None:
        title, lineages = "all steps", reader.history(run).lineages
    elif not steps:
        raise NotThere(f"run {run!r} has no rollouts yet")
    else:
        step = steps[-1] if source.step is None else source.step
        title, lineages = f"step {step}", lineages_of(reader, run, step)
    return title, traces_of(reader, run, lineages, DERIVED.intersection((*choice.columns, choice.sort)))


def _headline(run: str, title: str, figures: Mapping[str, Any]) -> str:
    reward = next(iter(figures["rewards"]), {"mean": None, "spread": None})
    spread = f" ± {formats.number(reward['spread'])}" if reward["spread"] is not None else ""
    counts = ((row["num_traces"], row["outcome"], one_line(row["detail"], 40)) for row in figures["outcomes"])
    outcomes = ", ".join(" ".join(str(part) for part in parts if part != "") for parts in counts) or "no rollouts"
    return f"{one_line(run, 60)}, {title}: reward {formats.number(reward['mean'])}{spread}; {outcomes}"


def _replies(reader: StoreReader, run: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """Return the reply of each rollout of a page by its trace's id; of other steps no message is read."""
    replies = run_rollouts(reader, run, ("trace_id", "reply"), {row["key"] for row in rows})
    return dict(replies.select("trace_id", "reply").iter_rows())


def _print_rows(out: Console, listed: Mapping[str, Any], replies: Mapping[str, str | None], piped: bool) -> None:
    """Print a line for each trace; with `replies`, its id, the columns that the width has room for, and its reply."""
    rows, cells = listed["rows"], dict[str, list[str]]()
    for column in listed["columns"]:
        name, title = column["name"], column["title"] + ("_s" if piped and column["kind"] == "seconds" else "")
        values = [row[name] if piped or name != "trace_id" else row[name][:ID_CHARS] for row in rows]
        cells[name] = [one_line(title, WIDEST_PIPED), *(cell_text(value, column["kind"], piped) for value in values)]
    ends = dict(zip(cells, accumulate(max(map(cell_len, texts)) + GAP for texts in cells.values()), strict=True))
    first, *others = cells
    shown = [first, *(name for name in others if not replies or ends[name] <= out.width - MIN_REPLY_CHARS)]
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, show_edge=False)
    for column in listed["columns"]:
        if column["name"] in shown:
            justify: Any = "left" if column["kind"] in LEFT else "right"
            table.add_column(Text(cells[column["name"]][0]), justify=justify, no_wrap=True, overflow="ellipsis")
    if replies:
        table.add_column("reply", no_wrap=True)
    for index, row in enumerate(rows, 1):
        values = [Text(cells[name][index], STYLES.get(row[name], "") if name == "outcome" else "") for name in shown]
        reply = one_line(replies.get(row["trace_id"]) or formats.DASH, max(out.width - ends[shown[-1]], 0))
        table.add_row(*values, *([Text(reply)] if replies else []))
    out.print(table, no_wrap=True)


NUMBERS = ("number", "signed", "seconds")
"""Kinds of columns of which a pipe gets digits."""
WRITERS: Mapping[str, Callable[[Any], str]] = {
    **{"names": ", ".join, "flag": lambda value: "yes" if value else "no", "moment": formats.moment},
    **{"number": formats.number, "signed": formats.with_sign, "seconds": formats.seconds},
}
"""How a person reads the kinds of columns."""


def cell_text(value: Any, kind: str, piped: bool) -> str:
    """Return a value of a trace as a piece of one line; what is none is a dash, and no text acts on the terminal."""
    if value is None:
        return formats.DASH
    text = f"{value:.6g}" if piped and kind in NUMBERS else WRITERS.get(kind, str)(value)
    return one_line(text, WIDEST_PIPED if piped else WIDEST)


def _ending(listed: Mapping[str, Any]) -> str:
    pages = f"; page {listed['page']} of {listed['num_pages']} (--page, --limit)" if listed["num_pages"] > 1 else ""
    return f"{listed['num_chosen']} of {listed['num_all']} traces{pages}"
