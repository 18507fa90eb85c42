"""print_list: the list of a step's page on a terminal, filtered, sorted and searched by the same code."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from shlex import quote
from typing import Any

import polars as pl
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.queries.request import NotThere, plain
from flows.queries.rollout_list import LEFT, TraceChoice, choose, list_page, listed_traces
from flows.queries.rollout_search import filter_traces, run_rollouts, search_mask
from flows.queries.rollouts import lineages_of, steps_of, traces_of
from flows.queries.step import figures as figures_of_step
from flows.queries.step import written_of
from flows.queries.store_reader import StoreReader
from flows.reporting import formats
from flows.reporting.formats import one_line
from storage.read.damage import reading
from tasks.metrics.figures import Values

WIDEST, WIDEST_PIPED = 28, 400
"""Characters of one cell, on a terminal and in a pipe: there, a whole id has to be found."""
STYLES = {"trained": "green", "errored": "red", "filtered": "yellow", "quarantined": "yellow", "refused": "yellow"}
"""The colour of an outcome; others have none."""
OF_RUN = ("step", "reward", "advantage", "outcome", "detail", "num_output_tokens", "environment", "example_id")
"""What is shown of the traces of a whole run where nobody chose columns."""
GAP = 2
FIRST = (
    *("trace_id", "reward", "outcome", "detail", "error_type", "num_output_tokens"),
    *("example_id", "agent", "advantage", "group_id"),
)
"""The columns that a terminal shows first where it is too narrow for all the usual ones."""
MIN_REPLY_CHARS = 24
"""The reply takes what the other columns leave of a line, at least this many characters."""


Source = tuple[int | None, int | None, str | None]
"""The step, the version whose evaluation is listed, and its set; None for those that were not named."""


def print_list(reader: StoreReader, run: str, choice: TraceChoice, source: Source, where: str, as_json: bool) -> None:
    piped = not sys.stdout.isatty()
    with reading(reader.store):
        run = reader.latest() if run == "latest" else run
        if where and source[:2] == (None, None):
            choice = replace(choice, columns=choice.columns or OF_RUN)
            title, metrics = "all steps", dict[Any, Any]()
            frame = traces_of(reader, run, reader.history(run).lineages)
        else:
            title, frame, metrics = _frame(reader, run, choice, *source)
        frame = filter_traces(reader, run, frame, where) if where else frame
        listed = list_page(frame, choose(frame, choice, search_mask(reader, run, frame, choice.search)), choice)
        figures = figures_of_step(frame, metrics)
        replies = {} if piped or as_json or choice.columns else _replies(reader, run, listed["rows"])
    if as_json:
        print(json.dumps(plain({"run": run, "of": title, "figures": figures, "traces": listed})))
        return
    # In a pipe no line is wrapped: a line is a trace, to be searched and counted.
    out = Console(width=100_000 if piped else None, markup=False, emoji=False, highlight=False)
    out.print(Text(_headline(run, title, figures)))
    _print_rows(out, listed, replies, chosen_by_user=bool(choice.columns), piped=piped)
    out.print(Text(_ending(listed)))


def _frame(
    reader: StoreReader, run: str, choice: TraceChoice, step: int | None, version: int | None, set_name: str | None
) -> tuple[str, pl.DataFrame, Values]:
    """Return the title of a list, its traces, and the metrics that the step has written of them."""
    if version is not None:
        frame = listed_traces(reader, run, version, choice, for_training=False, set_name=set_name)
        return f"evaluation of policy {version}", frame, {}
    steps = steps_of(reader, run)
    if not steps:
        raise NotThere(f"run {run!r} has no rollouts yet")
    number = steps[-1] if step is None else step
    frame = listed_traces(reader, run, number, choice)
    return f"step {number}", frame, written_of(reader, run, lineages_of(reader, run, number))


def _headline(run: str, title: str, figures: Mapping[str, Any]) -> str:
    reward = figures["reward"]
    spread = f" ± {formats.number(reward['spread'])}" if reward["spread"] is not None else ""
    counts = ((row["num_traces"], row["outcome"], one_line(row["detail"], 40)) for row in figures["outcomes"])
    outcomes = ", ".join(" ".join(str(part) for part in parts if part != "") for parts in counts)
    return f"{one_line(run, 60)}, {title}: reward {formats.number(reward['mean'])}{spread}; {outcomes}"


def _replies(reader: StoreReader, run: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """Return the reply of each rollout of a page by its trace's id; of other steps no message is read."""
    replies = run_rollouts(reader, run, ("trace_id", "reply"), {row["key"] for row in rows})
    return dict(replies.select("trace_id", "reply").iter_rows())


