"""A step as plain values for a page: the groups with their rollouts side by side, and the list of traces."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from flows.queries.request import BadQuestion, PageRequest
from flows.viewer.data import groups, step_choice, step_columns, step_figures
from flows.viewer.data.step_choice import Choice, Chosen

GROUPS_PER_PAGE = 24
MOST_CELLS = 64
"""Rollouts of one group that are drawn; the list below has all of them."""
LEVELS = 10
"""The highest level of colour of a reward; the lowest is 0."""
ID_LENGTHS = (8, 12, 16, 24, 32)
MOST_NAMED = 40
"""Named rewards and metrics that are offered as columns; others can be asked for by name."""
ALWAYS = ("trace_id", "key", "group_id", "example_id", "environment", "agent", "outcome", "detail", "error_class")
"""What is told of every trace of a list, whichever columns were chosen."""
CELL = ("trace_id", "key", "reward", "advantage", "outcome", "detail")


def choice_of(asked: PageRequest) -> Choice:
    """Return what an address asks of the list of traces. Raises BadQuestion for numbers that are none."""
    texts = ("environment", "agent", "outcome", "filter", "reason", "error", "trained", "group", "example")
    given: Mapping[str, Any] = {name: asked.text(name) for name in (*texts, "search", "sort")}
    return Choice(
        **given,
        order=asked.text("order", step_choice.ASCENDING) or step_choice.ASCENDING,
        page=asked.number("page", 1, least=1),
        size=asked.number("size", step_choice.PAGE_SIZE, least=1, most=step_choice.LARGEST_PAGE),
        columns=step_columns.read_names(asked.text("columns")),
    )


def listed(frame: pl.DataFrame, chosen: Chosen, choice: Choice) -> dict[str, Any]:
    """Return the page of a list of traces: its columns, its rows, how many there are, and what can be asked for."""
    names = [each.name for each in chosen.columns]
    rows = chosen.page.select(*dict.fromkeys((*ALWAYS, *names))).to_dicts()
    return {
        "columns": [vars(each) for each in chosen.columns],
        "rows": rows,
        "num_all": chosen.num_all,
        "num_found": chosen.num_found,
        "num_chosen": chosen.rows.height,
        "page": choice.page,
        "num_pages": chosen.num_pages,
        "size": choice.size,
        "asked": {name: value for name, value in vars(choice).items() if name != "columns"},
        "known": step_choice.known_values(frame),
        "offered": offered(frame, names),
        "id_length": _id_length(frame["trace_id"]),
    }


def _id_length(ids: pl.Series) -> int:
    """Return how many characters tell the ids of these traces apart, so that a short one names a trace too."""
    return next((most for most in ID_LENGTHS if ids.str.head(most).n_unique() == len(ids)), ID_LENGTHS[-1])


def offered(frame: pl.DataFrame, shown: list[str]) -> list[dict[str, Any]]:
    """Return the columns that can be shown, each with the list of columns that choosing, or leaving it out, gives."""
    named = [step_columns.column(name, frame) for name, _ in step_columns.named(frame)[:MOST_NAMED]]
    plain = [each for each in step_columns.COLUMNS if each.name in frame.columns and each.name != "trace_id"]
    found = []
    for each in (*plain, *named):
        on = each.name in shown
        left = [name for name in shown if name != each.name] if on else [*shown, each.name]
        found.append({"name": each.name, "title": each.title, "on": on, "columns": step_columns.written_names(left)})
    return found


def group_page(frame: pl.DataFrame, asked: PageRequest) -> dict[str, Any]:
    """Return a page of the groups of a frame of traces, each with its rollouts side by side.

    The question: `group_sort` (one of `groups.SORTS`), `group_order` (asc, desc), `group_page`. Raises BadQuestion.
    """
    sort = asked.one_of("group_sort", groups.SORTS, "group")
    order = asked.one_of("group_order", (step_choice.ASCENDING, step_choice.DESCENDING), step_choice.ASCENDING)
    page = asked.number("group_page", 1, least=1)
    found = groups.in_order(groups.of_traces(frame), sort, order == step_choice.DESCENDING)
    pages = max(-(-found.height // GROUPS_PER_PAGE), 1)
    if page > pages:
        raise BadQuestion(f"group_page={page}: there are {pages} of {GROUPS_PER_PAGE} groups each")
    rows = found.slice((page - 1) * GROUPS_PER_PAGE, GROUPS_PER_PAGE)
    return {
        "rows": _with_cells(rows, frame),
        "num_groups": found["group_id"].n_unique(),
        "num_rows": found.height,
        "num_agents": found["agent"].n_unique(),
        "num_environments": found["environment"].n_unique(),
        "largest": found["num_traces"].max(),
        "sort": sort,
        "order": order,
        "page": page,
        "num_pages": pages,
    }


def _with_cells(rows: pl.DataFrame, frame: pl.DataFrame) -> list[dict[str, Any]]:
    """Return groups as plain values with the rollouts of each, those of one environment on one scale of colour."""
    members = frame.join(rows.select("group_id", "agent"), on=["group_id", "agent"], how="semi")
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in members.select("group_id", "agent", *CELL).iter_rows(named=True):
        cells.setdefault((row["group_id"], row["agent"]), []).append({name: row[name] for name in CELL})
    spans = _spans(frame)
    told = []
    for row in rows.to_dicts():
        own = cells[row["group_id"], row["agent"]]
        drawn = [each | {"level": level(each["reward"], spans.get(row["environment"]))} for each in own[:MOST_CELLS]]
        told.append({**row, "cells": drawn, "num_more": len(own) - len(drawn)})
    return told


def _spans(frame: pl.DataFrame) -> dict[str, tuple[float, float]]:
    finite = frame.filter(pl.col("reward").is_finite())
    return {str(name): step_figures.scale(rows["reward"]) for (name,), rows in finite.group_by("environment")}


def level(reward: float | None, span: tuple[float, float] | None) -> int | None:
    """Return the level of colour of a reward, 0 to LEVELS; None where there is no finite reward."""
    if reward is None or span is None or reward != reward or abs(reward) == float("inf"):
        return None
    low, high = span
    return round(min(max((reward - low) / (high - low), 0.0), 1.0) * LEVELS)
