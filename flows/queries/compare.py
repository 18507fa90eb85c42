"""compare: how two runs of a store differ, as plain values and as frames.

Settings are compared by key, and work along the ledger: two runs that share a key share its rows bit by bit. Figures
are those that finished steps wrote to table `metrics`. Rows are read of steps whose work differs alone, without columns
that hold a value per token. A `StoreReader` keeps each comparison until one of the runs has more work.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl
import pyarrow.compute as pc

from configs.run import RunConfig, content
from flows.queries.compare_rows import (
    BETWEEN,
    FIGURES,
    Stages,
    Works,
    is_step,
    made_weights,
    step_differences,
    step_figures,
    total_differences,
    total_figures,
)
from flows.queries.request import NotThere
from flows.queries.rollouts import index_of_example, nearest_examples
from flows.queries.scores import compare_scores, recorded_evaluations, scored_evaluations
from flows.queries.store_reader import StoreReader, flat
from storage.keys import canonical_json
from storage.read.lineage import Work
from tasks.stages import COMPARED, EVALUATION, ROLLOUT

SAME, DIFFERENT, ONLY_A, ONLY_B = "same key", "different key", "only in a", "only in b"


def compare(library: StoreReader, a: str, b: str) -> Mapping[str, Any]:
    """Return how run `b` differs from run `a`: the values of `stagecoach diff --json`. Raises NotThere."""
    state = _state(library, a), _state(library, b)
    return library.cached_while(("compared", a, b), state, lambda: _compare(library, a, b))


def _state(library: StoreReader, run: str) -> tuple[Any, ...]:
    works = library.frames(run).graph.works.values()
    last = library.store.runs.events(run)[-1]
    return run, last.event, canonical_json(last.config), frozenset(work.identity for work in works if work.finished)


def _compare(library: StoreReader, a: str, b: str) -> Mapping[str, Any]:
    configs, works = [library.config(run) for run in (a, b)], [work_of(library, run) for run in (a, b)]
    weights = [made_weights(library, work) for work in works]
    figures = [step_figures(library, *side) for side in zip(works, weights, strict=True)]
    pieces = compared_keys(*works)
    stages = by_step(pieces)
    steps = [
        {"step": step, "first_difference": None, "only": None}
        | {name: value for name, value in stages.get(step, {}).items() if name != "pieces"}
        | {"a": figures[0].get(step, {}), "b": figures[1].get(step, {}), "between": between}
        for step, between in step_differences(library, works, figures[0], weights).items()
    ]
    both = [row for row in steps if all(is_step(work.get(row["step"], {})) for work in works)]
    averages = [_average_rewards(library, run) for run in (a, b)]
    return {
        "runs": [_describe_run(library, *side) for side in zip((a, b), configs, works, strict=True)],
        "config": compared_configs(*configs),
        "pieces": pieces,
        "same_work": not pieces or {piece["state"] for piece in counting(pieces)} == {SAME},
        "parting": parting(pieces),
        "intakes": compared_intakes(library, *works),
        "steps": steps,
        "together": {
            "steps": [row["step"] for row in both],
            **{side: total_figures([row[side] for row in both]) for side in "ab"},
            "between": total_differences(both, weights),
        },
        "weights_part_at": next((row["step"] for row in steps if row["between"]["weights_equal"] is False), None),
        "evaluations": [
            {"version": version, "a": averages[0].get(version), "b": averages[1].get(version)}
            for version in sorted({*averages[0], *averages[1]})
        ],
    }


def _describe_run(library: StoreReader, run: str, config: RunConfig, works: Works) -> dict[str, Any]:
    state = library.store.runs.events(run)[-1].event
    return {"run": run, "kind": config.kind, "state": state, "num_steps": sum(map(is_step, works.values()))}


def compared_configs(a: RunConfig, b: RunConfig) -> list[dict[str, Any]]:
    """Return the settings that differ: key (dotted), a, b, and `in_keys`, whether the setting can change rows.

    The name and kind of a run and the section of a replay describe the run and are no settings here.
    """
    old, new = (dict(flat(config.model_dump(mode="json"))) for config in (a, b))
    in_keys = {key for config in (a, b) for key, _ in flat(content(config, in_place=True))}
    return [
        {"key": key, "a": old.get(key), "b": new.get(key), "in_keys": key in in_keys}
        for key in dict.fromkeys((*old, *new))
        if not (key in ("name", "kind") or key.startswith("replay."))
        and (key in old, old.get(key)) != (key in new, new.get(key))
    ]


def work_of(library: StoreReader, run: str) -> Works:
    """Return the finished work of a run, of each step that of its last batch. Raises NotThere for an unknown run."""
    history = library.history(run)
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
    for recorded in reversed(recorded_evaluations(library.store, run, library.config(run))):
        if (rollouts := history.find(recorded.rounds[0].key)) is not None:  # the first set represents all
            works.setdefault(recorded.version, {})[EVALUATION] = rollouts
    return works


def compared_keys(a: Works, b: Works) -> list[dict[str, Any]]:
    """Return each result of either run in order: step, stage, state, and both keys `a` and `b`."""
    pieces = []
    for step in sorted({*a, *b}):
        for stage in COMPARED:
            one, other = (work.get(step, {}).get(stage) for work in (a, b))
            keys = [work and work.key for work in (one, other)]
            state = ONLY_B if one is None else ONLY_A if other is None else SAME if keys[0] == keys[1] else DIFFERENT
            if one or other:
                pieces.append({"step": step, "stage": stage, "state": state, "a": keys[0], "b": keys[1]})
    return pieces


def counting(pieces: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the results that can tell two runs apart.

    A decision at a gate makes no rows. An import of weights in one run alone is no difference: a replay continues from
    the weights of its source.
    """
    return [piece for piece in pieces if piece["stage"] != "gate" and not _lone_import(piece)]


