"""print_list: the list of a step's page on a terminal, filtered and sorted by the same code."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import polars as pl
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.queries.reader import expected_answer, tasks_of
from flows.queries.request import NotThere, plain
from flows.queries.rollout_list import DERIVED, LEFT, TraceChoice, choose
from flows.queries.rollout_search import filter_traces, run_rollouts
from flows.queries.rollouts import evaluation_traces, lineages_of, steps_of, traces_of
from flows.queries.step import figures as figures_of_step
from flows.queries.store_reader import StoreReader
from flows.reporting import formats
from flows.reporting.formats import one_line, tab_separated
from storage.read.damage import reading

WIDEST, WIDEST_TEXT = 32, 400
"""Characters of one cell, and of a text before the width cuts it."""
STYLES = {"trained": "green", "errored": "red", "filtered": "yellow", "quarantined": "yellow", "refused": "yellow"}
"""The colour of an outcome; others have none."""
OF_RUN = ("step", "reward", "advantage", "outcome", "detail", "num_output_tokens", "environment", "example_id")
"""What is shown of the traces of a whole run where nobody chose columns."""
OF_TERMINAL = ("reward", "outcome", "num_output_tokens", "detail", "advantage", "example_id")
"""What a terminal shows of the rollouts of a step, beside their replies and what was expected of these."""
GAP, ID_CHARS = 2, 8
"""Blanks between columns, and characters of a trace's id on a terminal: as many name it in a command."""
MIN_TEXT_CHARS = 40
"""Reply and expected answer take what the other columns leave of a line, at least this many characters."""


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
        texts = _texts(reader, run, frame, listed["rows"]) if with_replies else {}
    if as_json:
        print(json.dumps(plain({"run": run, "of": title, "figures": figures, "traces": listed})))
        return
    # In a pipe a line is a rollout, to be searched and counted: what else there is to say goes to the terminal.
    out = Console(stderr=piped, markup=False, emoji=False, highlight=False)
    out.print(Text(_headline(run, title, figures)))
    names = [column["name"] for column in listed["columns"]]
    if piped:
        print(tab_separated(names, ([row[name] for name in names] for row in listed["rows"])))
    elif listed["rows"]:
        _print_rows(out, listed, texts)
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


def _texts(
    reader: StoreReader, run: str, frame: pl.DataFrame, rows: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, str]]:
    """Return reply and expected answer of each rollout of a page by its id; of other steps no message is read."""
    replies = run_rollouts(reader, run, ("trace_id", "reply"), {row["key"] for row in rows})
    by_id = dict(replies.select("trace_id", "reply").iter_rows())
    tasks = tasks_of(reader, run, frame)
    return {
        row["trace_id"]: {
            "reply": by_id.get(row["trace_id"]) or "",
            "expected": ", ".join(expected_answer(tasks.get((row["environment"], row["example_id"]), {})).values()),
        }
        for row in rows
    }


def _print_rows(out: Console, listed: Mapping[str, Any], texts: Mapping[str, Mapping[str, str]]) -> None:
    """Print a line for each rollout; with `texts`, its id, the columns that the width has room for, and its texts."""
    rows, room = listed["rows"], out.width - MIN_TEXT_CHARS
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, show_edge=False)
    columns: list[list[Text]] = []
    for column in listed["columns"]:
        name = column["name"]
        values = [row[name] if name != "trace_id" else row[name][:ID_CHARS] for row in rows]
        cells = [cell_text(value, column["kind"]) for value in values]
        width = max(map(cell_len, (column["title"], *cells))) + GAP
        if not texts or not columns or (width <= room and {*cells} - {"", formats.DASH}):
            room -= width
            side: Any = "left" if column["kind"] in LEFT else "right"
            table.add_column(Text(one_line(column["title"], WIDEST)), justify=side, no_wrap=True, overflow="ellipsis")
            columns.append([Text(cell, STYLES.get(cell, "") if name == "outcome" else "") for cell in cells])
    room += MIN_TEXT_CHARS
    for name in ("expected", "reply") if texts else ():
        shown = [one_line(texts[row["trace_id"]][name] or formats.DASH, WIDEST_TEXT) for row in rows]
        # The answer that was expected takes a third at most, the reply all that is then left.
        width = max(min(room // 3, max(map(cell_len, (name, *shown)))) if name == "expected" else room, 0)
        room -= width + GAP
        table.add_column(name, width=width, no_wrap=True, overflow="ellipsis")
        columns.append([*map(Text, shown)])
    for line in zip(*columns, strict=True):
        table.add_row(*line)
    out.print(table, no_wrap=True)


WRITERS: Mapping[str, Callable[[Any], str]] = {
    **{"names": ", ".join, "flag": lambda value: "yes" if value else "no", "moment": formats.moment},
    **{"number": formats.number, "signed": formats.with_sign, "seconds": formats.seconds},
}
"""How a person reads the kinds of columns."""


def cell_text(value: Any, kind: str) -> str:
    """Return a value of a rollout as a piece of one line; what is none is a dash, and no text acts on the terminal."""
    return formats.DASH if value is None else one_line(WRITERS.get(kind, str)(value), WIDEST)


def _ending(listed: Mapping[str, Any]) -> str:
    pages = f"; page {listed['page']} of {listed['num_pages']} (--page, --limit)" if listed["num_pages"] > 1 else ""
    return f"{listed['num_chosen']} of {listed['num_all']} rollouts{pages}"
