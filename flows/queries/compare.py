"""How two runs of a store differ in settings, results, figures and scores, and in the rows of one step.

Results are compared along the ledger: two runs that share a key share its rows bit by bit. Figures are those that
finished steps wrote to table `metrics`. Rows are joined by their ids; of a step those of its last batch are compared. A
`StoreReader` keeps each comparison until one of the runs has more work.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import chain
from typing import Any

import polars as pl

from configs.errors import differing_parts
from configs.run import RunConfig, content
from flows.queries.request import NotThere, nearest_numbers
from flows.queries.rollouts import traces_of
from flows.queries.scores import compare_scores, recorded_evaluations, scored_evaluations
from flows.queries.store_reader import StoreReader, flat
from flows.queries.views import select
from storage.read.lineage import Work
from storage.read.views import select as select_from_frames
from tasks.metrics.figures import MEANINGS
from tasks.stages import COMPARED, EVALUATION

SAME, DIFFERENT, ONLY_A, ONLY_B = "same key", "different key", "only in a", "only in b"
MEASURES = (
    *("loss", "rl_loss", "ce_loss", "ref_kl_loss", "grad_norm", "entropy", "mismatch_kl", "masked_fraction"),
    *("learning_rate",),
)
"""Measurements of the learner; of a step, their means over its updates."""
METRICS = {name: f"batch/{name}" for name in MEANINGS} | {name: f"updates/{name}/mean" for name in MEASURES}
FIGURES = tuple(METRICS)
"""The figures of a step, by the names that `stagecoach diff` uses; METRICS has their names in table `metrics`."""
Works = Mapping[int, Mapping[str, Work]]
"""The finished work of a run by step and stage; an evaluation is at the version of its policy."""
PIECES = {"step": pl.Int64, "stage": pl.String, "state": pl.String, "a": pl.String, "b": pl.String}
_COUNTING = """
-- A decision at a gate makes no rows. An import of weights in one run alone is no difference: a replay continues from
-- the weights of its source.
with counting as (
    select *, stage in ('examples', 'policy_import', 'evaluation') as of_run
    from (select *, row_number() over () as place from pieces)
    where stage <> 'gate' and not (stage = 'policy_import' and state in ('only in a', 'only in b'))
)
"""
_STEPS = f"""{_COUNTING}
select step, first(stage order by place) filter (where state <> 'same key') as first_difference,
    case when bool_and(state = 'only in a') filter (where not of_run) then 'only in a'
        when bool_and(state = 'only in b') filter (where not of_run) then 'only in b' end as only,
    any_value(weights.a = weights.b) as weights_equal, any_value(reward.a) as reward_mean_a,
    any_value(reward.b) as reward_mean_b, any_value(loss.a) as loss_a, any_value(loss.b) as loss_b
from counting
left join weights using (step)
left join (from figures where figure = 'reward_mean') as reward using (step)
left join (from figures where figure = 'loss') as loss using (step)
where stage <> 'evaluation'
group by step
having not bool_and(of_run)
order by step
"""
_PARTING = f"""{_COUNTING}
select step, stage, state
from counting
where state <> 'same key'
    and step in (select step from pieces where a is not null and b is not null and stage <> 'examples')
order by place
limit 1
"""
_RESULTS = """
select stage, count(*) filter (state = 'same key') as "same key",
    count(*) filter (state = 'different key') as "different key",
    count(*) filter (state = 'only in a') as "only in a", count(*) filter (state = 'only in b') as "only in b"
