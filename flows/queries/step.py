"""A step as plain values: what its rollouts earned, their outcomes, what the update measured, and its groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from flows.queries.compare import MEASURES
from flows.queries.metrics import written_metrics
from flows.queries.request import BadQuestion, PageRequest
from flows.queries.rollout_list import ASCENDING, DESCENDING
from flows.queries.row_lineage import policy_name, policy_version
from flows.queries.step_history import StepLineage
from flows.queries.store_reader import StoreReader
from flows.queries.views import select_from
from storage.read.lineage import row_identities
from tasks.metrics.figures import ALL, Values

BINS = 20
MEASURED = (
    *("update", *MEASURES, "mismatch_kl_max"),
    *("num_rows", "num_tokens", "rl_tokens", "ce_tokens", "ref_kl_tokens"),
)
"""Columns of an optimizer step that are returned; as in `storage.schemas.stage_tables.UPDATES`."""
COUNTS = ("num_traces", "num_groups", "num_examples", "num_judged", "tokens")
WRITTEN_MEANS = {
    **{name: name for name in ("num_input_tokens", "num_output_tokens", "num_turns")},
    **{"truncated": "is_truncated", "staleness_mean": "staleness"},
}
WRITTEN_REWARDS = {"mean": "reward/mean", "spread": "reward/std", "min": "reward/min", "max": "reward/max"}
"""Figures of a step that stand in table `metrics`, by the names that they have there."""
MEANS = (*WRITTEN_MEANS, "staleness_max", "seconds")
REWARDS = ("num_scored", *WRITTEN_REWARDS)


def written_of(reader: StoreReader, run: str, lineages: Sequence[StepLineage]) -> Values:
    """Return the metrics that a step has written of the rollouts of these lineages, and of no others; else nothing."""
    keys = {lineage.traces.key for lineage in lineages}
    steps = [step for step in reader.history(run).sampled_steps if {work.key for work in step.traces} == keys]
    return written_metrics(reader, steps)[0] if steps else {}


def figures(frame: pl.DataFrame, written: Values | None = None) -> dict[str, Any]:
    """Return what the traces of a step, or of an evaluation, say together, as plain values.

    Rewards are over those that were scored and not stopped; lengths over all that were not stopped, as in
    `tasks.metrics.rollouts`. What nothing was measured of is None. What the step has `written` is returned as it was
    written: rows may have been dropped for their age since.
    """
    # The views are of a step each; these rollouts may be of several.
    one = {"run": "", "step": 0, "for_training": True}
    frame = frame.with_columns(pl.lit(value, dtype=frame.schema[name]).alias(name) for name, value in one.items())
    none = dict.fromkeys((*COUNTS, "num_kept", "num_trained", *MEANS)) | dict.fromkeys(COUNTS, 0)
    values = next(iter(_rows(frame, "step_rollouts")), none)
    rewards = _rows(frame, "step_rewards")
    total = next((row for row in rewards if row["environment"] is None), dict.fromkeys(REWARDS) | {"num_scored": 0})
    return {
        **{name: value for name, value in values.items() if name not in MEANS},
        "reward": {name: total[name] for name in REWARDS} | _in_place(written, ALL, WRITTEN_REWARDS),
        "environments": [
            {name: row[name] for name in ("environment", "num_traces", *REWARDS)}
            | _in_place(written, row["environment"], WRITTEN_REWARDS)
            | {"agents": _agents(rewards, row)}
            for row in rewards
            if row["environment"] is not None and row["agent"] is None
        ],
        "means": {name: values[name] for name in MEANS} | _in_place(written, ALL, WRITTEN_MEANS),
        "outcomes": _counts(frame, "outcome", "detail"),
        "filters": select_from(frame, "select filter, num_found, num_decided from filter_hits order by 1").to_dicts(),
    }


def _in_place(written: Values | None, scope: str, names: Mapping[str, str]) -> dict[str, float]:
    """Return the figures of a scope that were written, by the names that they are shown by."""
    return {name: written[scope, measure] for name, measure in names.items() if written and (scope, measure) in written}


def _rows(frame: pl.DataFrame, view: str) -> list[dict[str, Any]]:
    return select_from(frame, f"select * exclude (run, step, for_training) from {view} order by all").to_dicts()


def _agents(rewards: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rewards of the agents of an environment where several play: one wins what another loses."""
    name = environment["environment"]
    rows = [
        {key: row[key] for key in ("agent", *REWARDS)} for row in rewards if row["environment"] == name and row["agent"]
    ]
    return rows if len(rows) > 1 else []


def _counts(frame: pl.DataFrame, *columns: str) -> list[dict[str, Any]]:
    counted = frame.drop_nulls(columns[0]).group_by(columns).agg(num_traces=pl.len())
    return counted.sort(-pl.col("num_traces").cast(pl.Int64), *columns).to_dicts()


