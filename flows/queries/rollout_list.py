"""A list of rollouts, the same for a page and a terminal: columns, filters, order, pages, and the way through it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

import polars as pl

from flows.queries.request import BadQuestion, PageRequest, parse_object
from flows.queries.rollout_search import search_mask
from flows.queries.rollouts import evaluation_traces, lineages_of, traces_of, with_mismatch
from flows.queries.store_reader import StoreReader
from flows.queries.trace import FoundTrace
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


def written_names(names: Iterable[str]) -> str:
    """Return names of columns as `read_names` reads them."""
    return ",".join(quote(name, safe=":_-./()[]") for name in names)


def named_columns(frame: pl.DataFrame) -> list[tuple[str, int]]:
    """Return the columns of named rewards and metrics with how many traces have each, the most frequent first."""
    counts: Counter[str] = Counter()
    for kind, values in NAMED.items():
        # Rollouts of one environment say the same names again and again: each text is parsed once.
        for text, times in frame[values].value_counts().iter_rows():
            # What has no name cannot be asked for.
            counts.update({f"{kind}:{name}": times for name in parse_object(text) if name})
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


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


OUTCOMES = (TRAINED, FILTERED, ERRORED, STOPPED, STALE, QUARANTINED, NO_WEIGHT, REFUSED, PENDING, EVALUATED, EXPIRED)
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
    """Return the traces of a frame as `flows.queries.rollouts.traces` has it that a choice asks for, sorted and paged.

    `found` says of each row whether it holds the text that is looked for; see `search_mask`. What has no value
    comes last in both orders, and what is equal stays as it was. Raises BadQuestion for values that are not known and
    for a page that is not there.
    """
    _check(frame, choice)
    shown = columns(choice.columns, frame)
    by = column(choice.sort, frame) if choice.sort else None
    if by is not None and by not in shown and not choice.columns:
        shown.insert(1, by)  # beside the trace's id: what a list is sorted by is seen
    frame = with_named(frame, (*(column.name for column in shown), choice.sort))
    kept = frame if found is None else frame.filter(found)
    rows = sort_rows(kept.filter(*_conditions(choice)), by, choice.order == DESCENDING)
    num_pages = max(-(-rows.height // choice.size), 1)
    if choice.page > num_pages:
        raise BadQuestion(f"page={choice.page}: there are {num_pages} of {choice.size} traces each")
    page = rows.slice((choice.page - 1) * choice.size, choice.size)
    return Chosen(rows, page, shown, num_pages, frame.height, None if found is None else int(found.sum()))


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
    values = {name: sorted(frame[of].drop_nulls().unique().to_list()) for name, of in EXACT.items()}
    found = frame["detected"].list.explode(keep_nulls=False).drop_nulls()
    outcomes = [outcome for outcome in OUTCOMES if outcome in values["outcome"]]
    return {**values, "outcome": outcomes, "filter": sorted({*found, *values["reason"]})}


def _conditions(choice: TraceChoice) -> Iterable[pl.Expr]:
    for name, of in (EXACT | IDS).items():
        if value := getattr(choice, name):
            yield pl.col(of) == value
    if choice.filter:
        detected = pl.col("detected").list.contains(choice.filter).fill_null(False)
        yield detected | pl.col("reason").eq_missing(pl.lit(choice.filter))
    if choice.trained:
        yield pl.col("trained") == (choice.trained == YES)


def _check(frame: pl.DataFrame, choice: TraceChoice) -> None:
    """Refuse values that name nothing: an empty list would say that there is nothing of that kind."""
    always = {"outcome": OUTCOMES, "error": ERRORS, "trained": (YES, NO), "order": (ASCENDING, DESCENDING)}
    values = known_values(frame)
    for name in dict.fromkeys((*values, *always)):
        # Known kinds may be asked for where none is there: no error in a step is an answer, a typing mistake is not.
        valid = dict.fromkeys((*always.get(name, ()), *values.get(name, ())))
        if (value := getattr(choice, name)) and value not in valid:
            raise BadQuestion(f"{name}={value!r} is not known here; there are {', '.join(valid) or 'none'}")
    for name, of in IDS.items():
        if (value := getattr(choice, name)) and value not in frame[of]:
            raise BadQuestion(f"{name}={value!r} is not among these traces")
    if choice.page < 1 or choice.size < 1:
        raise BadQuestion(f"page={choice.page} of {choice.size} traces: both count from 1")
    if len(choice.search) > LONGEST_SEARCH:
        raise BadQuestion(f"search: at most {LONGEST_SEARCH} characters, not {len(choice.search)}")


NAMES = tuple(field.name for field in fields(TraceChoice))
"""What an address may say after the question mark about a list of traces."""
CHOOSING = tuple(name for name in NAMES if name not in ("page", "size", "columns"))
"""What of it says which traces a list has, and in which order."""
ID_LENGTHS = (8, 12, 16, 24, 32)
MOST_NAMED = 40
"""Named rewards and metrics that are offered as columns; others can be asked for by name."""
ALWAYS = ("trace_id", "key", "group_id", "example_id", "environment", "agent", "outcome", "detail", "error_class")
"""Columns that every row of a list has, whichever others were chosen."""


def choice_of(request: PageRequest) -> TraceChoice:
    """Return what an address asks of the list of traces. Raises BadQuestion for numbers that are none."""
    texts = {name: request.text(name) for name in CHOOSING if name != "order"}
    return TraceChoice(
        **texts,
        order=request.text("order") or ASCENDING,
        page=request.number("page", 1, least=1),
        size=request.number("size", PAGE_SIZE, least=1, most=LARGEST_PAGE),
        columns=read_names(request.text("columns")),
    )


def list_page(frame: pl.DataFrame, chosen: Chosen, choice: TraceChoice) -> dict[str, Any]:
    """Return the page of a list of traces: its columns, its rows, how many there are, and what can be asked for.

    `same` are those of the usual columns that say the same of all chosen traces, with the `value`.
    """
    names = [column.name for column in chosen.columns]
    same = [] if choice.columns else [column for column in chosen.columns if _same_in_all(chosen.rows, column, choice)]
    rows = chosen.page.select(*dict.fromkeys((*ALWAYS, *names))).to_dicts()
    return {
        "columns": [vars(column) for column in chosen.columns],
        "same": [vars(column) | {"value": rows[0][column.name]} for column in same],
        "rows": rows,
        "num_all": chosen.num_all,
        "num_found": chosen.num_found,
        "num_chosen": chosen.rows.height,
        "page": choice.page,
        "num_pages": chosen.num_pages,
        "size": choice.size,
        "asked": {name: value for name, value in vars(choice).items() if name != "columns"},
        "known": known_values(frame),
        "offered": offered_columns(frame, names),
        "id_length": _id_length(frame["trace_id"]),
    }


def _same_in_all(rows: pl.DataFrame, column: RolloutColumn, choice: TraceChoice) -> bool:
    """Say whether a column says the same of several traces, and is not what they are sorted by."""
    by = column.name in ("trace_id", choice.sort) or column.title == choice.sort or column.kind == "names"
    return rows.height > 1 and not by and rows[column.name].n_unique() == 1


def _id_length(ids: pl.Series) -> int:
    """Return how many characters tell the ids of these traces apart, so that a short one names a trace too."""
    return next((most for most in ID_LENGTHS if ids.str.head(most).n_unique() == len(ids)), ID_LENGTHS[-1])


def offered_columns(frame: pl.DataFrame, shown: list[str]) -> list[dict[str, Any]]:
    """Return the columns that can be shown, each with the list of columns that choosing, or leaving it out, gives."""
    named = [column(name, frame) for name, _ in named_columns(frame)[:MOST_NAMED]]
    stored = [offer for offer in COLUMNS if offer.name in frame.columns and offer.name != "trace_id"]
    return [
        {
            "name": offer.name,
            "title": offer.title,
            "on": offer.name in shown,
            # With the column where it is not shown, without it where it is.
            "columns": written_names(
                name for name in (*shown, offer.name) if (name != offer.name) or (offer.name not in shown)
            ),
        }
        for offer in (*stored, *named)
    ]


SET = "set"
"""What an evaluation is asked for beside: one set of examples."""


@dataclass(frozen=True)
class TraceNeighbours:
    """The traces around one; each is a trace's id and the key of the work that made it."""

    place: int
    """Its own number; 0-based."""
    num_traces: int
    previous: tuple[str, str] | None
    next: tuple[str, str] | None
    chosen: dict[str, str] = field(default_factory=dict)
    """What the list was asked for; empty where they are all traces of its batch of rollouts."""


