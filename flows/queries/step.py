"""A step as plain values: what its rollouts earned, their outcomes, what the update measured, and its groups."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from flows.queries.metrics import written_metrics
from flows.queries.request import BadQuestion, PageRequest
from flows.queries.rollout_list import (
    ASCENDING,
    DESCENDING,
)
from flows.queries.rollouts import traces
from flows.queries.row_lineage import policy_names, policy_version
from flows.queries.step_history import StepLineage
from flows.queries.store_reader import StoreReader
from storage.read.lineage import Work, row_identities
from tasks.metrics.accounting import ERRORED, FILTERED, GIVEN_UP
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


def written_of(library: StoreReader, run: str, found: Sequence[StepLineage]) -> Values:
    """Return the metrics that a step has written of the rollouts of these lineages, and of no others; else nothing.

    Nothing is written of a step that goes on, of an evaluation, or of groups that were replaced.
    """
    keys = {lineage.traces.key for lineage in found}
    steps = [each for each in library.history(run).sampled_steps if {work.key for work in each.traces} == keys]
    return written_metrics(library, steps)[0] if steps else {}


def figures(frame: pl.DataFrame, written: Values | None = None) -> dict[str, Any]:
    """Return what the traces of a step, or of an evaluation, say together, as plain values.

    Rewards are over those that were scored and not stopped; lengths over all that were not stopped, as in
    `tasks.metrics.rollouts`. What nothing was measured of is None. Values that the step has `written` are
    returned as they were written: rows may have been dropped for their age since.
    """
    written = written or {}
    ended = frame.filter(~pl.col("outcome").is_in(GIVEN_UP))
    means = ended.select(
        num_input_tokens=pl.col("num_input_tokens").mean(),
        num_output_tokens=pl.col("num_output_tokens").mean(),
        num_turns=pl.col("num_turns").mean(),
        truncated=pl.col("is_truncated").mean(),
        staleness_mean=pl.col("staleness").mean(),
        staleness_max=pl.col("staleness").max(),
        seconds=pl.col("seconds").mean(),
    ).to_dicts()[0]
    means |= _in_place(written, ALL, WRITTEN_MEANS)
    return {
        "num_traces": frame.height,
        "num_groups": frame["group_id"].n_unique(),
        "num_examples": frame.select("environment", "example_id").n_unique(),
        "reward": rewards(ended) | _in_place(written, ALL, WRITTEN_REWARDS),
        "environments": _environments(ended, written),
        "num_judged": frame["keep"].count(),
        "num_kept": frame["keep"].sum() if frame["keep"].count() else None,
        "num_trained": None if frame["trained"].has_nulls() else frame["trained"].sum(),
        "tokens": int(frame["num_tokens"].sum()),
        "means": means,
        "outcomes": _counts(frame, "outcome", "detail"),
        "errors": _counts(frame.filter(~pl.col("outcome").is_in(GIVEN_UP)), "error_class"),
        "filters": _filter_hits(frame),
    }


def _in_place(written: Values, scope: str, names: Mapping[str, str]) -> dict[str, float]:
    """Return the figures of a scope that were written, by the names that they are shown by."""
    return {name: written[scope, measure] for name, measure in names.items() if (scope, measure) in written}


def _environments(ended: pl.DataFrame, written: Values) -> list[dict[str, Any]]:
    """Return the rewards by environment and, where several agents play, by agent: one wins what another loses."""
    found = []
    for (name,), rows in sorted(ended.group_by("environment")):
        by_agent = [{"agent": agent, **rewards(own)} for (agent,), own in sorted(rows.group_by("agent"))]
        agents = by_agent if len(by_agent) > 1 else []
        earned = rewards(rows) | _in_place(written, str(name), WRITTEN_REWARDS)
        found.append({"environment": name, "num_traces": rows.height, **earned, "agents": agents})
    return found


def rewards(rows: pl.DataFrame) -> dict[str, Any]:
    """Return how many of some traces were scored, and mean, spread (standard deviation of all), least and greatest."""
    found = rows["reward"].drop_nulls()
    return {
        "num_scored": len(found),
        "mean": found.mean(),
        "spread": found.std(ddof=0),
        "min": found.min(),
        "max": found.max(),
    }


def _counts(frame: pl.DataFrame, *columns: str) -> list[dict[str, Any]]:
    counted = frame.filter(pl.col(columns[0]).is_not_null()).group_by(columns).agg(num_traces=pl.len())
    return counted.sort("num_traces", *columns, descending=[True, *(False for _ in columns)]).to_dicts()


def _filter_hits(frame: pl.DataFrame) -> list[dict[str, Any]]:
    """Return how many traces each filter found something on, and how many it decided against."""
    found = frame.select(pl.col("detected").alias("filter")).explode("filter").drop_nulls()
    decided = frame.select(pl.col("reason").alias("filter")).drop_nulls()
    names = sorted({*found["filter"], *decided["filter"]})
    return [
        {"filter": name, "num_found": (found["filter"] == name).sum(), "num_decided": (decided["filter"] == name).sum()}
        for name in names
    ]


def histogram(frame: pl.DataFrame, bins: int = BINS) -> list[dict[str, Any]]:
    """Return how the rewards of each environment are spread over equal bins from `low` to `high`.

    The first bin is from `low`, the last up to and with `high`; rewards within 0 and 1, or -1 and 1, are shown on that
    scale, so that steps can be distinguished by eye. What is no finite number is left out.
    """
    scored = frame.filter(~pl.col("outcome").is_in(GIVEN_UP), pl.col("reward").is_finite())
    found = []
    for (name,), rows in sorted(scored.group_by("environment")):
        low, high = scale(rows["reward"])
        at = ((rows["reward"] - low) / (high - low) * bins).floor().clip(0, bins - 1).cast(pl.Int64)
        counts = dict(at.value_counts().iter_rows())
        found.append({"environment": name, "low": low, "high": high, "counts": [counts.get(n, 0) for n in range(bins)]})
    return found


def scale(values: pl.Series) -> tuple[float, float]:
    """Return the span that finite rewards are shown on; there must be one, and low is below high."""
    least, most = float(values.min() or 0.0), float(values.max() or 0.0)  # type: ignore[arg-type]
    if least >= 0 and most <= 1:
        return 0.0, 1.0
    if least >= -1 and most <= 1:
        return -1.0, 1.0
    return (least, most) if least < most and math.isfinite(most - least) else (least - 0.5, least + 0.5)


def updates(library: StoreReader, run: str, found: Sequence[StepLineage]) -> list[dict[str, Any]]:
    """Return what the optimizer steps measured that trained some lineages; MEASURED of each, in order."""
    works = list({lineage.updates.key: lineage.updates for lineage in found if lineage.updates}.values())
    if not works:
        return []
    rows = library.frames(run).rows(works, "updates").select("key", *MEASURED)
    name = ("step_updates", row_identities(works))
    return library.cached_value(name, lambda: rows.sort("key", "update").drop("key").collect().to_dicts())


def policies(library: StoreReader, run: str, frame: pl.DataFrame, found: Sequence[StepLineage]) -> dict[str, Any]:
    """Return the policies that sampled a step, and the one that it made (None where it is not trained)."""
    sampled = frame.select("policy_key", "policy_version").unique().sort("policy_version", "policy_key").to_dicts()
    made = next((lineage.updates for lineage in found if lineage.updates), None)
    return {
        "before": [_policy(library, run, each["policy_key"], each["policy_version"]) for each in sampled],
        "after": made and _policy(library, run, made.key, policy_version(made)),
    }


def _policy(library: StoreReader, run: str, key: str, version: int) -> dict[str, Any]:
    """Return a policy with its name RUN:VERSION, of this run where it has it; None for one that the store lacks."""
    work: Work | None = library.graph.works.get(key)
    names = policy_names(work) if work else []
    # Runs that share work have a name each for one policy: who looks at this run wants its own.
    own = [name for name in names if name.rpartition(":")[0] == run]
    return {"key": key, "version": version, "name": next(iter((*own, *names)), None)}


SORTS = ("group", "example", "environment", "mean", "spread", "baseline", "size", "kept")
"""What groups can be sorted by; `group` is the order of their ids, numbers in them by value."""
_BY = {"example": "example_id", "mean": "reward_mean", "spread": "reward_spread", "size": "num_traces"}
_DIGITS = re.compile(r"(\d+)")


def groups(library: StoreReader, run: str, step: int) -> pl.DataFrame:
    """Return one row for each group of a step and each agent in it, for agents earn different things.

    Columns: `group_id`, `agent`, `environment`, `example_id`, `num_traces`, `num_scored`, `reward_mean`,
    `reward_spread` (standard deviation over the scored ones, of the whole group and no sample of more), `reward_min`,
    `reward_max`; `baseline`, null where there is none or the members have different ones; `num_kept` (null before the
    filters), `num_trained` (null where that is not known any more), `num_filtered`, `num_errored`, `num_stopped`.
    Those that were stopped are in no reward. Raises NotThere.
    """
    return of_traces(traces(library, run, step))


def of_traces(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the groups of a frame of traces in order of their ids, numbers in them by value; see `groups`."""
    reward = pl.col("reward").filter(~pl.col("outcome").is_in(GIVEN_UP))
    # A leave-one-out baseline differs from member to member: then a group has none.
    baselines = pl.col("baseline").drop_nulls().unique()
    counts = {name: pl.col("outcome").is_in(outcomes).sum() for name, outcomes in _OUTCOMES.items()}
    found = frame.group_by("group_id", "agent", maintain_order=True).agg(
        pl.col("environment", "example_id").first(),
        num_traces=pl.len(),
        num_scored=reward.count(),
        reward_mean=reward.mean(),
        reward_spread=reward.std(ddof=0),
        reward_min=reward.min(),
        reward_max=reward.max(),
        baseline=pl.when(baselines.len() == 1).then(baselines.first()),
        num_kept=pl.when(pl.col("keep").count() > 0).then(pl.col("keep").sum()),
        num_trained=pl.when(pl.col("trained").is_not_null().all()).then(pl.col("trained").sum()),
        **counts,
    )
    whole = pl.col("^num_.*$").cast(pl.Int64)
    order = sorted(range(found.height), key=lambda at: (natural(found["group_id"][at]), found["agent"][at]))
    return found.with_columns(whole)[order]


