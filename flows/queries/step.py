"""A step as plain values: groups, the list of traces, text search, and engine-learner mismatch by trace."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from flows.queries import rollout_choice as step_choice
from flows.queries import rollout_columns as step_columns
from flows.queries import rollouts as groups
from flows.queries import step_figures
from flows.queries.request import BadQuestion, PageRequest
from flows.queries.rollout_choice import Chosen, TraceChoice
from flows.queries.rollout_columns import parsed
from flows.queries.step_history import StepLineage
from flows.queries.store_reader import StoreReader
from flows.queries.trace import by_sample
from storage.read.lineage import Work, row_identities

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


def choice_of(asked: PageRequest) -> TraceChoice:
    """Return what an address asks of the list of traces. Raises BadQuestion for numbers that are none."""
    texts = ("environment", "agent", "outcome", "filter", "reason", "error", "trained", "group", "example")
    given: Mapping[str, Any] = {name: asked.text(name) for name in (*texts, "search", "sort")}
    return TraceChoice(
        **given,
        order=asked.text("order", step_choice.ASCENDING) or step_choice.ASCENDING,
        page=asked.number("page", 1, least=1),
        size=asked.number("size", step_choice.PAGE_SIZE, least=1, most=step_choice.LARGEST_PAGE),
        columns=step_columns.read_names(asked.text("columns")),
    )


def listed(frame: pl.DataFrame, chosen: Chosen, choice: TraceChoice) -> dict[str, Any]:
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
    named = [step_columns.column(name, frame) for name, _ in step_columns.named_columns(frame)[:MOST_NAMED]]
    plain = [each for each in step_columns.COLUMNS if each.name in frame.columns and each.name != "trace_id"]
    search_mask = []
    for each in (*plain, *named):
        on = each.name in shown
        left = [name for name in shown if name != each.name] if on else [*shown, each.name]
        search_mask.append(
            {"name": each.name, "title": each.title, "on": on, "columns": step_columns.written_names(left)}
        )
    return search_mask


def group_page(frame: pl.DataFrame, asked: PageRequest) -> dict[str, Any]:
    """Return a page of the groups of a frame of traces, each with its rollouts side by side.

    The question: `group_sort` (one of `groups.SORTS`), `group_order` (asc, desc), `group_page`. Raises BadQuestion.
    """
    sort = asked.one_of("group_sort", groups.SORTS, "group")
    order = asked.one_of("group_order", (step_choice.ASCENDING, step_choice.DESCENDING), step_choice.ASCENDING)
    page = asked.number("group_page", 1, least=1)
    search_mask = groups.in_order(groups.of_traces(frame), sort, order == step_choice.DESCENDING)
    pages = max(-(-search_mask.height // GROUPS_PER_PAGE), 1)
    if page > pages:
        raise BadQuestion(f"group_page={page}: there are {pages} of {GROUPS_PER_PAGE} groups each")
    rows = search_mask.slice((page - 1) * GROUPS_PER_PAGE, GROUPS_PER_PAGE)
    return {
        "rows": _with_cells(rows, frame),
        "num_groups": search_mask["group_id"].n_unique(),
        "num_rows": search_mask.height,
        "num_agents": search_mask["agent"].n_unique(),
        "num_environments": search_mask["environment"].n_unique(),
        "largest": search_mask["num_traces"].max(),
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


ITSELF = ("trace_id", "group_id", "example_id", "assignment_id", "error_type", "error_message")
"""What is searched of a trace beside its messages."""
MORE = r'"(tool_calls|reasoning_content)"\s*:\s*["\[{]'
"""What the body of a message holds that says more than its content."""


def search_mask(library: StoreReader, run: str, frame: pl.DataFrame, text: str) -> pl.Series | None:
    """Return for each row of a frame of traces whether it holds a text; None where the text is empty.

    Upper and lower case are alike, in all scripts, letter by letter; nothing in the text has a meaning of its own. Only
    what the messages say, of the work that made these traces, is read, and what was found is held.
    """
    if not text:
        return None
    works = [library.graph.works[key] for key in frame["key"].unique(maintain_order=True)]
    pattern = "(?i)" + pl.escape_regex(text.encode("utf-8", "replace").decode())
    name = ("step_search", text, row_identities(works))
    saying = library.cached(name, lambda: _saying(library, run, works, pattern))
    itself = pl.any_horizontal(pl.col(each).str.contains(pattern).fill_null(False) for each in ITSELF)
    joined = frame.join(saying, on=["key", "trace_id"], how="left", maintain_order="left")
    return joined.select((itself | pl.col("says").is_not_null()).alias("found"))["found"]


def _saying(library: StoreReader, run: str, works: Sequence[Work], pattern: str) -> pl.DataFrame:
    """Return the traces of which a message holds the pattern: key, trace_id, and says, which is true."""
    rows = library.frames(run).rows(works, "messages").select("key", "trace_id", "content", "body")
    says = pl.col("content").str.contains(pattern).fill_null(False)
    # Bodies are kept of those messages alone whose content is not all that they say.
    more = pl.when(~says & pl.col("body").str.contains(MORE)).then("body")
    read = (
        rows.select("key", "trace_id", says=says, body=more)
        .filter(pl.col("says") | pl.col("body").is_not_null())
        .collect()
    )
    beside = read.filter(pl.col("body").is_not_null())
    texts = pl.Series("texts", [said_beside(body) for body in beside["body"]], pl.List(pl.String))
    saying = beside.select("key", "trace_id", texts).explode("texts").filter(pl.col("texts").str.contains(pattern))
    both = pl.concat([read.filter("says").select("key", "trace_id"), saying.select("key", "trace_id")])
    return both.unique().with_columns(says=True)


def said_beside(body: str) -> list[str]:
    """Return what a message says beside its content: its thoughts, and names and arguments of its tool calls."""
    said = parsed(body)
    calls = said.get("tool_calls")
    search_mask = [said.get("reasoning_content")]
    for call in calls if isinstance(calls, list) else ():
        inner = call.get("function", call) if isinstance(call, dict) else {}
        search_mask += [inner.get("name"), inner.get("arguments")] if isinstance(inner, dict) else []
    return [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in search_mask if each]


NAME, TITLE = "mismatch_kl", "mismatch KL"
OF_ROW = ("sample_ids", "cu_seqlens", "logprobs", "rl_weights")


def with_mismatch(
    library: StoreReader, run: str, lineages: Sequence[StepLineage], frame: pl.DataFrame, names: Collection[str]
) -> pl.DataFrame:
    """Return the traces of a step with the column `mismatch_kl`: nulls, unless it is among `names`.

    It is the mean of r - 1 - log r over the tokens of a trace with rl weight, as the learner measures it over those of
    a step (tasks.learner.loss), r being the learner's probability over the engine's. Null for what was not
    trained on, and where no policy is known to have sampled.
    """
    trained = [lineage for lineage in lineages if lineage.updates]
    if not trained or not {NAME, TITLE} & set(names):
        return frame.with_columns(pl.lit(None, pl.Float64).alias(NAME))
    known = tuple(row_identities(lineage.works) for lineage in trained)
    search_mask = library.cached(("step_mismatch", known), lambda: by_trace(library, run, trained))
    told = frame.join(search_mask, on="trace_id", how="left", maintain_order="left")
    return told.with_columns(pl.when(pl.col("policy_key") != "").then(NAME).alias(NAME))


def by_trace(library: StoreReader, run: str, lineages: Sequence[StepLineage]) -> pl.DataFrame:
    """Return `trace_id` and `mismatch_kl` of what was trained on with rl weight; see `with_mismatch`."""
    frames = library.frames(run)
    rows = frames.rows(_once(lineage.batches for lineage in lineages), "batches").select(OF_ROW).collect()
    measured = frames.rows(_once(lineage.updates for lineage in lineages), "token_statistics")
    learner = measured.select("sample_id", learner="logprobs").collect()
    named = (
        frames.rows(_once(lineage.samples for lineage in lineages), "samples").select("sample_id", "trace_id").collect()
    )
    own = by_sample(rows, ("logprobs", "rl_weights"))
    flat = own.join(learner, on="sample_id").join(named.unique("sample_id"), on="sample_id")
    flat = flat.explode("logprobs", "rl_weights", "learner").filter(pl.col("rl_weights") != 0)
    apart = flat["learner"].cast(pl.Float64).to_numpy() - flat["logprobs"].cast(pl.Float64).to_numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.expm1(apart) - apart  # numpy, as polars has no exact expm1
    return flat.select("trace_id", pl.Series(NAME, values)).group_by("trace_id").agg(pl.col(NAME).mean())


def _once(works: Iterable[Work | None]) -> list[Work]:
    return list({work.key: work for work in works if work is not None}.values())
