"""Compares two runs of a store: their configs, their keys and their results, as plain values and as frames.

The keys are compared piece by piece along the ledger. A key that two runs share is the same work, bit by bit; a
decision at a gate changes no weights and is no difference in work.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import polars as pl
import pyarrow.compute as pc

from configs.errors import ConfigError
from configs.run import RunConfig, content
from flows.queries.compare_rows import (
    MEASURES,
    StepRows,
    differences_between,
    differences_together,
    figures_together,
    read_values,
    rows_of_steps,
    same_rows,
    step_detail,
)
from flows.queries.request import NotThere
from flows.queries.scores import compare_scores, recorded_evaluations, scored_evaluations
from flows.queries.store_reader import StoreReader, flat, recorded_run
from storage.keys import canonical_json
from storage.read.lineage import Work
from storage.store import Store
from tasks.metrics.figures import MEANINGS
from tasks.stages import COMPARED, EVALUATION, ROLLOUT

SAME, DIFFERENT, ONLY_A, ONLY_B = "same key", "different key", "only in a", "only in b"
Works = dict[int, dict[str, Work]]
"""A run's finished work by step and stage; an evaluation has its policy's version for a step."""


def compare(library: StoreReader, a: str, b: str, step: int | None = None, lone: bool = True) -> dict[str, Any]:
    """Return how run `b` differs from run `a`; with `step`, that step's groups and samples too.

    Without `lone` no row is read of steps that one run alone has, and they have no figures. Raises ConfigError for an
    unknown run, or a step that neither has.
    """
    (a, first), (b, second) = (recorded_run(library.store, run) for run in (a, b))
    runs, configs, works = (a, b), (first, second), [works_of(library, run) for run in (a, b)]
    pieces = compared_keys(*works)
    pairs = _pairs(library, works, lone)
    parted = by_step(pieces)
    averages = [_averages(library, run) for run in runs]
    steps = [
        {"step": each, "first_difference": None, "only": None}
        | {name: value for name, value in parted.get(each, {}).items() if name != "pieces"}
        | _both(pair)
        for each, pair in pairs.items()
    ]
    found = {
        "runs": [_describe_run(library.store, *each) for each in zip(runs, configs, works, strict=True)],
        "config": compared_configs(*configs),
        "pieces": pieces,
        "same_work": not pieces or {piece["state"] for piece in counting(pieces)} == {SAME},
        "parting": parting(pieces),
        "intakes": compared_intakes(library.store, *works),
        "steps": steps,
        "together": _together(library, works, pairs),
        "weights_part_at": next((each["step"] for each in steps if each["between"]["weights_equal"] is False), None),
        "evaluations": [
            {"version": version, "a": averages[0].get(version), "b": averages[1].get(version)}
            for version in sorted({*averages[0], *averages[1]})
        ],
    }
    if step is None:
        return found
    if step not in pairs:
        known = ", ".join(map(str, pairs)) or "none"
        raise ConfigError([f"step {step}: neither run has it; there are the steps {known}"])
    one, other = rows_of_steps(library, [work.get(step, {}) for work in works])
    return found | {"detail": step_detail(one, other)}


def _pairs(library: StoreReader, works: Sequence[Works], lone: bool) -> dict[int, tuple[StepRows, StepRows]]:
    """Return for each step of either run the rows that both made of it: of shared steps one object."""
    own = {step: [work.get(step, {}) for work in works] for step in _steps_of(works)}
    of_one = {step for step, both in own.items() if not all(map(is_step, both))}
    pairs = {} if lone else dict.fromkeys(of_one, (StepRows(), StepRows()))
    # Nothing can differ in these, so that their rows need not be read: long runs that part late share nearly all steps,
    # and a replay of the last steps has none of the others.
    equal = {step for step, both in own.items() if step in of_one or same_rows(*both)}
    for shared in (True, False):
        steps = [step for step in own if (step in equal) == shared and step not in pairs]
        found = rows_of_steps(library, [work for step in steps for work in own[step]], shared=shared)
        pairs |= dict(zip(steps, zip(found[::2], found[1::2], strict=True), strict=True))
    return {step: pairs[step] for step in own}


def step_pair(library: StoreReader, a: str, b: str, step: int) -> tuple[StepRows, StepRows]:
    """Return the rows that both runs made of a step: those of its last batch.

    Raises NotThere for an unknown run, or a step that neither has.
    """
    known = steps_of_both(library, a, b)
    if step not in known:
        near = ", ".join(str(each) for each in sorted(known, key=lambda each: (abs(each - step), each))[:5])
        nearest = f"the nearest are {near}" if near else "neither has made one yet"
        raise NotThere(f"neither {a!r} nor {b!r} has step {step}; {nearest}")
    one, other = rows_of_steps(library, [works_of(library, run).get(step, {}) for run in (a, b)])
    return one, other


def steps_of_both(library: StoreReader, a: str, b: str) -> list[int]:
    """Return the steps that either run has, in order. Raises NotThere for an unknown run."""
    return _steps_of([works_of(library, run) for run in (a, b)])


def _steps_of(works: Sequence[Works]) -> list[int]:
    return sorted({step for work in works for step, stages in work.items() if is_step(stages)})


def works_of(library: StoreReader, run: str) -> Works:
    """Return a run's finished work by step and stage. Raises NotThere for an unknown run."""
    state = state_of(library, run)
    return library.cached_while(("finished work", run), state, partial(work_of, library, run))


