"""A list of rollouts, the same for a page and a terminal: columns, filters, order and pages."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import polars as pl

from flows.queries.request import BadQuestion, PageRequest, parse_object
from flows.queries.views import EXPIRED
from tasks.arrays.finding import QUARANTINED
from tasks.metrics.accounting import ERRORED, EVALUATED, FILTERED, NO_WEIGHT, PENDING, REFUSED, STALE, STOPPED, TRAINED

NAMED = {"reward": "rewards", "metric": "metrics"}
"""Columns `reward:NAME` and `metric:NAME` are of the named values in these columns, JSON objects."""


@dataclass(frozen=True)
class RolloutColumn:
    """One column: its name in addresses, commands and frames, its heading, what its values are, and what it means."""

    name: str
    title: str
    kind: str
    """text, whole, number, signed, seconds, flag, moment or names; what is no text is right-aligned."""
    meaning: str
    usual: bool = True
    """Whether it is shown where nobody chose columns."""


_USUAL = """
trace_id           | trace       | text    | the trace
reward             | reward      | number  | total reward; none where scoring did not run
group_id           | group       | text    | rollouts of one example that are compared with each other
example_id         | example     | text    | the example tried
environment        | environment | text    | the environment
agent              | agent       | text    | the agent's seat in the environment
advantage          | advantage   | signed  | reward minus baseline, as the algorithm has it
outcome            | outcome     | text    | trained, filtered, errored, ...
detail             | by          | text    | the filter or the class of error that decided its outcome
detected           | found by    | names   | filters that found something, also those that only report
error_type         | error       | text    | the type of the exception
stop_condition     | stopped by  | text    | what ended the rollout
num_turns          | turns       | whole   | sampled messages
num_input_tokens   | tokens in   | whole   | tokens fed in, each once
num_output_tokens  | tokens out  | whole   | tokens sampled
is_truncated       | truncated   | flag    | ended by a limit on tokens or turns
policy_version     | policy      | whole   | the version of the policy that sampled it
staleness          | stale by    | whole   | the step minus that version
setup_seconds      | set-up      | seconds | wall-clock of set-up
generation_seconds | generation  | seconds | wall-clock of the agent, model calls included
scoring_seconds    | scoring     | seconds | wall-clock of scoring
num_branches       | branches    | whole   | root-to-leaf paths of its messages
"""
_FURTHER = """
step               | step        | whole   | the step; of an evaluation the policy's version
place              | place       | whole   | its place in the order in which rollouts were handed over
baseline           | baseline    | number  | what was subtracted from the reward
mismatch_kl        | mismatch KL | number  | of the learner against the engine, its tokens' mean
reason             | left out by | text    | the filter that decided against it
error_class        | error class | text    | whose fault the error was
error_message      | error text  | text    | the text of the exception
trained            | trained     | flag    | whether a policy was trained on it
trainable          | trainable   | flag    | whether its tokens are the policy's
num_samples        | samples     | whole   | training samples made of it
num_tokens         | tokens      | whole   | tokens fed in and sampled
model_seconds      | model       | seconds | wall-clock of model calls alone
seconds            | seconds     | seconds | wall-clock of set-up, generation and scoring
temperature        | temperature | number  | sampling temperature
policy_key         | policy key  | text    | the policy that sampled it
started_at         | started     | moment  | when it began
assignment_id      | assignment  | text    | the assignment that it answers
episode_id         | episode     | text    | the environment run that made it
set                | set         | text    | the set of held-out examples
round              | round       | whole   | the round of the evaluation; later ones try again what failed
replaced           | made again  | flag    | whether a later round made it again
"""


def _parse_columns(table: str, usual: bool) -> list[RolloutColumn]:
    cells = [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
    return [RolloutColumn(name, title, kind, meaning, usual) for name, title, kind, meaning in cells]


COLUMNS = (*_parse_columns(_USUAL, usual=True), *_parse_columns(_FURTHER, usual=False))
"""In the order in which they are shown."""
LEFT = ("text", "names")
"""The kinds whose values stand at the left."""
OUTCOMES = (TRAINED, FILTERED, ERRORED, STOPPED, STALE, QUARANTINED, NO_WEIGHT, REFUSED, PENDING, EVALUATED, EXPIRED)
ERRORS = ("infrastructure", "timeout", "model", "environment", "cancelled", "incomplete")
"""The classes that an error may have; a rollout that was stopped for others' sake is no error, see OUTCOMES."""
PAGE_SIZE, LARGEST_PAGE = 50, 500
DESCENDING, ASCENDING = "desc", "asc"
FILTERS = {
    **{"environment": "environment", "agent": "agent", "outcome": "outcome", "reason": "reason"},
    **{"error": "error_class", "filter": "detected", "group": "group_id", "example": "example_id"},
}
"""Filters of a page by the column whose value they name; of `filter` one of the values."""
IDS = ("group", "example")
"""Filters whose values are not listed."""
ALWAYS = ("trace_id", "key", "group_id", "example_id", "environment", "agent", "outcome", "detail", "error_class")
"""Columns that every row of a list has, whichever others were chosen."""
ID_LENGTHS = (8, 12, 16, 24, 32)


