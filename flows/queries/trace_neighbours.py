"""The traces before and after one, in the order of its batch or of the list it was opened from."""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlencode

import polars as pl

from flows.queries import step as step_search
from flows.queries.request import PageRequest
from flows.queries.rollout_choice import CHOOSING, TraceChoice, choose
from flows.queries.rollouts import evaluation_traces, lineages_of, traces_of
from flows.queries.step import choice_of, with_mismatch
from flows.queries.store_reader import StoreReader
from flows.queries.trace import FoundTrace

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


def written(asked: PageRequest) -> str:
    """Return what a list of traces is asked for as one value of an address; empty where it has all as they came."""
    return urlencode({name: asked.query[name] for name in (*CHOOSING, SET) if asked.query.get(name)})


def neighbours_of_trace(library: StoreReader, found: FoundTrace, list_asked: str = "") -> TraceNeighbours:
    """Return where a trace stands among those of a list, `written` as above, or else of its batch of rollouts.

    A list that does not hold it any more counts as none. Raises BadQuestion for a list of what is not known.
    """
    known = (*CHOOSING, SET)
    chosen = {name: value for name, value in parse_qsl(list_asked) if name in known}
    if chosen:
        rows = _listed(library, found, PageRequest("", {}, chosen))
        if found.trace_id in rows["trace_id"]:
            return _around(rows, found, chosen)
    return _around(traces_of(library, found.run, [found.lineage]), found, {})


def _listed(library: StoreReader, found: FoundTrace, asked: PageRequest) -> pl.DataFrame:
    choice: TraceChoice = choice_of(asked)
    if found.lineage.for_training:
        lineages = lineages_of(library, found.run, found.step)
        frame = traces_of(library, found.run, lineages)
        frame = with_mismatch(library, found.run, lineages, frame, (choice.sort,))
    else:
        frame = evaluation_traces(library, found.run, found.step, asked.text(SET) or None)
    return choose(frame, choice, step_search.search_mask(library, found.run, frame, choice.search)).rows


def _around(rows: pl.DataFrame, found: FoundTrace, chosen: dict[str, str]) -> TraceNeighbours:
    ids = rows["trace_id"].to_list()
    place = ids.index(found.trace_id)

    def at(wanted: int) -> tuple[str, str] | None:
        if not 0 <= wanted < len(ids):
            return None
        row: tuple[Any, ...] = rows.select("trace_id", "key").row(wanted)
        return str(row[0]), str(row[1])

    return TraceNeighbours(place, len(ids), at(place - 1), at(place + 1), chosen)
