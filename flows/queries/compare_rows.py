"""Rows of two runs side by side: the rollouts, samples and groups of one step, and the attempts at one example.

Rows are joined by their ids. Of a step those of its last batch are compared.
"""

from collections.abc import Sequence
from typing import Any

import polars as pl

from flows.queries.request import NotThere
from flows.queries.rollouts import index_of_example, traces_of
from flows.queries.step_history import StepLineage
from flows.queries.store_reader import StoreReader
from flows.queries.views import select
from storage.read.views import select as select_from_frames

_SIDE = """
select *, case when keep then 'kept' else reason end as outcome
from (select * exclude outcome from {rows})
qualify row_number() over (partition by trace_id order by place desc) = 1
"""
_TRACES = f"""
select trace_id, case when two.key is null then 'a' when one.key is null then 'b' else 'both' end as side,
    environment, example_id, agent,
    one.key as key_a, one.group_id as group_id_a, one.reward as reward_a, one.outcome as outcome_a,
    one.advantage as advantage_a,
    two.key as key_b, two.group_id as group_id_b, two.reward as reward_b, two.outcome as outcome_b,
    two.advantage as advantage_b
from ({_SIDE.format(rows="rows_a")}) as one
full join ({_SIDE.format(rows="rows_b")}) as two using (trace_id, environment, example_id, agent)
order by one.place nulls last, two.place
"""
_SAMPLES = """
select sample_id, one.trace_id, one.group_id, one.advantage as a, two.advantage as b, b - a as difference
from (select * from samples semi join lineages on samples.key = lineages.samples and lineages.run = $a) as one
join (select * from samples semi join lineages on samples.key = lineages.samples and lineages.run = $b) as two
    using (sample_id)
order by abs(difference) desc nulls last, sample_id
"""
_GROUPS = """
select environment, example_id, agent,
    count(*) filter (where side = 'both') as num_shared,
    first(group_id_a order by place) filter (where group_id_a is not null) as group_a,
    count(key_a) as num_a,
    avg(reward_a order by place) as reward_a,
    case when count(outcome_a) > 0 then count(*) filter (where outcome_a = 'kept') end as kept_a,
    first(group_id_b order by place) filter (where group_id_b is not null) as group_b,
    count(key_b) as num_b,
    avg(reward_b order by place) as reward_b,
    case when count(outcome_b) > 0 then count(*) filter (where outcome_b = 'kept') end as kept_b,
    max(moved) as max_advantage_difference,
    avg(reward_b order by place) - avg(reward_a order by place) as difference
from (select *, row_number() over () as place from traces)
left join (select trace_id, max(abs(difference)) as moved from samples group by trace_id) using (trace_id)
group by environment, example_id, agent
order by min(place)
"""


def _lineages(reader: StoreReader, a: str, b: str, step: int) -> list[Sequence[StepLineage]]:
    """Return the lineages of the last batch of a step of each run. Raises NotThere for a step that neither has."""
    steps = [reader.history(run).steps for run in (a, b)]
    numbers = {number for of_run in steps for number in of_run}
    if step not in numbers:
        near = ", ".join(map(str, sorted(numbers, key=lambda number: (abs(number - step), number))[:5]))
        nearest = f"the nearest are {near}" if near else "neither has made one yet"
        raise NotThere(f"neither {a!r} nor {b!r} has step {step}; {nearest}")
    return [of_run[step].lineages if step in of_run else () for of_run in steps]


def compared_traces(reader: StoreReader, a: str, b: str, step: int) -> pl.DataFrame:
    """Return one row for each rollout of either run in the last batch of a step, those of both once, a's first.

    Columns: trace_id; `side` (both, a or b); environment, example_id, agent; and for each run, ending in _a and _b: key
    (of the work that made the trace), group_id, reward, outcome (`kept`, the filter's reason, or null where nothing was
    judged), advantage. Raises NotThere.
    """
    of_a, of_b = _lineages(reader, a, b, step)
    rows = {"rows_a": lambda: traces_of(reader, a, of_a), "rows_b": lambda: traces_of(reader, b, of_b)}
    return select_from_frames(rows, _TRACES)


def compared_samples(reader: StoreReader, a: str, b: str, step: int) -> pl.DataFrame:
    """Return one row for each training sample of both runs at a step, the greatest difference of advantages first.

    Columns: sample_id, trace_id, group_id, `a` and `b` (advantages) and difference (b - a). Raises NotThere.
    """
    of_a, of_b = _lineages(reader, a, b, step)
    return select(reader.frames(), [*of_a, *of_b], _SAMPLES, a=a, b=b)


def compared_groups(reader: StoreReader, a: str, b: str, step: int) -> pl.DataFrame:
    """Return one row for each example of either run at a step and each agent in it, a's first.

    Columns: environment, example_id, agent; num_shared (rollouts of both); for each run group_X (its first group at the
    example), num_X, reward_X (mean, null where none was scored) and kept_X (null where nothing was judged); difference
    (reward_b - reward_a); max_advantage_difference over shared samples, null without one. Raises NotThere.
    """
    traces, samples = compared_traces(reader, a, b, step), compared_samples(reader, a, b, step)
    return select_from_frames({"traces": lambda: traces, "samples": lambda: samples}, _GROUPS)


def step_detail(reader: StoreReader, a: str, b: str, step: int, most: int = 10) -> dict[str, Any]:
    """Return the shared traces with another verdict, and the samples that differ most; `most` of each."""
    traces = compared_traces(reader, a, b, step)
    verdicts = traces.filter(pl.col("outcome_a") != pl.col("outcome_b")).sort("trace_id")
    samples = compared_samples(reader, a, b, step).filter(pl.col("difference") != 0)
    return {
        "verdicts": verdicts.select("trace_id", a="outcome_a", b="outcome_b").head(most).to_dicts(),
        "samples": samples.drop("trace_id").head(most).to_dicts(),
    }


ATTEMPTS = (
    *("side", "run", "step", "for_training", "trace_id", "key", "agent", "reward", "error_class", "policy_version"),
    "in_both",
)


def compared_attempts(reader: StoreReader, a: str, b: str, environment: str, example_id: str) -> pl.DataFrame:
    """Return one row for each attempt of either run at an example, a's first, by step; both may be the same run.

    Columns: `side` (a or b), run, step (of an evaluation, the version that it scored), for_training, trace_id, key,
    agent, reward, error_class, policy_version, `in_both` (whether the other side has the same rollout). Raises
    NotThere where neither tried it.
    """
    sides = [index_of_example(reader, run, environment, example_id) for run in (a, b)]
    if all(rows.is_empty() for rows in sides):
        raise NotThere(f"neither {a!r} nor {b!r} tried the example {example_id!r} of {environment!r}")
    named = [
        rows.with_columns(
            side=pl.lit(side), run=pl.lit(run), in_both=pl.col("trace_id").is_in(other["trace_id"].implode())
        )
        for rows, other, side, run in zip(sides, sides[::-1], "ab", (a, b), strict=True)
    ]
    return pl.concat(named).select(ATTEMPTS)