_OUTCOMES = {"num_filtered": (FILTERED,), "num_errored": (ERRORED,), "num_stopped": GIVEN_UP}


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


def group_page(frame: pl.DataFrame, asked: PageRequest) -> dict[str, Any]:
    """Return a page of the groups of a frame of traces, each with its rollouts side by side.

    The question: `group_sort` (one of `groups.SORTS`), `group_order` (asc, desc), `group_page`. Raises BadQuestion.
    """
    sort = asked.one_of("group_sort", SORTS, "group")
    order = asked.one_of("group_order", (ASCENDING, DESCENDING), ASCENDING)
    page = asked.number("group_page", 1, least=1)
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
    spans = _spans(frame)
    entries = []
    for row in rows.to_dicts():
        own = cells[row["group_id"], row["agent"]]
        drawn = [each | {"level": level(each["reward"], spans.get(row["environment"]))} for each in own[:MOST_CELLS]]
        entries.append({**row, "cells": drawn, "num_more": len(own) - len(drawn)})
    return entries


def _spans(frame: pl.DataFrame) -> dict[str, tuple[float, float]]:
    finite = frame.filter(pl.col("reward").is_finite())
    return {str(name): scale(rows["reward"]) for (name,), rows in finite.group_by("environment")}


def level(reward: float | None, span: tuple[float, float] | None) -> int | None:
    """Return the level of colour of a reward, 0 to LEVELS; None where there is no finite reward."""
    # Not equal to itself is NaN.
    if reward is None or span is None or reward != reward or abs(reward) == float("inf"):
        return None
    low, high = span
    return round(min(max((reward - low) / (high - low), 0.0), 1.0) * LEVELS)