def work_of(library: StoreReader, run: str) -> Works:
    """Return a run's finished work by step and stage, as its last batch of each step was made."""
    history = library.history(run)
    found: Works = {}
    for step, each in history.steps.items():
        found[step] = {**each.work, **({"gate": each.decision} if each.decision else {})}
        if each.metrics:
            found[step]["metrics"] = each.metrics
    for work in list(found.values()):
        if "examples" in work:  # are of the run, not of each step
            found[0] = {"examples": work.pop("examples")} | found.get(0, {})
    if history.first_policy is not None:
        # Not of the step that asks for it: a replay of later steps brings its weights in at the first of them.
        found.setdefault(0, {})["policy_import"] = history.first_policy
    for recorded in reversed(recorded_evaluations(library.store, run, library.config(run))):
        if (tried := history.find(recorded.rounds[0].key)) is not None:  # the first set stands for all
            found.setdefault(recorded.version, {})[EVALUATION] = tried
    return found


def compared_keys(a: Works, b: Works) -> list[dict[str, Any]]:
    """Return every piece of work of either run, in order, with both keys and what they say."""
    cells = [(step, stage) for step in sorted({*a, *b}) for stage in COMPARED]
    keys = ((step, stage, _key(a, step, stage), _key(b, step, stage)) for step, stage in cells)
    return [
        {"step": step, "stage": stage, "state": _state(one, other), "a": one, "b": other}
        for step, stage, one, other in keys
        if one or other
    ]