def _lone_import(piece: Mapping[str, Any]) -> bool:
    return piece["stage"] == "policy_import" and piece["state"] in (ONLY_A, ONLY_B)


def parting(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the step, stage and state of the first difference within steps of both runs; None without one."""
    both = {piece["step"] for piece in pieces if piece["a"] and piece["b"] and piece["stage"] != "examples"}
    for piece in counting(pieces):
        if piece["state"] != SAME and piece["step"] in both:
            return {name: piece[name] for name in ("step", "stage", "state")}
    return None


def by_step(pieces: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return by step its `pieces`, `only` (the side that alone has it) and `first_difference`, a stage.

    Evaluations belong to no step. A step that has nothing but examples, which are of the run, is no step.
    """
    steps: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if piece["stage"] != EVALUATION and not _lone_import(piece):
            steps.setdefault(piece["step"], {"pieces": [], "only": None, "first_difference": None})["pieces"] += [piece]
    for step, row in list(steps.items()):
        counted = counting(row["pieces"])
        states = {piece["state"] for piece in counted if piece["stage"] != "examples"}
        row["only"] = next((state for state in (ONLY_A, ONLY_B) if states == {state}), None)
        row["first_difference"] = next((piece["stage"] for piece in counted if piece["state"] != SAME), None)
        if all(piece["stage"] == "examples" for piece in row["pieces"]):
            del steps[step]
    return steps


def compared_intakes(library: StoreReader, a: Works, b: Works) -> dict[str, Any] | None:
    """Return the first step whose groups from the stream of rollouts differ, `step` None without one.

    `only_a` and `only_b` are groups that one run alone took there, or sampled with a policy of another version;
    `num_shared` counts the others. None where one of the runs took no rollouts from a stream.
    """

    def groups(stages: Stages) -> dict[str, int]:
        works = [work for name, work in stages.items() if name.partition(".")[0] == ROLLOUT]
        rows = library.frames().rows(works, "intakes").select("group_id", "policy_version")
        return dict(rows.collect().iter_rows())

    if not all(any(work.slices_of("intakes") for stages in run.values() for work in stages.values()) for run in (a, b)):
        return None
    for step in sorted({*a} & {*b}):
        one, other = groups(a[step]), groups(b[step])
        if one != other:
            only = {
                "only_a": sorted(dict(one.items() - other.items())),
                "only_b": sorted(dict(other.items() - one.items())),
            }
            return {"step": step, **only, "num_shared": len(one.items() & other.items())}
    return {"step": None, "only_a": [], "only_b": [], "num_shared": 0}


def _average_rewards(library: StoreReader, run: str) -> dict[int, float | None]:
    """Return by policy version the mean reward of the rollouts that an evaluation counts, without errors."""
    averages: dict[int, float | None] = {}
    for recorded, scores in reversed(scored_evaluations(library, run)):  # the first set represents all
        traces = scores.traces
        averages[recorded.version] = pc.mean(traces.filter(pc.is_null(traces["error_class"]))["reward"]).as_py()
    return averages


def figures_of(both: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures that `a` or `b` has with `difference`, b - a; None where one was not measured."""
    rows = []
    for name in FIGURES:
        a, b = (both[side].get(name) for side in "ab")
        if name in both["a"] or name in both["b"]:
            rows.append({"figure": name, "a": a, "b": b, "difference": None if a is None or b is None else b - a})
    return rows


def compared_steps(library: StoreReader, a: str, b: str) -> pl.DataFrame:
    """Return one row for each step of either run.

    Columns: `step`; `first_difference` (the first stage whose key differs, null without one); `only` (the side that
    alone has the step); for each of FIGURES `NAME_a`, `NAME_b` and `NAME_difference` (b - a); and BETWEEN, without the
    lists. Null is a figure that was not measured. Raises NotThere.
    """
    between = {name: kind for name, kind in BETWEEN.items() if not name.startswith("kept_only")}
    schema: dict[str, Any] = {"step": pl.Int64, "first_difference": pl.String, "only": pl.String}
    schema |= {f"{name}_{side}": pl.Float64 for name in FIGURES for side in ("a", "b", "difference")} | between
    rows = [
        {name: value for name, value in (step | step["between"]).items() if name in schema}
        | {f"{row['figure']}_{side}": row[side] for row in figures_of(step) for side in ("a", "b", "difference")}
        for step in compare(library, a, b)["steps"]
    ]
    return pl.DataFrame(rows, schema=schema, orient="row", strict=False)


EVALUATIONS = {
    **{"set": pl.String, "version_a": pl.Int64, "version_b": pl.Int64, "environment": pl.String, "figure": pl.String},
    **{"a": pl.Float64, "b": pl.Float64, "difference": pl.Float64, "low": pl.Float64, "high": pl.Float64},
    **{"num_examples": pl.Int64, "same_work": pl.Boolean},
}
"""One figure of two policies: means over the examples that both were scored on, and their difference with the 95 %
interval `low` to `high`. Null where no examples can be paired."""


def compared_evaluations(library: StoreReader, a: str, b: str) -> pl.DataFrame:
    """Return how the policies of two runs differ on held-out examples; columns as in EVALUATIONS. Raises NotThere.

    Policies of the same version are paired, and the last ones of a set where their versions differ.
    """
    sides = [
        {
            (recorded.set_name, recorded.version): (recorded, scores)
            for recorded, scores in scored_evaluations(library, run)
        }
        for run in (a, b)
    ]
    pairs = [(name, name) for name in sides[0] if name in sides[1]]
    for set_name in dict.fromkeys(name for name, _ in sides[0]):
        last = [max((name for name in side if name[0] == set_name), default=None) for side in sides]
        if last[0] and last[1] and last[0] != last[1]:
            pairs.append((last[0], last[1]))
    rows: list[dict[str, Any]] = []
    for name_a, name_b in pairs:
        (recorded_a, scores_a), (recorded_b, scores_b) = sides[0][name_a], sides[1][name_b]
        same = [entry.key for entry in recorded_a.rounds] == [entry.key for entry in recorded_b.rounds]
        shared = {"set": name_a[0], "version_a": name_a[1], "version_b": name_b[1], "same_work": same}
        for figure in compare_scores(scores_a, scores_b):
            values = {name: figure[name] for name in ("environment", "figure", "difference", "num_examples")}
            interval = figure["interval"] or {"low": None, "high": None}
            rows.append({**shared, **values, "a": figure["before"], "b": figure["after"], **interval})
    return pl.DataFrame(rows, schema=EVALUATIONS, orient="row")


ATTEMPTS = (
    *("side", "run", "step", "for_training", "trace_id", "key", "agent", "reward", "error_class", "policy_version"),
    "in_both",
)


def compared_attempts(library: StoreReader, a: str, b: str, environment: str, example_id: str) -> pl.DataFrame:
    """Return one row for each attempt of either run at an example, a's first, by step; both may be the same run.

    Columns: `side` (a or b), run, step (of an evaluation, the version that it scored), for_training, trace_id, key,
    agent, reward, error_class, policy_version, `in_both` (whether the other side has the same rollout). Raises
    NotThere, with the nearest examples, where neither tried it.
    """
    sides = [index_of_example(library, run, environment, example_id) for run in (a, b)]
    if all(rows.is_empty() for rows in sides):
        near = nearest_examples(library, (a, b), environment, example_id)
        hint = f"; the nearest examples are {', '.join(near)}" if near else ""
        raise NotThere(f"neither {a!r} nor {b!r} tried the example {example_id!r} of {environment!r}{hint}")
    named = [
        rows.with_columns(
            side=pl.lit(side), run=pl.lit(run), in_both=pl.col("trace_id").is_in(other["trace_id"].implode())
        )
        for rows, other, side, run in zip(sides, sides[::-1], "ab", (a, b), strict=True)
    ]
    return pl.concat(named).select(ATTEMPTS)
