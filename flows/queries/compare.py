"""compare: how two runs of a store differ in settings, results, figures and scores.

Results are compared along the ledger: two runs that share a key share its rows bit by bit. Figures are those that
finished steps wrote to table `metrics`; `compare_rows` compares the rows of one step. A `StoreReader` keeps each
comparison until one of the runs has more work.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import polars as pl

from configs.run import RunConfig, content
from flows.queries.metrics import read_metrics
from flows.queries.scores import compare_scores, recorded_evaluations, scored_evaluations
from flows.queries.store_reader import StoreReader, flat
from storage.keys import canonical_json
from storage.read.lineage import Work
from tasks.metrics.figures import MEANINGS
from tasks.stages import COMPARED, EVALUATION

SAME, DIFFERENT, ONLY_A, ONLY_B = "same key", "different key", "only in a", "only in b"
OF_RUN = ("examples", "policy_import", EVALUATION)
"""Stages whose results belong to the run or to a policy and not to one step."""
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


def compare(reader: StoreReader, a: str, b: str) -> Mapping[str, Any]:
    """Return how run `b` differs from run `a`: the values of `stagecoach diff --json`. Raises NotThere."""
    state = _state(reader, a), _state(reader, b)
    return reader.cache.while_same(("compared", a, b), state, lambda: _compare(reader, a, b))


def _state(reader: StoreReader, run: str) -> tuple[Any, ...]:
    works = reader.frames(run).graph.works.values()
    last = reader.store.runs.events(run)[-1]
    return run, last.event, canonical_json(last.config), frozenset(work.identity for work in works if work.finished)


def _compare(reader: StoreReader, a: str, b: str) -> Mapping[str, Any]:
    configs, works = [reader.config(run) for run in (a, b)], [work_of(reader, run) for run in (a, b)]
    figures = [step_figures(reader, work) for work in works]
    pieces = compared_keys(*works)
    steps = [
        {"step": step, "first_difference": row["first_difference"], "only": row["only"]}
        | _figures_of_both(*(of_run.get(step, {}) for of_run in figures))
        for step, row in by_step(pieces).items()
    ]
    both = [row for row in steps if row["only"] is None]
    return {
        "runs": [_describe_run(reader, *side) for side in zip((a, b), configs, works, strict=True)],
        "config": compared_configs(*configs),
        "pieces": pieces,
        "same_work": not pieces or {piece["state"] for piece in counting(pieces)} == {SAME},
        "parting": parting(pieces),
        "steps": steps,
        "together": {
            "steps": [row["step"] for row in both],
            **{side: total_figures([row[side] for row in both]) for side in "ab"},
        },
        "weights_part_at": next((row["step"] for row in both if row["weights_equal"] is False), None),
        "evaluations": compared_evaluations(reader, a, b).to_dicts(),
    }


def _describe_run(reader: StoreReader, run: str, config: RunConfig, works: Works) -> dict[str, Any]:
    state = reader.store.runs.events(run)[-1].event
    num_steps = sum(not stages.keys() <= {*OF_RUN} for stages in works.values())
    return {"run": run, "kind": config.kind, "state": state, "num_steps": num_steps}


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
    lone_import = [("policy_import", ONLY_A), ("policy_import", ONLY_B)]
    return [
        piece for piece in pieces if piece["stage"] != "gate" and (piece["stage"], piece["state"]) not in lone_import
    ]


def parting(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the step, stage and state of the first difference within steps of both runs; None without one."""
    both = {piece["step"] for piece in pieces if piece["a"] and piece["b"] and piece["stage"] != "examples"}
    for piece in counting(pieces):
        if piece["state"] != SAME and piece["step"] in both:
            return {name: piece[name] for name in ("step", "stage", "state")}
    return None


