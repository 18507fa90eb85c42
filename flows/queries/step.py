"""A step as plain values: what its rollouts earned, their outcomes, what the update measured, and its groups."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from flows.queries.metrics import written_metrics
from flows.queries.request import BadQuestion, PageRequest
from flows.queries.rollout_list import ASCENDING, DESCENDING
from flows.queries.rollouts import traces
from flows.queries.row_lineage import policy_names, policy_version
from flows.queries.step_history import StepLineage
from flows.queries.store_reader import StoreReader
from flows.queries.views import select_from
from storage.read.lineage import Work, row_identities
from tasks.metrics.accounting import GIVEN_UP
from tasks.metrics.figures import ALL, Values

BINS = 20
MEASURED = (
    *("update", "loss", "rl_loss", "ce_loss", "ref_kl_loss", "grad_norm", "entropy", "mismatch_kl", "mismatch_kl_max"),
    *("masked_fraction", "learning_rate", "num_rows", "num_tokens", "rl_tokens", "ce_tokens", "ref_kl_tokens"),
)
"""Columns of an optimizer step that are returned; as in `storage.schemas.stage_tables.UPDATES`."""


WRITTEN_REWARDS = {"mean": "reward/mean", "spread": "reward/std", "min": "reward/min", "max": "reward/max"}
WRITTEN_MEANS = {
    "num_input_tokens": "num_input_tokens",
    "num_output_tokens": "num_output_tokens",
    "num_turns": "num_turns",
    "truncated": "is_truncated",
    "staleness_mean": "staleness",
}
"""Figures of a step that stand in table `metrics`, by the names that they have there."""
COUNTS = ("num_traces", "num_groups", "num_examples", "num_judged", "tokens")
MEANS = (*WRITTEN_MEANS, "staleness_max", "seconds")
REWARDS = ("num_scored", "mean", "spread", "min", "max")


def written_of(reader: StoreReader, run: str, found: Sequence[StepLineage]) -> Values:
    """Return the metrics that a step has written of the rollouts of these lineages, and of no others; else nothing.

    Nothing is written of a step that goes on, of an evaluation, or of groups that were replaced.
    """
    keys = {lineage.traces.key for lineage in found}
    steps = [each for each in reader.history(run).sampled_steps if {work.key for work in each.traces} == keys]
    return written_metrics(reader, steps)[0] if steps else {}


def figures(frame: pl.DataFrame, written: Values | None = None) -> dict[str, Any]:
    """Return what the traces of a step, or of an evaluation, say together, as plain values.

    Rewards are over those that were scored and not stopped; lengths over all that were not stopped, as in
    `tasks.metrics.rollouts`. What nothing was measured of is None. Values that the step has `written` are
    returned as they were written: rows may have been dropped for their age since.
    """
    written = written or {}
    # The views are of a step each; these rollouts may be of several.
    one = {"run": "", "step": 0, "for_training": True}
    frame = frame.with_columns(pl.lit(value, dtype=frame.schema[name]).alias(name) for name, value in one.items())
    summary = select_from(frame, "select * exclude (run, step, for_training) from step_rollouts").to_dicts()
    (values,) = summary or [dict.fromkeys((*COUNTS, "num_kept", "num_trained", *MEANS)) | dict.fromkeys(COUNTS, 0)]
    rewards = select_from(frame, "select * exclude (run, step, for_training) from step_rewards order by all").to_dicts()
    whole = [row for row in rewards if row["environment"] is None] or [dict.fromkeys(REWARDS) | {"num_scored": 0}]
    return {
        **{name: value for name, value in values.items() if name not in MEANS},
        "reward": {name: whole[0][name] for name in REWARDS} | _in_place(written, ALL, WRITTEN_REWARDS),
        "environments": _environments(rewards, written),
        "means": {name: values[name] for name in MEANS} | _in_place(written, ALL, WRITTEN_MEANS),
        "outcomes": _counts(frame, "outcome", "detail"),
        "errors": _counts(frame.filter(~pl.col("outcome").is_in(GIVEN_UP)), "error_class"),
        "filters": select_from(
            frame, "select filter, num_found, num_decided from filter_hits order by filter"
        ).to_dicts(),
    }


def _in_place(written: Values, scope: str, names: Mapping[str, str]) -> dict[str, float]:
    """Return the figures of a scope that were written, by the names that they are shown by."""
    return {name: written[scope, measure] for name, measure in names.items() if (scope, measure) in written}


def _environments(rewards: Sequence[Mapping[str, Any]], written: Values) -> list[dict[str, Any]]:
    """Return the rewards by environment and, where several agents play, by agent: one wins what another loses."""
    environments = []
    for row in rewards:
        if row["environment"] is not None and row["agent"] is None:
            agents = [each for each in rewards if each["environment"] == row["environment"] and each["agent"]]
            by_agent = [{name: agent[name] for name in ("agent", *REWARDS)} for agent in agents]
            own = {name: row[name] for name in ("environment", "num_traces", *REWARDS)}
            own |= _in_place(written, row["environment"], WRITTEN_REWARDS)
            environments.append({**own, "agents": by_agent if len(by_agent) > 1 else []})
    return environments


def _counts(frame: pl.DataFrame, *columns: str) -> list[dict[str, Any]]:
    counted = frame.filter(pl.col(columns[0]).is_not_null()).group_by(columns).agg(num_traces=pl.len())
    return counted.sort("num_traces", *columns, descending=[True, *(False for _ in columns)]).to_dicts()


def histogram(frame: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the rewards of each environment in BINS equal bins from `low` to `high`, as view `reward_histogram`."""
    rows = select_from(frame, "select environment, low, high, bin, num_traces from reward_histogram order by all")
    return [
        {"environment": name, "low": low, "high": high, "counts": [counts.get(bin, 0) for bin in range(BINS)]}
        for (name, low, high), own in rows.group_by("environment", "low", "high", maintain_order=True)
        for counts in [dict(own.select("bin", "num_traces").iter_rows())]
    ]