from (select *, row_number() over () as place from pieces)
group by stage
order by min(place)
"""
_SAME_WORK = f"{_COUNTING} select count(*) > 0 and bool_and(state = 'same key') from counting"
# Sums of counts, the least and the greatest reward of all steps, and of all else the mean of the steps that have it.
_TOTAL = """case when figure like 'num_%' then sum({side}) when figure = 'reward_min' then min({side})
    when figure = 'reward_max' then max({side}) else avg({side} order by step) end as {side}"""
_TOTALS = f"""
select *, b - a as difference
from (
    select figure, {_TOTAL.format(side="a")}, {_TOTAL.format(side="b")}
    from figures
    semi join (from steps where "only" is null) using (step)
    group by figure
    order by figure
)
"""


def compare(reader: StoreReader, a: str, b: str) -> Mapping[str, Any]:
    """Return how run `b` differs from run `a`: the values of `stagecoach diff --json`. Raises NotThere."""
    state = _state(reader, a), _state(reader, b)
    return reader.cache.once(("compared", a, b, state), lambda: _compare(reader, a, b))


def _state(reader: StoreReader, run: str) -> tuple[Any, ...]:
    works = reader.frames(run).graph.works.values()
    # Each event may bring another config.
    return len(reader.store.runs.events(run)), frozenset(work.identity for work in works if work.finished)


def _compare(reader: StoreReader, a: str, b: str) -> Mapping[str, Any]:
    configs, works = [reader.config(run) for run in (a, b)], [work_of(reader, run) for run in (a, b)]
    pieces = compared_keys(*works)
    frames = {"pieces": pl.DataFrame(pieces, PIECES), "figures": compared_figures(reader, *works)}
    frames["weights"] = _of_both(*(_weights(reader, of_run) for of_run in works))

    def rows(query: str) -> pl.DataFrame:
        return select_from_frames({name: frame.clone for name, frame in frames.items()}, query)

    frames["steps"] = rows(_STEPS)
    return {
        "runs": [_describe_run(reader, *side) for side in zip((a, b), configs, works, strict=True)],
        "parting": next(rows(_PARTING).iter_rows(named=True), None),
        "same_work": not pieces or rows(_SAME_WORK).item(),
        "config": compared_configs(*configs),
        "results": rows(_RESULTS).to_dicts(),
        "totals": rows(_TOTALS).to_dicts(),
        "evaluations": compared_evaluations(reader, a, b).to_dicts(),
        "steps": frames["steps"].to_dicts(),
        "figures": frames["figures"].to_dicts(),
        "pieces": pieces,
    }


def _describe_run(reader: StoreReader, run: str, config: RunConfig, works: Works) -> dict[str, Any]:
    state, of_run = reader.store.runs.events(run)[-1].event, {"examples", "policy_import", EVALUATION}
    num_steps = sum(not stages.keys() <= of_run for stages in works.values())
    return {"run": run, "kind": config.kind, "state": state, "num_steps": num_steps}


def compared_configs(a: RunConfig, b: RunConfig) -> list[dict[str, Any]]:
    """Return the settings that differ: key (dotted), a, b, and `in_keys`, whether the setting can change rows.

    The name and kind of a run and the section of a replay describe the run and are no settings here. Of two versions
    of an environment they are the parts that differ.
    """
    old, new = (dict(flat(config.model_dump(mode="json"))) for config in (a, b))
    for key in old.keys() & new.keys():
        if key.endswith(".version") and old[key] and new[key] and old[key] != new[key]:
            old[key], new[key] = differing_parts(old[key], new[key])  # a version has several parts
    in_keys = {key for config in (a, b) for key, _ in flat(content(config, in_place=True))}
    return [
        {"key": key, "a": old.get(key), "b": new.get(key), "in_keys": key in in_keys}
        for key in dict.fromkeys((*old, *new))
        if not (key in ("name", "kind") or key.startswith("replay."))
        and (key in old, old.get(key)) != (key in new, new.get(key))
    ]


def work_of(reader: StoreReader, run: str) -> Works:
    """Return the finished work of a run, of each step that of its last batch. Raises NotThere for an unknown run."""
    history = reader.history(run)
    works: dict[int, dict[str, Work]] = {}
    for number, step in history.steps.items():
        about = {"gate": step.decision, "metrics": step.metrics}
        works[number] = {**step.work, **{name: work for name, work in about.items() if work}}
    for stages in list(works.values()):
        if "examples" in stages:  # are of the run, not of each step
            works[0] = {"examples": stages.pop("examples")} | works.get(0, {})
    if history.first_policy is not None:
        # At step 0 for every run: a replay of later steps imports the weights at the first of them.
        works.setdefault(0, {})["policy_import"] = history.first_policy
    for recorded in reversed(recorded_evaluations(reader.store, run, reader.config(run))):
        if (rollouts := history.find(recorded.rounds[0].key)) is not None:  # the first set represents all
            works.setdefault(recorded.version, {})[EVALUATION] = rollouts
    return works


def compared_keys(a: Works, b: Works) -> list[dict[str, Any]]:
    """Return each result of either run in order: step, stage, state, and both keys `a` and `b`."""
    pieces = []
    for step in sorted({*a, *b}):
        for stage in COMPARED:
            one, other = (work[step][stage].key if stage in work.get(step, {}) else None for work in (a, b))
            state = ONLY_B if one is None else ONLY_A if other is None else SAME if one == other else DIFFERENT
            if one or other:
                pieces.append({"step": step, "stage": stage, "state": state, "a": one, "b": other})
    return pieces


def compared_figures(reader: StoreReader, a: Works, b: Works) -> pl.DataFrame:
    """Return by finished step the FIGURES that a run has: step, figure, a, b and difference (b - a)."""
    rows = _of_both(_figures(reader, a), _figures(reader, b))
    rows = rows.sort("step", "figure").with_columns(difference=pl.col("b") - pl.col("a"))
    return rows.cast({"figure": pl.String}).select("step", "figure", "a", "b", "difference")


def _figures(reader: StoreReader, works: Works) -> pl.DataFrame:
    finished = [stages["metrics"] for stages in works.values() if "metrics" in stages]
    rows = reader.frames().rows(finished, "metrics").filter(pl.col("name").is_in(METRICS.values()), scope="")
    names = {metric: figure for figure, metric in METRICS.items()}
    figure = pl.col("name").replace_strict(names, return_dtype=pl.Enum(FIGURES))
    return rows.select(pl.col("step").cast(pl.Int64), "value", figure=figure).collect()


def _weights(reader: StoreReader, works: Works) -> pl.DataFrame:
    """Return the digest of the policy that each trained step made: step and value."""
    trained = [stages["training"] for stages in works.values() if "training" in stages]
    rows = reader.frames().rows(trained, "updates").sort("version", "update")
    # The last update of a step makes its policy.
    last = rows.group_by(pl.col("step").cast(pl.Int64)).agg(value=pl.col("weights_sha256").last())
    return last.collect()


def _of_both(a: pl.DataFrame, b: pl.DataFrame) -> pl.DataFrame:
    by = [name for name in a.columns if name != "value"]
    return a.rename({"value": "a"}).join(b.rename({"value": "b"}), on=by, how="full", coalesce=True)


EVALUATIONS = {
    **{"set": pl.String, "version_a": pl.Int64, "version_b": pl.Int64, "environment": pl.String, "figure": pl.String},
    **{"a": pl.Float64, "b": pl.Float64, "difference": pl.Float64, "low": pl.Float64, "high": pl.Float64},
    **{"num_examples": pl.Int64, "same_work": pl.Boolean},
}
"""One figure of two policies: means over the examples that both were scored on, and their difference with the 95 %
interval `low` to `high`. Null where no examples can be paired."""


def compared_evaluations(reader: StoreReader, a: str, b: str) -> pl.DataFrame:
    """Return how the policies of two runs differ on held-out examples; columns as in EVALUATIONS. Raises NotThere.

    Policies of the same version are paired, and the last ones of a set.
    """
    evaluations = [scored_evaluations(reader, run) for run in (a, b)]
    sides = [{(one.set_name, one.version): (one, scores) for one, scores in of_run} for of_run in evaluations]
    last = [dict(sorted(side)) for side in sides]  # of each set the greatest version
    pairs: Iterable[Any] = [(name, version, version) for name, version in sides[0] if (name, version) in sides[1]]
    pairs = dict.fromkeys((*pairs, *((name, last[0][name], last[1][name]) for name in last[0] if name in last[1])))
    rows: list[dict[str, Any]] = []
    for set_name, *versions in pairs:
        pair = [side[set_name, version] for side, version in zip(sides, versions, strict=True)]
        keys = [[entry.key for entry in recorded.rounds] for recorded, _ in pair]
        about = {"set": set_name, "version_a": versions[0], "version_b": versions[1], "same_work": keys[0] == keys[1]}
        for figure in compare_scores(*(scores for _, scores in pair)):
            values = {"a": figure["before"], "b": figure["after"], **(figure["interval"] or {})}
            rows.append({name: (about | figure | values).get(name) for name in EVALUATIONS})
    return pl.DataFrame(rows, EVALUATIONS)


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


_FIRST_ROLLOUT = """
select one.step, assignment_id, agent, one.environment, one.example_id,
    one.trace_id as trace_id_a, one.reward as reward_a, one.outcome as outcome_a, one.advantage as advantage_a,
    one.reply as reply_a,
    two.trace_id as trace_id_b, two.reward as reward_b, two.outcome as outcome_b, two.advantage as advantage_b,
    two.reply as reply_b