def by_step(pieces: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return by step its `pieces`, `only` (the side that alone has it) and `first_difference`, a stage.

    A step that has nothing but results of the run (OF_RUN) is no step.
    """
    results: dict[int, list[Mapping[str, Any]]] = {}
    for piece in pieces:
        if piece["stage"] != EVALUATION:
            results.setdefault(piece["step"], []).append(piece)
    steps = {}
    for step, row in results.items():
        states = {piece["state"] for piece in counting(row) if piece["stage"] not in OF_RUN}
        differing = [piece["stage"] for piece in counting(row) if piece["state"] != SAME]
        only = next((state for state in (ONLY_A, ONLY_B) if states == {state}), None)
        if states:
            steps[step] = {"pieces": row, "only": only, "first_difference": differing[0] if differing else None}
    return steps


def step_figures(reader: StoreReader, works: Works) -> dict[int, dict[str, Any]]:
    """Return by finished step its FIGURES, None where one was not measured, and `weights`, the digest of the policy."""
    finished = {step: stages["metrics"] for step, stages in works.items() if "metrics" in stages}
    written = read_metrics(reader.frames(), finished.values(), pl.col("name").is_in(METRICS.values()))
    weights = _weights(reader, works)
    figures: dict[int, dict[str, Any]] = {}
    for step, work in finished.items():
        values = written.get(work.key, {})
        figures[step] = {figure: values.get(("", name)) for figure, name in METRICS.items()}
        counts = {
            name: int(value) for name, value in figures[step].items() if name.startswith("num_") and value is not None
        }
        figures[step] |= counts | {"weights": weights.get(step)}
    return figures


def _weights(reader: StoreReader, works: Works) -> dict[int, str]:
    """Return by trained step the digest of the weights that its last update made."""
    trained = {step: stages["training"] for step, stages in works.items() if "training" in stages}
    rows = reader.frames().rows(trained.values(), "updates").select("key", "version", "update", "weights_sha256")
    last = dict(rows.collect().sort("version", "update").select("key", "weights_sha256").iter_rows())
    return {step: last[work.key] for step, work in trained.items() if work.key in last}


def _figures_of_both(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    digests = a.get("weights"), b.get("weights")
    return {"a": a, "b": b, "weights_equal": digests[0] == digests[1] if all(digests) else None}


def total_figures(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures over several steps: sums of counts, and of all others the mean of the steps that have one.

    The least and greatest reward are those of all steps.
    """
    ends: Mapping[str, Any] = {"reward_min": min, "reward_max": max}
    total = {}
    for name in FIGURES:
        values = [step[name] for step in steps if step.get(name) is not None]
        add = sum if name.startswith("num_") else ends.get(name, fmean)
        total[name] = add(values) if values else None
    return total


def figures_of(both: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures that `a` or `b` has with `difference`, b - a; None where one was not measured."""
    rows = []
    for name in FIGURES:
        a, b = (both[side].get(name) for side in "ab")
        if a is not None or b is not None:
            rows.append({"figure": name, "a": a, "b": b, "difference": None if a is None or b is None else b - a})
    return rows


def compared_steps(reader: StoreReader, a: str, b: str) -> pl.DataFrame:
    """Return one row for each step of either run.

    Columns: `step`; `first_difference` (the first stage whose key differs, null without one); `only` (the side that
    alone has the step); `weights_equal`; for each of FIGURES `NAME_a`, `NAME_b` and `NAME_difference` (b - a). Null is
    a figure that was not measured. Raises NotThere.
    """
    sides = ("a", "b", "difference")
    schema: dict[str, Any] = {"step": pl.Int64, "first_difference": pl.String, "only": pl.String}
    schema |= {"weights_equal": pl.Boolean} | {f"{name}_{side}": pl.Float64 for name in FIGURES for side in sides}
    rows = [
        step | {f"{row['figure']}_{side}": row[side] for row in figures_of(step) for side in sides}
        for step in compare(reader, a, b)["steps"]
    ]
    return pl.DataFrame([{name: row.get(name) for name in schema} for row in rows], schema, strict=False)


EVALUATIONS = {
    **{"set": pl.String, "version_a": pl.Int64, "version_b": pl.Int64, "environment": pl.String, "figure": pl.String},
    **{"a": pl.Float64, "b": pl.Float64, "difference": pl.Float64, "low": pl.Float64, "high": pl.Float64},
    **{"num_examples": pl.Int64, "same_work": pl.Boolean},
}
"""One figure of two policies: means over the examples that both were scored on, and their difference with the 95 %
interval `low` to `high`. Null where no examples can be paired."""


def compared_evaluations(reader: StoreReader, a: str, b: str) -> pl.DataFrame:
    """Return how the policies of two runs differ on held-out examples; columns as in EVALUATIONS. Raises NotThere.

    Policies of the same version are paired, and the last ones of a set where their versions differ.
    """
    evaluations = [scored_evaluations(reader, run) for run in (a, b)]
    sides = [{(one.set_name, one.version): (one, scores) for one, scores in of_run} for of_run in evaluations]
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