def updates(reader: StoreReader, run: str, found: Sequence[StepLineage]) -> list[dict[str, Any]]:
    """Return what the optimizer steps measured that trained some lineages; MEASURED of each, in order."""
    works = list({lineage.updates.key: lineage.updates for lineage in found if lineage.updates}.values())
    if not works:
        return []
    rows = reader.frames(run).rows(works, "updates").select("key", *MEASURED)
    name = ("step_updates", row_identities(works))
    return reader.cache.once(name, lambda: rows.sort("key", "update").drop("key").collect().to_dicts())


def policies(reader: StoreReader, run: str, frame: pl.DataFrame, found: Sequence[StepLineage]) -> dict[str, Any]:
    """Return the policies that sampled a step, and the one that it made (None where it is not trained)."""
    sampled = frame.select("policy_key", "policy_version").unique().sort("policy_version", "policy_key").to_dicts()
    made = next((lineage.updates for lineage in found if lineage.updates), None)
    return {
        "before": [_policy(reader, run, each["policy_key"], each["policy_version"]) for each in sampled],
        "after": made and _policy(reader, run, made.key, policy_version(made)),
    }


def _policy(reader: StoreReader, run: str, key: str, version: int) -> dict[str, Any]:
    """Return a policy with its name RUN:VERSION, of this run where it has it; None for one that the store lacks."""
    work: Work | None = reader.graph.works.get(key)
    names = policy_names(work) if work else []
    # Runs that share work have a name each for one policy: who looks at this run wants its own.
    own = [name for name in names if name.rpartition(":")[0] == run]
    return {"key": key, "version": version, "name": next(iter((*own, *names)), None)}


