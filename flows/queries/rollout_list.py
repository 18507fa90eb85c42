"""A list of rollouts, the same for a page and a terminal: columns, filters, order, pages, and the way through it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

import polars as pl

from flows.queries.request import BadQuestion, PageRequest, parse_object
from flows.queries.rollouts import evaluation_traces, lineages_of, search_mask, traces_of, with_mismatch
from flows.queries.store_reader import StoreReader
from flows.queries.trace import FoundTrace
from flows.queries.views import EXPIRED
from tasks.arrays.finding import QUARANTINED
from tasks.metrics.accounting import ERRORED, EVALUATED, FILTERED, NO_WEIGHT, PENDING, REFUSED, STALE, STOPPED, TRAINED

REWARD, METRIC = "reward:", "metric:"
"""What the columns of named rewards and metrics begin with."""


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


COLUMNS = (
    RolloutColumn("trace_id", "trace", "text", "the trace"),
    RolloutColumn("reward", "reward", "number", "total reward; none where scoring did not run"),
    RolloutColumn("group_id", "group", "text", "rollouts of one example that are compared with each other"),
    RolloutColumn("example_id", "example", "text", "the example tried"),
    RolloutColumn("environment", "environment", "text", "the environment"),
    RolloutColumn("agent", "agent", "text", "the agent's seat in the environment"),
    RolloutColumn("advantage", "advantage", "signed", "reward minus baseline, as the algorithm has it"),
    RolloutColumn("outcome", "outcome", "text", "trained, filtered, errored, ..."),
    RolloutColumn("detail", "by", "text", "the filter or the class of error that decided its outcome"),
    RolloutColumn("detected", "found by", "names", "filters that found something, also those that only report"),
    RolloutColumn("error_type", "error", "text", "the type of the exception"),
    RolloutColumn("stop_condition", "stopped by", "text", "what ended the rollout"),
    RolloutColumn("num_turns", "turns", "whole", "sampled messages"),
    RolloutColumn("num_input_tokens", "tokens in", "whole", "tokens fed in, each once"),
    RolloutColumn("num_output_tokens", "tokens out", "whole", "tokens sampled"),
    RolloutColumn("is_truncated", "truncated", "flag", "ended by a limit on tokens or turns"),
    RolloutColumn("policy_version", "policy", "whole", "the version of the policy that sampled it"),
    RolloutColumn("staleness", "stale by", "whole", "the step minus that version"),
    RolloutColumn("setup_seconds", "set-up", "seconds", "wall-clock of set-up"),
    RolloutColumn("generation_seconds", "generation", "seconds", "wall-clock of the agent, model calls included"),
    RolloutColumn("scoring_seconds", "scoring", "seconds", "wall-clock of scoring"),
    RolloutColumn("num_branches", "branches", "whole", "root-to-leaf paths of its messages"),
    RolloutColumn("step", "step", "whole", "the step; of an evaluation the policy's version", False),
    RolloutColumn("place", "place", "whole", "its place in the order in which rollouts were handed over", False),
    RolloutColumn("baseline", "baseline", "number", "what was subtracted from the reward", False),
    RolloutColumn("mismatch_kl", "mismatch KL", "number", "of the learner against the engine, its tokens' mean", False),
    RolloutColumn("reason", "left out by", "text", "the filter that decided against it", False),
    RolloutColumn("error_class", "error class", "text", "whose fault the error was", False),
    RolloutColumn("error_message", "error text", "text", "the text of the exception", False),
    RolloutColumn("trained", "trained", "flag", "whether a policy was trained on it", False),
    RolloutColumn("trainable", "trainable", "flag", "whether its tokens are the policy's", False),
    RolloutColumn("num_samples", "samples", "whole", "training samples made of it", False),
    RolloutColumn("num_tokens", "tokens", "whole", "tokens fed in and sampled", False),
    RolloutColumn("model_seconds", "model", "seconds", "wall-clock of model calls alone", False),
    RolloutColumn("seconds", "seconds", "seconds", "wall-clock of set-up, generation and scoring", False),
    RolloutColumn("temperature", "temperature", "number", "sampling temperature", False),
    RolloutColumn("policy_key", "policy key", "text", "the policy that sampled it", False),
    RolloutColumn("started_at", "started", "moment", "when it began", False),
    RolloutColumn("assignment_id", "assignment", "text", "the assignment that it answers", False),
    RolloutColumn("episode_id", "episode", "text", "the environment run that made it", False),
    RolloutColumn("set", "set", "text", "the set of held-out examples", False),
    RolloutColumn("round", "round", "whole", "the round of the evaluation; later ones try again what failed", False),
    RolloutColumn("replaced", "made again", "flag", "whether a later round made it again", False),
)
"""In the order in which they are shown."""
LEFT = ("text", "names")
"""The kinds whose values stand at the left."""


def column(name: str, frame: pl.DataFrame) -> RolloutColumn:
    """Return a column of a list of traces by its name or heading: one of COLUMNS, `reward:NAME` or `metric:NAME`.

    Raises BadQuestion, which names those that there are.
    """
    for each in COLUMNS:
        if name in (each.name, each.title) and each.name in frame.columns:
            return each
    for start, table in ((REWARD, "rewards"), (METRIC, "metrics")):
        if name.startswith(start) and name != start:
            return RolloutColumn(name, name.removeprefix(start), "number", f"of the {table} that have names", False)
    known = ", ".join(each.name for each in COLUMNS if each.name in frame.columns)
    raise BadQuestion(f"there is no column {name!r}; there are {known}, and {REWARD}NAME and {METRIC}NAME")


def columns(names: Sequence[str], frame: pl.DataFrame) -> list[RolloutColumn]:
    """Return the columns of some names, each once and the trace's first.

    Without names, the usual ones, but for those in which no trace has a value, as of errors, where there was none, and
    for that of the agents where there is one alone.
    """
    if not names:
        usual = [each for each in COLUMNS if each.usual and _says_anything(frame[each.name])]
        return [each for each in usual if each.name != "agent" or frame["agent"].n_unique() > 1]
    return [column(name, frame) for name in dict.fromkeys(("trace_id", *names))]


def _says_anything(values: pl.Series) -> bool:
    there = values.drop_nulls()
    if there.dtype == pl.List:
        return bool((there.list.len() > 0).any())
    return bool((there != "").any()) if there.dtype == pl.String else not there.is_empty()


def read_names(text: str) -> tuple[str, ...]:
    """Return the names of a list of columns; commas in names are written %2C."""
    return tuple(unquote(each.strip()) for each in text.split(",") if each.strip())


def written_names(names: Iterable[str]) -> str:
    """Return names of columns as `read_names` reads them."""
    return ",".join(quote(name, safe=":_-./()[]") for name in names)


def named_columns(frame: pl.DataFrame) -> list[tuple[str, int]]:
    """Return the columns of named rewards and metrics with how many traces have each, the most frequent first."""
    found: Counter[str] = Counter()
    for start, table in ((REWARD, "rewards"), (METRIC, "metrics")):
        # Rollouts of one environment say the same names again and again: each text is parsed once.
        for text, times in frame[table].value_counts().iter_rows():
            # What has no name cannot be asked for.
            found.update({start + name: times for name in parse_object(text) if name})
    return sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))


def with_named(frame: pl.DataFrame, names: Iterable[str]) -> pl.DataFrame:
    """Return the frame with the columns of named rewards and metrics added that are among `names`."""
    asked = dict.fromkeys(name for name in names if name.startswith((REWARD, METRIC)))
    for name in asked:
        start, table = (REWARD, "rewards") if name.startswith(REWARD) else (METRIC, "metrics")
        # In Python, not by a JSON path: names may hold dots, quotes and brackets.
        values = [_number(parse_object(text).get(name.removeprefix(start))) for text in frame[table]]
        frame = frame.with_columns(pl.Series(name, values, pl.Float64))
    return frame


def _number(value: Any) -> float | None:
    """Return a named reward's score, or a metric's number."""
    said = value.get("score") if isinstance(value, dict) else value
    with suppress(OverflowError):  # a whole number of an environment's that no float holds
        return float(said) if isinstance(said, (int, float)) else None
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
    frame = with_named(frame, (*(each.name for each in shown), choice.sort))
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
    values = {name: _texts(frame[of]) for name, of in EXACT.items() if name != "outcome"}
    there = set(_texts(frame["outcome"]))
    found = set(_texts(frame["detected"].list.explode(keep_nulls=False))) | set(values["reason"])
    return {**values, "outcome": [each for each in OUTCOMES if each in there], "filter": sorted(found)}


def _texts(values: pl.Series) -> list[str]:
    return sorted(values.drop_nulls().unique().to_list())


def _conditions(choice: TraceChoice) -> Iterable[pl.Expr]:
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
        # Known kinds may be asked for where none is there: no error in a step is an answer, a typing mistake is not.
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
ID_LENGTHS = (8, 12, 16, 24, 32)
MOST_NAMED = 40
"""Named rewards and metrics that are offered as columns; others can be asked for by name."""
ALWAYS = ("trace_id", "key", "group_id", "example_id", "environment", "agent", "outcome", "detail", "error_class")
"""Columns that every row of a list has, whichever others were chosen."""


def choice_of(request: PageRequest) -> TraceChoice:
    """Return what an address asks of the list of traces. Raises BadQuestion for numbers that are none."""
    texts = ("environment", "agent", "outcome", "filter", "reason", "error", "trained", "group", "example")
    given: Mapping[str, Any] = {name: request.text(name) for name in (*texts, "search", "sort")}
    return TraceChoice(
        **given,
        order=request.text("order", ASCENDING) or ASCENDING,
        page=request.number("page", 1, least=1),
        size=request.number("size", PAGE_SIZE, least=1, most=LARGEST_PAGE),
        columns=read_names(request.text("columns")),
    )


def list_page(frame: pl.DataFrame, chosen: Chosen, choice: TraceChoice) -> dict[str, Any]:
    """Return the page of a list of traces: its columns, its rows, how many there are, and what can be asked for.

    `same` are those of the usual columns that say the same of all chosen traces, with the `value`.
    """
    names = [each.name for each in chosen.columns]
    same = [] if choice.columns else [each for each in chosen.columns if _same_in_all(chosen.rows, each, choice)]
    rows = chosen.page.select(*dict.fromkeys((*ALWAYS, *names))).to_dicts()
    return {
        "columns": [vars(each) for each in chosen.columns],
        "same": [vars(each) | {"value": rows[0][each.name]} for each in same],
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


def _same_in_all(rows: pl.DataFrame, each: RolloutColumn, choice: TraceChoice) -> bool:
    """Say whether a column says the same of several traces, and is not what they are sorted by."""
    asked = each.name in ("trace_id", choice.sort) or each.title == choice.sort or each.kind == "names"
    return rows.height > 1 and not asked and rows[each.name].n_unique() == 1


def _id_length(ids: pl.Series) -> int:
    """Return how many characters tell the ids of these traces apart, so that a short one names a trace too."""
    return next((most for most in ID_LENGTHS if ids.str.head(most).n_unique() == len(ids)), ID_LENGTHS[-1])


def offered_columns(frame: pl.DataFrame, shown: list[str]) -> list[dict[str, Any]]:
    """Return the columns that can be shown, each with the list of columns that choosing, or leaving it out, gives."""
    named = [column(name, frame) for name, _ in named_columns(frame)[:MOST_NAMED]]
    plain = [each for each in COLUMNS if each.name in frame.columns and each.name != "trace_id"]
    found = []
    for each in (*plain, *named):
        on = each.name in shown
        left = [name for name in shown if name != each.name] if on else [*shown, each.name]
        found.append({"name": each.name, "title": each.title, "on": on, "columns": written_names(left)})
    return found


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
    known = (*CHOOSING, SET)
    chosen = {name: value for name, value in parse_qsl(list_asked) if name in known}
    if chosen:
        rows = _list_rows(reader, trace, PageRequest("", {}, chosen))
        # The list may have changed since the link was made: a run that goes on decides outcomes.
        if trace.trace_id in rows["trace_id"]:
            return _around(rows, trace, chosen)
    return _around(traces_of(reader, trace.run, [trace.lineage]), trace, {})


def _list_rows(reader: StoreReader, trace: FoundTrace, request: PageRequest) -> pl.DataFrame:
    choice: TraceChoice = choice_of(request)
    if trace.lineage.for_training:
        lineages = lineages_of(reader, trace.run, trace.step)
        frame = traces_of(reader, trace.run, lineages)
        frame = with_mismatch(reader, trace.run, lineages, frame, (choice.sort,))
    else:
        frame = evaluation_traces(reader, trace.run, trace.step, request.text(SET) or None)
    return choose(frame, choice, search_mask(reader, trace.run, frame, choice.search)).rows


def _around(rows: pl.DataFrame, trace: FoundTrace, chosen: dict[str, str]) -> TraceNeighbours:
    ids = rows["trace_id"].to_list()
    place = ids.index(trace.trace_id)

    def at(wanted: int) -> tuple[str, str] | None:
        if not 0 <= wanted < len(ids):
            return None
        row: tuple[Any, ...] = rows.select("trace_id", "key").row(wanted)
        return str(row[0]), str(row[1])

    return TraceNeighbours(place, len(ids), at(place - 1), at(place + 1), chosen)