def list_parameter(request: PageRequest) -> str:
    """Return what a list of traces is asked for as one value of an address; empty where it has all as they came."""
    return urlencode({name: request.query[name] for name in (*CHOOSING, SET) if request.query.get(name)})


def neighbours_of_trace(reader: StoreReader, trace: FoundTrace, list_asked: str = "") -> TraceNeighbours:
    """Return where a trace stands among those of a list, `written` as above, or else of its batch of rollouts.

    A list that does not hold it any more counts as none. Raises BadQuestion for a list of what is not known.
    """
    chosen = {name: value for name, value in parse_qsl(list_asked) if name in (*CHOOSING, SET)}
    rows = _list_rows(reader, trace, PageRequest("", {}, chosen)) if chosen else None
    # The list may have changed since the link was made: a run that goes on decides outcomes.
    if rows is None or trace.trace_id not in rows["trace_id"]:
        chosen, rows = {}, traces_of(reader, trace.run, [trace.lineage])
    ids = list(rows.select("trace_id", "key").iter_rows())
    place = rows["trace_id"].to_list().index(trace.trace_id)
    return TraceNeighbours(
        place, len(ids), ids[place - 1] if place else None, ids[place + 1] if place + 1 < len(ids) else None, chosen
    )


def _list_rows(reader: StoreReader, trace: FoundTrace, request: PageRequest) -> pl.DataFrame:
    choice, for_training = choice_of(request), trace.lineage.for_training
    frame = listed_traces(reader, trace.run, trace.step, choice, for_training, request.text(SET) or None)
    return choose(frame, choice, search_mask(reader, trace.run, frame, choice.search)).rows


def listed_traces(
    reader: StoreReader,
    run: str,
    step: int,
    choice: TraceChoice,
    for_training: bool = True,
    set_name: str | None = None,
) -> pl.DataFrame:
    """Return the traces of a step, or of the evaluation of a policy version, with the columns of a choice.

    Raises NotThere.
    """
    if not for_training:
        return evaluation_traces(reader, run, step, set_name)
    lineages = lineages_of(reader, run, step)
    return with_mismatch(reader, run, lineages, traces_of(reader, run, lineages), (*choice.columns, choice.sort))
