"""Filters, order and pages of a list of rollouts, the same for a page and a terminal."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import polars as pl

from flows.queries import rollout_columns as step_columns
from flows.queries.outcomes import EXPIRED
from flows.queries.request import BadQuestion
from flows.queries.rollout_columns import RolloutColumn, with_named
from tasks.arrays.finding import QUARANTINED
from tasks.metrics.accounting import ERRORED, EVALUATED, FILTERED, NO_WEIGHT, PENDING, REFUSED, STOPPED, TRAINED

OUTCOMES = (TRAINED, FILTERED, ERRORED, STOPPED, QUARANTINED, NO_WEIGHT, REFUSED, PENDING, EVALUATED, EXPIRED)
ERRORS = ("infrastructure", "timeout", "model", "environment", "cancelled", "incomplete")
"""The classes that an error may have; a rollout that was stopped for others' sake is no error, see OUTCOMES."""
YES, NO = "yes", "no"
PAGE_SIZE, LARGEST_PAGE = 50, 500
LONGEST_SEARCH = 500
DESCENDING, ASCENDING = "desc", "asc"


@dataclass(frozen=True)
class TraceChoice:
    """What is asked of a list of traces; what is empty does not choose."""

    environment: str = ""
    agent: str = ""
    outcome: str = ""
    """One of OUTCOMES."""
    filter: str = ""
    """A filter that found something on it, whether it decided or only reported."""
    reason: str = ""
    """The filter that decided against it."""
    error: str = ""
    """A class of error."""
    trained: str = ""
    """yes or no."""
    group: str = ""
    example: str = ""
    search: str = ""
    """A piece of what messages or tool calls say, of an id or of an error's text; upper and lower case are alike."""
    sort: str = ""
    """A column; without one, the order in which rollouts were handed over."""
    order: str = ASCENDING
    page: int = 1
    size: int = PAGE_SIZE
    columns: tuple[str, ...] = ()
    """Those to show; without any, the usual ones."""


@dataclass(frozen=True)
class Chosen:
    """The traces that were asked for: all of them in order, and those of the page."""

    rows: pl.DataFrame
    page: pl.DataFrame
    columns: list[RolloutColumn]
    num_pages: int
    """At least one, where nothing is there too."""
    num_all: int
    num_found: int | None
    """How many of all hold the text that was looked for; None where none was."""


EXACT = {
    "environment": "environment",
    "agent": "agent",
    "outcome": "outcome",
    "reason": "reason",
    "error": "error_class",
}
"""Filters by the column whose value they give."""
IDS = {"group": "group_id", "example": "example_id"}


def choose(frame: pl.DataFrame, choice: TraceChoice, found: pl.Series | None = None) -> Chosen:
    """Return the traces of a frame as `data.step.traces` has it that a choice asks for, sorted and paged.

    `found` says of each row whether it holds the text that is looked for; see `step_search.found`. What has no value
    comes last in both orders, and what is equal stays as it was. Raises BadQuestion for values that are not known and
    for a page that is not there.
    """
    _check(frame, choice)
    shown = step_columns.columns(choice.columns, frame)
    by = step_columns.column(choice.sort, frame) if choice.sort else None
    if by is not None and by not in shown and not choice.columns:
        shown.insert(1, by)  # beside the trace's id: what a list is sorted by is seen
    frame = with_named(frame, (*(each.name for each in shown), choice.sort))
    kept = frame if found is None else frame.filter(found)
    rows = ordered(kept.filter(*_wanted(choice)), by, choice.order == DESCENDING)
    num_pages = max(-(-rows.height // choice.size), 1)
    if choice.page > num_pages:
        raise BadQuestion(f"page={choice.page}: there are {num_pages} of {choice.size} traces each")
    page = rows.slice((choice.page - 1) * choice.size, choice.size)
    return Chosen(rows, page, shown, num_pages, frame.height, None if found is None else int(found.sum()))


def ordered(rows: pl.DataFrame, by: RolloutColumn | None, descending: bool) -> pl.DataFrame:
    """Return rows by a column; what is null or no number last, what is equal in the order that it had."""
    if by is None:
        return rows.reverse() if descending else rows
    value = pl.col(by.name)
    if by.kind == "names":
        value = pl.when(value.list.len() > 0).then(value.list.join(", "))
    if rows.schema[by.name].is_float():
        value = pl.when(value.is_not_nan()).then(value)
    return rows.sort(value, descending=descending, nulls_last=True, maintain_order=True)


def known_values(frame: pl.DataFrame) -> dict[str, list[str]]:
    """Return the values that the filters can have in a frame, in order of name; outcomes in theirs."""
    values = {name: _texts(frame[of]) for name, of in EXACT.items() if name != "outcome"}
    there = set(_texts(frame["outcome"]))
    found = set(_texts(frame["detected"].list.explode(keep_nulls=False))) | set(values["reason"])
    return {**values, "outcome": [each for each in OUTCOMES if each in there], "filter": sorted(found)}


def _texts(values: pl.Series) -> list[str]:
    return sorted(values.drop_nulls().unique().to_list())


def _wanted(choice: TraceChoice) -> Iterable[pl.Expr]:
    for name, of in (EXACT | IDS).items():
        if value := getattr(choice, name):
            yield pl.col(of) == value
    if choice.filter:
        yield pl.col("detected").list.contains(choice.filter).fill_null(False) | pl.col("reason").eq_missing(
            pl.lit(choice.filter)
        )
    if choice.trained:
        yield pl.col("trained") == (choice.trained == YES)


def _check(frame: pl.DataFrame, choice: TraceChoice) -> None:
    """Refuse values that name nothing: an empty list would say that there is nothing of that kind."""
    known: Mapping[str, Iterable[str]] = known_values(frame)
    always = {"outcome": OUTCOMES, "error": ERRORS, "trained": (YES, NO), "order": (ASCENDING, DESCENDING)}
    for name in ("environment", "agent", "outcome", "filter", "reason", "error", "trained", "order"):
        there = [*dict.fromkeys((*always.get(name, ()), *known.get(name, ())))]
        if (value := getattr(choice, name)) and value not in there:
            raise BadQuestion(f"{name}={value!r} is not known here; there are {', '.join(there) or 'none'}")
    for name, of in IDS.items():
        if (value := getattr(choice, name)) and value not in frame[of]:
            raise BadQuestion(f"{name}={value!r} is not among these traces")
    if choice.page < 1 or choice.size < 1:
        raise BadQuestion(f"page={choice.page} of {choice.size} traces: both count from 1")
    if len(choice.search) > LONGEST_SEARCH:
        raise BadQuestion(f"search: at most {LONGEST_SEARCH} characters, not {len(choice.search)}")


NAMES = tuple(each.name for each in fields(TraceChoice))
"""What an address may say after the question mark about a list of traces."""
CHOOSING = tuple(name for name in NAMES if name not in ("page", "size", "columns"))
"""What of it says which traces a list has, and in which order."""