@dataclass(frozen=True)
class TraceChoice:
    """Which traces a list has, in which order."""

    filters: Mapping[str, str] = field(default_factory=dict)
    """Values by name of FILTERS."""
    sort: str = ""
    """A column; without one, the order in which rollouts were handed over."""
    order: str = ASCENDING
    page: int = 1
    size: int = PAGE_SIZE
    columns: tuple[str, ...] = ()
    """Those to show; without any, the usual ones."""


@dataclass(frozen=True)
class Chosen:
    """The chosen traces: all of them in order, and those of the page."""

    rows: pl.DataFrame
    page: pl.DataFrame
    columns: list[RolloutColumn]
    num_pages: int
    """At least one, where nothing is there too."""


def column(name: str, frame: pl.DataFrame) -> RolloutColumn:
    """Return a column of a list of traces by its name or heading: one of COLUMNS, `reward:NAME` or `metric:NAME`.

    Raises BadQuestion, which names those that there are.
    """
    stored = [column for column in COLUMNS if column.name in frame.columns]
    for column in stored:
        if name in (column.name, column.title):
            return column
    kind, _, title = name.partition(":")
    if kind in NAMED and title:
        return RolloutColumn(name, title, "number", f"of the {NAMED[kind]} that have names", False)
    names = ", ".join(column.name for column in stored)
    raise BadQuestion(f"there is no column {name!r}; there are {names}, and reward:NAME and metric:NAME")


def columns(names: Sequence[str], frame: pl.DataFrame) -> list[RolloutColumn]:
    """Return the columns of some names, each once and the trace's first.

    Without names, the usual ones, but for those in which no trace has a value, as of errors, where there was none, and
    for that of the agents where there is one alone.
    """
    if names:
        return [column(name, frame) for name in dict.fromkeys(("trace_id", *names))]
    usual = [column for column in COLUMNS if column.usual and _has_values(frame[column.name])]
    return [column for column in usual if column.name != "agent" or frame["agent"].n_unique() > 1]


def _has_values(values: pl.Series) -> bool:
    return any(value not in ("", []) for value in values.drop_nulls().unique().to_list())


def read_names(text: str) -> tuple[str, ...]:
    """Return the names of a list of columns; commas in names are written %2C."""
    return tuple(unquote(name.strip()) for name in text.split(",") if name.strip())


def with_named(frame: pl.DataFrame, names: Iterable[str]) -> pl.DataFrame:
    """Return the frame with the columns of named rewards and metrics added that are among `names`."""
    for column in dict.fromkeys(names):
        kind, _, name = column.partition(":")
        if kind in NAMED and name:
            # In Python, not by a JSON path: names may hold dots, quotes and brackets.
            values = [_number(parse_object(text).get(name)) for text in frame[NAMED[kind]]]
            frame = frame.with_columns(pl.Series(column, values, pl.Float64))
    return frame


def _number(value: Any) -> float | None:
    """Return a named reward's score, or a metric's number."""
    number = value.get("score") if isinstance(value, dict) else value
    with suppress(OverflowError):  # a whole number of an environment's that no float holds
        return float(number) if isinstance(number, (int, float)) else None
    return None