def histogram(frame: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the rewards of each environment in BINS equal bins from `low` to `high`, as view `reward_histogram`."""
    rows = select_from(frame, "select environment, low, high, bin, num_traces from reward_histogram order by all")
    return [
        {"environment": name, "low": low, "high": high, "counts": [counts.get(bin, 0) for bin in range(BINS)]}
        for (name, low, high), own in rows.group_by("environment", "low", "high", maintain_order=True)
        for counts in [dict(own.select("bin", "num_traces").iter_rows())]
    ]


def updates(reader: StoreReader, run: str, lineages: Sequence[StepLineage]) -> list[dict[str, Any]]:
    """Return what the optimizer steps measured that trained some lineages; MEASURED of each, in order."""
    works = list({lineage.updates.key: lineage.updates for lineage in lineages if lineage.updates}.values())
    rows = reader.frames(run).rows(works, "updates").select("key", *MEASURED).sort("key", "update").drop("key")
    return reader.cache.once(("step_updates", row_identities(works)), lambda: rows.collect().to_dicts())


def policies(reader: StoreReader, run: str, frame: pl.DataFrame, lineages: Sequence[StepLineage]) -> dict[str, Any]:
    """Return the policies that sampled a step, and the one that it made (None where it is not trained).

    Each has its name RUN:VERSION, of this run where it has it; None for one that the store lacks.
    """

    def policy(key: str, version: int) -> dict[str, Any]:
        return {"key": key, "version": version, "name": policy_name(reader.graph, key, run)}

    sampled = frame.select("policy_key", "policy_version").unique().sort("policy_version", "policy_key")
    made = next((lineage.updates for lineage in lineages if lineage.updates), None)
    return {
        "before": [policy(*row) for row in sampled.iter_rows()],
        "after": made and policy(made.key, policy_version(made)),
    }


SORTS = {
    **{"group": "place", "example": "example_id", "environment": "environment", "mean": "reward_mean"},
    **{"spread": "reward_spread", "baseline": "baseline", "size": "num_traces", "kept": "num_kept"},
}
"""What groups can be sorted by, each with its column."""


def of_traces(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the groups of a frame of traces in order of their ids, numbers in them by value: view `groups`."""
    # Groups 3-2 and 3-10: each number with zeros before it. Ids are texts that others wrote, of any length.
    numbers = pl.col("group_id").str.extract_all(r"\d+|\D+").list.eval(pl.element().str.zfill(18)).list.join("")
    return select_from(frame, "select * exclude (run, step) from groups").sort(numbers, "group_id", "agent")


GROUPS_PER_PAGE, MAX_CELLS = 24, 64
"""Groups of a page, and rollouts of one group that are drawn: the list below has all."""
LEVELS = 10
"""The highest level of colour of a reward; the lowest is 0."""


def group_page(frame: pl.DataFrame, request: PageRequest) -> dict[str, Any]:
    """Return a page of the groups of a frame of traces, each with its rollouts side by side.

    The question: `group_sort` (one of SORTS), `group_order` (asc, desc), `group_page`. What has no value comes last.
    Raises BadQuestion.
    """
    sort = request.one_of("group_sort", tuple(SORTS), "group")
    order = request.one_of("group_order", (ASCENDING, DESCENDING), ASCENDING)
    page = request.number("group_page", 1, least=1)
    ordered = of_traces(frame).with_row_index("place")
    ordered = ordered.sort(SORTS[sort], descending=order == DESCENDING, nulls_last=True, maintain_order=True)
    pages = max(-(-ordered.height // GROUPS_PER_PAGE), 1)
    if page > pages:
        raise BadQuestion(f"group_page={page}: there are {pages} of {GROUPS_PER_PAGE} groups each")
    counted = {"num_groups": "group_id", "num_agents": "agent", "num_environments": "environment"}
    return {
        **{name: ordered[column].n_unique() for name, column in counted.items()},
        "rows": _with_cells(ordered.slice((page - 1) * GROUPS_PER_PAGE, GROUPS_PER_PAGE), frame),
        "largest": ordered["num_traces"].max(),
        **{"sort": sort, "order": order, "page": page, "num_pages": pages},
    }


_CELLS = """
select group_id, agent, greatest(count(*) - $most, 0)::bigint as num_more,
    list({trace_id: trace_id, key: key, reward: reward, advantage: advantage, outcome: outcome, detail: detail,
        level: case when isfinite(reward) and low is not null then  -- `greatest` skips null
            round_even(least(greatest((reward - low) / (high - low), 0), 1) * $levels, 0)::int end
    } order by rollouts.place)[:$most] as cells
from rollouts
semi join (select unnest($groups) as group_id, unnest($agents) as agent) as shown using (group_id, agent)
left join reward_scales using (environment)
group by group_id, agent
"""


def _with_cells(rows: pl.DataFrame, frame: pl.DataFrame) -> list[dict[str, Any]]:
    """Return groups as plain values with the rollouts of each, those of one environment on one scale of colour."""
    shown = {"groups": rows["group_id"].to_list(), "agents": rows["agent"].to_list()}
    cells = select_from(frame, _CELLS, **shown, most=MAX_CELLS, levels=LEVELS)
    return rows.drop("place").join(cells, on=["group_id", "agent"], how="left", maintain_order="left").to_dicts()
