"""Rows of two runs side by side: the rollouts, samples and groups of one step.

Rows are joined by their ids. Of a step those of its last batch are compared.
"""

from functools import cached_property
from itertools import chain
from typing import Any

import polars as pl

from flows.queries.request import NotThere
from flows.queries.rollouts import traces_of
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


class ComparedStep:
    """The rows of the last batch of a step of two runs. Raises NotThere for a step that neither has."""

    def __init__(self, reader: StoreReader, a: str, b: str, step: int) -> None:
        self._reader, self._runs = reader, (a, b)
        steps = [reader.history(run).steps for run in (a, b)]
        numbers = {number for of_run in steps for number in of_run}
        if step not in numbers:
            near = ", ".join(map(str, sorted(numbers, key=lambda number: (abs(number - step), number))[:5]))
            nearest = f"the nearest are {near}" if near else "neither has made one yet"
            raise NotThere(f"neither {a!r} nor {b!r} has step {step}; {nearest}")
        self._lineages = [of_run[step].lineages if step in of_run else [] for of_run in steps]

    @cached_property
    def traces(self) -> pl.DataFrame:
        """One row for each rollout of either run, those of both once, a's first.

        Columns: trace_id; `side` (both, a or b); environment, example_id, agent; and for each run, ending in _a and _b:
        key (of the work that made the trace), group_id, reward, outcome (`kept`, the filter's reason, or null where
        nothing was judged), advantage.
        """
        frames = [traces_of(self._reader, *side) for side in zip(self._runs, self._lineages, strict=True)]
        return select_from_frames({"rows_a": lambda: frames[0], "rows_b": lambda: frames[1]}, _TRACES)

    @cached_property
    def samples(self) -> pl.DataFrame:
        """One row for each training sample of both runs, the greatest difference of advantages first.

        Columns: sample_id, trace_id, group_id, `a` and `b` (advantages) and difference (b - a).
        """
        a, b = self._runs
        return select(self._reader.frames(), [*chain(*self._lineages)], _SAMPLES, a=a, b=b)

    @cached_property
    def groups(self) -> pl.DataFrame:
        """One row for each example of either run and each agent in it, a's first.

        Columns: environment, example_id, agent; num_shared (rollouts of both); for each run group_X (its first group at
        the example), num_X, reward_X (mean, null where none was scored) and kept_X (null where nothing was judged);
        difference (reward_b - reward_a); max_advantage_difference over shared samples, null without one.
        """
        return select_from_frames({"traces": lambda: self.traces, "samples": lambda: self.samples}, _GROUPS)

    def detail(self, most: int = 10) -> dict[str, Any]:
        """Return the shared traces with another verdict, and the samples that differ most; `most` of each."""
        verdicts = self.traces.filter(pl.col("outcome_a") != pl.col("outcome_b")).sort("trace_id")
        samples = self.samples.filter(pl.col("difference") != 0)
        return {
            "verdicts": verdicts.select("trace_id", a="outcome_a", b="outcome_b").head(most).to_dicts(),
            "samples": samples.drop("trace_id").head(most).to_dicts(),
        }