def counting(pieces: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the pieces of work that can tell two runs apart.

    A decision at a gate is no work, and weights that only one of them brought in part nothing: a replay goes on from
    those of the run that it goes through again.
    """
    return [piece for piece in pieces if piece["stage"] != "gate" and not _lone_import(piece)]


def parting(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the first piece of work, in a step that both runs have, that is not the same; None where there is none."""
    # A run that is longer does not part from the other: only steps of both can.
    both = {piece["step"] for piece in pieces if piece["a"] and piece["b"] and piece["stage"] != "examples"}
    for piece in counting(pieces):
        if piece["state"] != SAME and piece["step"] in both:
            return {name: piece[name] for name in ("step", "stage", "state")}
    return None


def compared_intakes(store: Store, a: Works, b: Works) -> dict[str, Any] | None:
    """Return the first step whose groups from the stream of rollouts are not the same, `step` None where there is none.

    `only_a` and `only_b` are groups that one run alone took there, or sampled with a policy of another version, and
    `num_shared` counts the others. None where one of the runs took no rollouts from a stream.
    """
    streamed = (any(work.slices_of("intakes") for each in one.values() for work in _rollouts(each)) for one in (a, b))
    if not all(streamed):
        return None
    for step in sorted({*a} & {*b}):
        one, other = (_taken_groups(store, _rollouts(works[step])) for works in (a, b))
        if one.items() != other.items():
            only_a, only_b = (
                sorted(dict(mine.items() - theirs.items())) for mine, theirs in ((one, other), (other, one))
            )
            return {"step": step, "only_a": only_a, "only_b": only_b, "num_shared": len(one.items() & other.items())}
    return {"step": None, "only_a": [], "only_b": [], "num_shared": 0}


def _rollouts(stages: Mapping[str, Work]) -> list[Work]:
    return [work for name, work in stages.items() if name.partition(".")[0] == ROLLOUT]


def _taken_groups(store: Store, works: Iterable[Work]) -> dict[str, int]:
    """Return the groups that a step took from the stream, with the versions of their policies."""
    tables = [store.read(work.slices_of("intakes"), ["group_id", "policy_version"]) for work in works]
    return {row["group_id"]: row["policy_version"] for table in tables for row in table.to_pylist()}


def by_step(pieces: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return by step its `pieces`, `only` (the side that alone has it) and the stage where it parts first.

    Evaluations are of no step. Examples are of the run: a step that is there for their sake alone is none.
    """
    own: dict[int, list[Mapping[str, Any]]] = {}
    for each in pieces:
        if each["stage"] != EVALUATION and not _lone_import(each):
            own.setdefault(each["step"], []).append(each)
    steps = {step: found for step, found in own.items() if any(each["stage"] != "examples" for each in found)}
    return {step: {"pieces": found, **_where_apart(found)} for step, found in steps.items()}


def _lone_import(piece: Mapping[str, Any]) -> bool:
    return piece["stage"] == "policy_import" and piece["state"] in (ONLY_A, ONLY_B)


def _where_apart(own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counted = counting(own)
    states = {each["state"] for each in counted if each["stage"] != "examples"}
    first = next((each["stage"] for each in counted if each["state"] != SAME), None)
    return {"only": next((state for state in (ONLY_A, ONLY_B) if states == {state}), None), "first_difference": first}


def compared_configs(a: RunConfig, b: RunConfig) -> list[dict[str, Any]]:
    """Return the settings that differ, by dotted key; `in_keys` tells those that can change rows.

    The names of the runs, and what makes one of them a replay, are left out.
    """
    old, new = (dict(flat(config.model_dump(mode="json"))) for config in (a, b))
    counting = {key for config in (a, b) for key, _ in flat(content(config, in_place=True))}
    return [
        {"key": key, "a": old.get(key), "b": new.get(key), "in_keys": key in counting}
        for key in dict.fromkeys((*old, *new))
        if not _names_replay(key) and (key in old, old.get(key)) != (key in new, new.get(key))
    ]


def _names_replay(key: str) -> bool:
    # A run's name, and the kind and section of a replay, are described with the run, not among its settings.
    return key in ("name", "kind") or key.startswith("replay.")


def _describe_run(store: Store, run: str, config: RunConfig, work: Works) -> dict[str, Any]:
    num_steps = sum(is_step(stages) for stages in work.values())
    return {"run": run, "kind": config.kind, "state": store.runs.events(run)[-1].event, "num_steps": num_steps}


def is_step(stages: Mapping[str, Work]) -> bool:
    """Say whether a step's work is more than what came in before the first one, and evaluations."""
    return not stages.keys() <= {"policy_import", "examples", EVALUATION}


def _key(works: Works, step: int, stage: str) -> str | None:
    work = works.get(step, {}).get(stage)
    return None if work is None else work.key


def _state(one: str | None, other: str | None) -> str:
    if one is None or other is None:
        return ONLY_B if one is None else ONLY_A
    return SAME if one == other else DIFFERENT


def _both(pair: tuple[StepRows, StepRows]) -> dict[str, Any]:
    a, b = pair
    return {"a": a.figures(), "b": b.figures(), "between": differences_between(a, b)}


def _together(
    library: StoreReader, works: Sequence[Works], pairs: Mapping[int, tuple[StepRows, StepRows]]
) -> dict[str, Any]:
    """Return the figures over all steps that both runs have, so that they can be set side by side."""
    both = [step for step in pairs if all(is_step(work.get(step, {})) for work in works)]
    shared = [step for step in both if pairs[step][0] is pairs[step][1]]
    same = read_values(library.store, [works[0][step] for step in shared])
    found: dict[str, Any] = {"steps": both}
    for name, side in (("a", 0), ("b", 1)):
        own = read_values(library.store, [works[side][step] for step in both if step not in {*shared}])
        rewards, advantages = (pl.concat(parts) for parts in zip(same, own, strict=True))
        found[name] = figures_together([pairs[step][side] for step in both], rewards, advantages)
    return found | {"between": differences_together([pairs[step] for step in both], same[1].count())}


def _averages(library: StoreReader, run: str) -> dict[int, float | None]:
    """Return by policy version the mean reward of what an evaluation counts: no opponents, and no errors made again."""
    found: dict[int, float | None] = {}
    for recorded, scores in reversed(scored_evaluations(library, run)):  # the first set stands for all
        traces = scores.traces
        found[recorded.version] = pc.mean(traces.filter(pc.is_null(traces["error_class"]))["reward"]).as_py()
    return found


FIGURES = (*MEANINGS, *MEASURES)
"""What a step comes to in numbers, by the names that `stagecoach diff` has them by."""
BETWEEN = {
    "num_shared_traces": pl.Int64,
    "num_rewards_changed": pl.Int64,
    "num_shared_samples": pl.Int64,
    "num_advantages_changed": pl.Int64,
    "max_advantage_difference": pl.Float64,
    "mean_advantage_difference": pl.Float64,
    "weights_equal": pl.Boolean,
}
EVALUATIONS = {
    "set": pl.String,
    "version_a": pl.Int64,
    "version_b": pl.Int64,
    "environment": pl.String,
    "figure": pl.String,
    "a": pl.Float64,
    "b": pl.Float64,
    "difference": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "num_examples": pl.Int64,
    "same_work": pl.Boolean,
}
"""One figure of two policies; a and b are means over the examples that both were tried on, low and high bound the
difference with 95 % confidence, over those examples. Null where nothing can be paired."""


def compare_cached(library: StoreReader, a: str, b: str) -> Mapping[str, Any]:
    """Return how run `b` differs from run `a`, as `compare` does; made anew when one of them has done more.

    Raises NotThere for an unknown run.
    """
    state = state_of(library, a), state_of(library, b)
    return library.cached_while(("compared", a, b), state, partial(compare, library, a, b))


def compared_steps(library: StoreReader, a: str, b: str) -> pl.DataFrame:
    """Return one row for each step of either run.

    Columns: `step`, `first_difference` (the first stage whose key is another; null where there is none), `only` (the
    side that alone has the step), for each figure of `FIGURES` `NAME_a`, `NAME_b` and `NAME_difference` (b - a), and
    those of `BETWEEN`. Null is what was not measured. Raises NotThere.
    """
    rows = [_step_row(each) for each in compare_cached(library, a, b)["steps"]]
    schema: dict[str, Any] = {"step": pl.Int64, "first_difference": pl.String, "only": pl.String}
    schema |= {f"{name}_{side}": pl.Float64 for name in FIGURES for side in ("a", "b", "difference")}
    return pl.DataFrame(rows, schema=schema | BETWEEN, orient="row", strict=False)


def compared_evaluations(library: StoreReader, a: str, b: str) -> pl.DataFrame:
    """Return how the policies of two runs differ on held-out examples; columns as in `EVALUATIONS`.

    Policies of the same version are paired, and those that were evaluated last where their versions differ.
    Raises NotThere.
    """
    one, other = (
        {(each.set_name, each.version): (each, scores) for each, scores in scored_evaluations(library, run)}
        for run in (a, b)
    )
    rows: list[dict[str, Any]] = []
    for here, there in _paired_evaluations(list(one), list(other)):
        (before, scores_a), (after, scores_b) = one[here], other[there]
        same = [each.key for each in before.rounds] == [each.key for each in after.rounds]
        shared = {"set": here[0], "version_a": here[1], "version_b": there[1], "same_work": same}
        for figure in compare_scores(scores_a, scores_b):
            own = {name: figure[name] for name in ("environment", "figure", "difference", "num_examples")}
            bounds = figure["interval"] or {"low": None, "high": None}
            rows.append({**shared, **own, "a": figure["before"], "b": figure["after"], **bounds})
    return pl.DataFrame(rows, schema=EVALUATIONS, orient="row")


def state_of(library: StoreReader, run: str) -> tuple[Any, ...]:
    """Return what a comparison of a run depends on: its finished work, its config and its last event."""
    works = library.frames(run).graph.works.values()
    last = library.store.runs.events(run)[-1]
    return run, last.event, canonical_json(last.config), frozenset(work.identity for work in works if work.finished)


def _step_row(found: Mapping[str, Any]) -> dict[str, Any]:
    row = {name: found[name] for name in ("step", "first_difference", "only")}
    for each in figures_of(found):
        row |= {f"{each['figure']}_{side}": each[side] for side in ("a", "b", "difference")}
    return row | {name: found["between"][name] for name in BETWEEN}


def _paired_evaluations(
    one: Sequence[tuple[str, int]], other: Sequence[tuple[str, int]]
) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Return the evaluations, by set and version, that are set side by side."""
    pairs = [(each, each) for each in one if each in other]
    for name in dict.fromkeys(name for name, _ in one):
        # Runs of different length: their last policies are what one wants to know of.
        lasts = [max((each for each in known if each[0] == name), default=None) for known in (one, other)]
        if lasts[0] is not None and lasts[1] is not None and lasts[0] != lasts[1]:
            pairs.append((lasts[0], lasts[1]))
    return pairs


def figures_of(both: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures that `a` or `b` has, of a step or of several together, with b - a; null where not measured."""
    rows = []
    for name in FIGURES:
        if name in both["a"] or name in both["b"]:
            one, other = both["a"].get(name), both["b"].get(name)
            difference = None if one is None or other is None else other - one
            rows.append({"figure": name, "a": one, "b": other, "difference": difference})
    return rows