def _print_rows(
    out: Console, listed: Mapping[str, Any], replies: Mapping[str, str | None], chosen_by_user: bool, piped: bool
) -> None:
    """Print a line for each trace: of the usual columns those that the width has room for, and the reply's beginning.

    What all rollouts of the list share is said once, above them; a pipe has it in each line.
    """
    same = [] if piped or chosen_by_user else listed["same"]
    if same:
        shared = ", ".join(f"{column['title']} {cell_text(column['value'], column['kind'], piped)}" for column in same)
        out.print(Text(f"The same in all: {shared}", style="dim"))
    most, names = WIDEST_PIPED if piped else WIDEST, {column["name"] for column in same}
    cells, right = dict[str, list[str]](), set[str]()
    for column in listed["columns"]:
        name, kind = column["name"], column["kind"]
        texts = [cell_text(row[name], kind, piped) for row in listed["rows"]]
        if name == "trace_id" and not piped:
            texts = [one_line(row[name][: listed["id_length"]], WIDEST_PIPED) for row in listed["rows"]]
        if name not in names and (piped or chosen_by_user or {*texts} - {formats.DASH, ""}):
            title = column["title"] + (UNITS.get(kind, "") if piped else "")
            cells[name] = [one_line(title, most), *texts]
            right |= {name} if kind not in LEFT else set()
    widths = {name: max(map(cell_len, texts)) for name, texts in cells.items()}
    # Columns that a person named are printed though lines get too long; the usual ones give way.
    fitting = {*widths} if chosen_by_user else {*_that_fit(widths, out.width - (MIN_REPLY_CHARS if replies else 0))}
    shown = [name for name in cells if name in fitting]
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, show_edge=False)
    for name in shown:
        justify: Any = "right" if name in right else "left"
        table.add_column(Text(cells[name][0]), justify=justify, no_wrap=True, overflow="ellipsis")
    if replies:
        table.add_column("reply", no_wrap=True)
    reply_chars = out.width - sum(widths[name] + GAP for name in shown)
    for index, row in enumerate(listed["rows"], 1):
        values = [Text(cells[name][index], STYLES.get(row[name], "") if name == "outcome" else "") for name in shown]
        reply = [Text(one_line(replies.get(row["trace_id"]) or formats.DASH, reply_chars))] if replies else []
        table.add_row(*values, *reply)
    if listed["rows"]:
        out.print(table, no_wrap=True)
    if missing := [name for name in widths if name not in fitting]:
        out.print(Text(f"Not shown for want of room: {', '.join(missing)} (--columns, or --json)", style="dim"))


def _that_fit(widths: Mapping[str, int], room: int) -> list[str]:
    """Return the columns that fit into a width, those of FIRST before others."""
    shown: list[str] = []
    used = 0
    for name in sorted(widths, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
        if used + widths[name] <= room:
            shown.append(name)
            used += widths[name] + GAP
    return shown


NUMBERS: Mapping[str, Callable[[Any], str]] = {
    **{"number": formats.number, "signed": formats.with_sign, "seconds": formats.seconds},
}
"""How a person reads the kinds of numbers; a pipe gets digits."""
WRITERS: Mapping[str, Callable[[Any], str]] = {
    **{"names": ", ".join, "flag": lambda value: "yes" if value else "no", "moment": formats.moment},
    **NUMBERS,
}
UNITS = {"seconds": "_s"}
"""The unit in the heading of a column whose digits a pipe gets, by kind."""


def cell_text(value: Any, kind: str, piped: bool) -> str:
    """Return a value of a trace as a piece of one line; what is none is a dash, and no text acts on the terminal."""
    if value is None:
        return formats.DASH
    text = f"{value:.6g}" if piped and kind in NUMBERS else WRITERS.get(kind, str)(value)
    return one_line(text, WIDEST_PIPED if piped else WIDEST)


def _ending(listed: Mapping[str, Any]) -> str:
    parts = [f"{listed['num_chosen']} of {listed['num_all']} traces"]
    if listed["num_found"] is not None:
        parts.append(f"{listed['num_found']} hold the text")
    if listed["num_pages"] > 1:
        parts.append(f"page {listed['page']} of {listed['num_pages']} (--page, --limit)")
    first = listed["rows"][0]["trace_id"][: listed["id_length"]] if listed["rows"] else "ID"
    return f"{'; '.join(parts)}. One of them: stagecoach trace {quote(one_line(first, 60))}"