from rows_a as one
join rows_b as two using (assignment_id, agent)
where (one.example_id, one.reply, one.reward, one.outcome, one.advantage)
    is distinct from (two.example_id, two.reply, two.reward, two.outcome, two.advantage)
order by one.place
limit 1
"""


def first_differing_rollout(reader: StoreReader, a: str, b: str) -> dict[str, Any] | None:
    """Return the first two rollouts of one assignment that differ, in the first step of both where any do.

    Values: step, assignment_id, agent, environment, example_id, and of each run, ending in _a and _b: trace_id, reward,
    outcome, advantage, reply. None where no rollout differs. Raises NotThere.
    """
    for step in compare(reader, a, b)["steps"]:
        if step["first_difference"] and not step["only"]:
            works = [(run, reader.history(run).steps[step["step"]].lineages) for run in (a, b)]
            one, two = (traces_of(reader, *work, ("reply",)) for work in works)
            for row in select_from_frames({"rows_a": one.clone, "rows_b": two.clone}, _FIRST_ROLLOUT).to_dicts():
                return row
    return None


class ComparedStep:
    """The rows of the last batch of a step of two runs. Raises NotThere for a step that neither has."""

    def __init__(self, reader: StoreReader, a: str, b: str, step: int) -> None:
        self._reader, self._runs = reader, (a, b)
        steps = [reader.history(run).steps for run in (a, b)]
        numbers = {number for of_run in steps for number in of_run}
        if step not in numbers:
            near = nearest_numbers(numbers, step)
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