def choose(frame: pl.DataFrame, choice: TraceChoice) -> Chosen:
    """Return the chosen traces of a frame as `flows.queries.rollouts.traces` has it, sorted and paged.

    Traces without a value come last in both orders, and equal ones stay as they were. Raises BadQuestion for unknown
    values and for a page that is not there.
    """
    _check(frame, choice)
    listed = columns(choice.columns, frame)
    by = column(choice.sort, frame) if choice.sort else None
    if by is not None and by not in listed and not choice.columns:
        listed.insert(1, by)  # the column that a list is sorted by is seen
    frame = with_named(frame, (*(column.name for column in listed), choice.sort))
    conditions = [_condition(name, value) for name, value in choice.filters.items() if value]
    rows = sort_rows(frame.filter(*conditions), by, choice.order == DESCENDING)
    num_pages = max(-(-rows.height // choice.size), 1)
    if choice.page > num_pages:
        raise BadQuestion(f"page={choice.page}: there are {num_pages} of {choice.size} traces each")
    return Chosen(rows, rows.slice((choice.page - 1) * choice.size, choice.size), listed, num_pages)


def _condition(name: str, value: str) -> pl.Expr:
    values = pl.col(FILTERS[name])
    if name != "filter":
        return values == value
    return values.list.contains(value).fill_null(False) | pl.col("reason").eq_missing(pl.lit(value))


def sort_rows(rows: pl.DataFrame, by: RolloutColumn | None, descending: bool) -> pl.DataFrame:
    """Return rows by a column; what is null or no number last, what is equal in the order that it had."""
    if by is None:
        return rows.reverse() if descending else rows
    value = pl.col(by.name)
    if by.kind == "names":
        value = pl.when(value.list.len() > 0).then(value.list.join(", "))
    # NaN is more than every number to polars: as null it comes last in both orders.
    if rows.schema[by.name].is_float():
        value = pl.when(value.is_not_nan()).then(value)
    return rows.sort(value, descending=descending, nulls_last=True, maintain_order=True)


def known_values(frame: pl.DataFrame) -> dict[str, list[str]]:
    """Return the values that the filters can have in a frame, in order of name; outcomes in theirs."""
    values = {
        name: sorted(frame[of].drop_nulls().unique().to_list())
        for name, of in FILTERS.items()
        if name not in (*IDS, "filter")
    }
    flagged = frame["detected"].list.explode(keep_nulls=False).drop_nulls()
    outcomes = [outcome for outcome in OUTCOMES if outcome in values["outcome"]]
    return {**values, "outcome": outcomes, "filter": sorted({*flagged, *values["reason"]})}


def _check(frame: pl.DataFrame, choice: TraceChoice) -> None:
    """Refuse values that name nothing: an empty list would say that there is nothing of that kind."""
    values: dict[str, Iterable[str]] = {**known_values(frame), **{name: frame[FILTERS[name]] for name in IDS}}
    # Known kinds may be asked for where none is there: no error in a step is an answer, a typing mistake is not.
    values |= {"outcome": OUTCOMES, "error": (*ERRORS, *values["error"]), "order": (ASCENDING, DESCENDING)}
    for name, value in {**choice.filters, "order": choice.order}.items():
        if value and value not in values[name]:
            valid = "" if name in IDS else f"; there are {', '.join(dict.fromkeys(values[name])) or 'none'}"
            raise BadQuestion(f"{name}={value!r} is not known here{valid}")
    if choice.page < 1 or choice.size < 1:
        raise BadQuestion(f"page={choice.page} of {choice.size} traces: both count from 1")


def choice_of(request: PageRequest) -> TraceChoice:
    """Return what an address asks of the list of traces. Raises BadQuestion for numbers that are none."""
    return TraceChoice(
        {name: request.text(name) for name in FILTERS},
        request.text("sort"),
        request.text("order") or ASCENDING,
        request.number("page", 1, least=1),
        request.number("size", PAGE_SIZE, least=1, most=LARGEST_PAGE),
    )


def list_page(frame: pl.DataFrame, chosen: Chosen, choice: TraceChoice) -> dict[str, Any]:
    """Return the page of a list of traces: its columns, its rows, how many there are, and what can be asked for."""
    names = [column.name for column in chosen.columns]
    return {
        "columns": [vars(column) for column in chosen.columns],
        "rows": chosen.page.select(*dict.fromkeys((*ALWAYS, *names))).to_dicts(),
        "num_all": frame.height,
        "num_chosen": chosen.rows.height,
        "page": choice.page,
        "num_pages": chosen.num_pages,
        "size": choice.size,
        "asked": {**dict.fromkeys(FILTERS, ""), **choice.filters, "sort": choice.sort, "order": choice.order},
        "known": known_values(frame),
        "id_length": _id_length(frame["trace_id"]),
    }


def _id_length(ids: pl.Series) -> int:
    """Return how many characters tell the ids of these traces apart, so that a short one names a trace too."""
    return next((most for most in ID_LENGTHS if ids.str.head(most).n_unique() == len(ids)), ID_LENGTHS[-1])
