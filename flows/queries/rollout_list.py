"""A list of rollouts, the same for a page and a terminal: columns, filters, order and pages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from flows.queries.request import BadQuestion, PageRequest


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
DERIVED = frozenset(("mismatch_kl",))
"""Columns that are read only where they are asked for: they take the tokens of all traces."""
LEFT = ("text", "names")
"""The kinds whose values stand at the left."""
PAGE_SIZE, LARGEST_PAGE = 50, 500
DESCENDING, ASCENDING = "desc", "asc"
FILTERS = {
    **{"environment": "environment", "agent": "agent", "outcome": "outcome", "error": "error_class"},
    **{"filter": "detected", "group": "group_id", "example": "example_id"},
}
"""Filters of a page by the column whose value they name; of `filter` one of the values, or the reason."""
LISTED = ("environment", "agent", "outcome", "error")
"""Filters whose values are listed as they are."""
ALWAYS = ("trace_id", "key", "group_id", "example_id", "environment", "agent", "outcome", "detail", "error_class")
"""Columns that every row of a list has, whichever others were chosen."""


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


def column(name: str, frame: pl.DataFrame) -> RolloutColumn:
    """Return a column of a list of traces by its name or heading. Raises BadQuestion, which names all columns."""
    stored = [column for column in COLUMNS if column.name in frame.columns]
    for column in stored:
        if name in (column.name, column.title):
            return column
    names = ", ".join(column.name for column in stored)
    raise BadQuestion(f"there is no column {name!r}; there are {names}")


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


def choose(frame: pl.DataFrame, choice: TraceChoice) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Return the chosen traces of a frame as `flows.queries.rollouts.traces_of` has it, in order, and a page of them.

    Traces without a value come last in both orders, and equal ones stay as they were. The page has its columns, its
    rows, how many there are, and the values that can be chosen. Raises BadQuestion for an unknown column.
    """
    listed = columns(choice.columns, frame)
    by = column(choice.sort, frame) if choice.sort else None
    if by is not None and by not in listed and not choice.columns:
        listed.insert(1, by)  # the column that a list is sorted by is seen
    conditions = [_condition(name, value) for name, value in choice.filters.items() if value]
    rows = sort_rows(frame.filter(*conditions), by, choice.order == DESCENDING)
    num_pages = max(-(-rows.height // choice.size), 1)
    # An address may be older than the choice of rows: it opens the end, not an error.
    page = min(choice.page, num_pages)
    shown = rows.slice((page - 1) * choice.size, choice.size)
    return rows, {
        "columns": [vars(column) for column in listed],
        "rows": shown.select(*dict.fromkeys((*ALWAYS, *(column.name for column in listed)))).to_dicts(),
        "num_all": frame.height,
        "num_chosen": rows.height,
        "page": page,
        "num_pages": num_pages,
        "size": choice.size,
        "known": known_values(frame),
    }


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
    """Return the values that the filters can have in a frame, but for groups and examples, in order of name."""
    values = {name: sorted(frame[FILTERS[name]].drop_nulls().unique().to_list()) for name in LISTED}
    flagged = frame["detected"].list.explode(keep_nulls=False).drop_nulls()
    return {**values, "filter": sorted({*flagged, *frame["reason"].drop_nulls()})}


def choice_of(request: PageRequest) -> TraceChoice:
    """Return what an address asks of the list of traces. Raises BadQuestion for numbers that are none."""
    return TraceChoice(
        {name: request.text(name) for name in FILTERS},
        request.text("sort"),
        request.one_of("order", (ASCENDING, DESCENDING), ASCENDING),
        request.number("page", 1, least=1),
        request.number("size", PAGE_SIZE, least=1, most=LARGEST_PAGE),
    )