SORTS = ("group", "example", "environment", "mean", "spread", "baseline", "size", "kept")
"""What groups can be sorted by; `group` is the order of their ids, numbers in them by value."""
_BY = {"example": "example_id", "mean": "reward_mean", "spread": "reward_spread", "size": "num_traces"}
_DIGITS = re.compile(r"(\d+)")


def groups(reader: StoreReader, run: str, step: int) -> pl.DataFrame:
    """Return one row for each group of a step and each agent in it, as view `groups` has it. Raises NotThere."""
    return of_traces(traces(reader, run, step))


def of_traces(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the groups of a frame of traces in order of their ids, numbers in them by value; see `groups`."""
    rows = select_from(frame, "select * exclude (run, step) from groups")
    order = sorted(range(rows.height), key=lambda place: (natural(rows["group_id"][place]), rows["agent"][place]))
    return rows[order]


def in_order(rows: pl.DataFrame, sort: str, descending: bool) -> pl.DataFrame:
    """Return groups by one of SORTS; what has no value comes last, what is equal in the order that it had."""
    if sort == "group":
        return rows.reverse() if descending else rows
    by = {"kept": "num_kept"}.get(sort, _BY.get(sort, sort))
    return rows.sort(by, descending=descending, nulls_last=True, maintain_order=True)


def natural(text: str) -> list[tuple[int, int, str]]:
    """Return a key by which texts sort as people count: 3-10 after 3-2."""
    parts = _DIGITS.split(text)
    # Ids are texts that others wrote: int() of very many digits would take long, and 18 tell enough apart.
    return [(1, int(part[:18]), part) if at % 2 else (0, 0, part) for at, part in enumerate(parts)]


GROUPS_PER_PAGE = 24
MOST_CELLS = 64
"""Rollouts of one group that are drawn; the list below has all of them."""
LEVELS = 10
"""The highest level of colour of a reward; the lowest is 0."""
CELL = ("trace_id", "key", "reward", "advantage", "outcome", "detail")


def group_page(frame: pl.DataFrame, request: PageRequest) -> dict[str, Any]:
    """Return a page of the groups of a frame of traces, each with its rollouts side by side.

    The question: `group_sort` (one of `groups.SORTS`), `group_order` (asc, desc), `group_page`. Raises BadQuestion.
    """
    sort = request.one_of("group_sort", SORTS, "group")
    order = request.one_of("group_order", (ASCENDING, DESCENDING), ASCENDING)
    page = request.number("group_page", 1, least=1)
    ordered = in_order(of_traces(frame), sort, order == DESCENDING)
    pages = max(-(-ordered.height // GROUPS_PER_PAGE), 1)
    if page > pages:
        raise BadQuestion(f"group_page={page}: there are {pages} of {GROUPS_PER_PAGE} groups each")
    rows = ordered.slice((page - 1) * GROUPS_PER_PAGE, GROUPS_PER_PAGE)
    return {
        "rows": _with_cells(rows, frame),
        "num_groups": ordered["group_id"].n_unique(),
        "num_rows": ordered.height,
        "num_agents": ordered["agent"].n_unique(),
        "num_environments": ordered["environment"].n_unique(),
        "largest": ordered["num_traces"].max(),
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
    scales = select_from(frame, "select environment, low, high from reward_scales")
    spans = {name: (low, high) for name, low, high in scales.iter_rows()}
    entries = []
    for row in rows.to_dicts():
        own = cells[row["group_id"], row["agent"]]
        drawn = [each | {"level": level(each["reward"], spans.get(row["environment"]))} for each in own[:MOST_CELLS]]
        entries.append({**row, "cells": drawn, "num_more": len(own) - len(drawn)})
    return entries


def level(reward: float | None, span: tuple[float, float] | None) -> int | None:
    """Return the level of colour of a reward, 0 to LEVELS; None where there is no finite reward."""
    # Not equal to itself is NaN.
    if reward is None or span is None or reward != reward or abs(reward) == float("inf"):
        return None
    low, high = span
    return round(min(max((reward - low) / (high - low), 0.0), 1.0) * LEVELS)
