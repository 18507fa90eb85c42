"""Differences between two runs of a store, as plain values: their configs, their keys, and what came of both.

The keys are compared piece by piece along the ledger. A key that two runs share is the same work, bit by bit; a
decision at a gate changes no weights and is no difference in work.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import pyarrow.compute as pc

from configs.errors import ConfigError
from configs.run import RunConfig, content
from flows.recorded import recorded_by
from flows.runtime.prepare import flat, recorded_run
from flows.runtime.scores import EvaluationScores, RecordedEvaluation, recorded_evaluations
from flows.views.recorded_rows import Made, made, together
from flows.views.step_differences import between, detail
from storage.refs import Entry
from storage.store import Store

STAGES = (
    "policy_import",
    "examples",
    "assignment",
    "rollout",
    "regrade",
    "filtering",
    "reference",
    "advantage",
    "packing",
    "gate",
    "training",
    "evaluation",
)
"""The order within a step; `rollout` is whatever made the traces. An evaluation has its policy's version for a step."""
SAME, DIFFERENT, ONLY_A, ONLY_B = "same key", "different key", "only in a", "only in b"
Work = dict[int, dict[str, Entry]]
"""A run's finished work by step and stage."""


class Reading:
    """How what runs recorded is read to be compared; who compares often may keep what was read once."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def made(self, works: Sequence[Mapping[str, Entry]]) -> list[Made]:
        """Return the rows that works, entries by stage, have made."""
        return made(self.store, works)

    def scored(self, recorded: RecordedEvaluation, config: RunConfig) -> EvaluationScores:
        """Return what the rollouts of an evaluation say."""
        return recorded.scored(self.store, config)


def compare(store: Store, a: str, b: str, step: int | None = None, reading: Reading | None = None) -> dict[str, Any]:
    """Return how run `b` differs from run `a`; with `step`, that step's groups and samples too.

    Raises ConfigError for an unknown run, or a step that neither has.
    """
    reading = reading or Reading(store)
    runs, configs = zip(*(recorded_run(store, run) for run in (a, b)), strict=True)
    works = [work_of(store, *each) for each in zip(runs, configs, strict=True)]
    pieces = compared_keys(*works)
    steps = sorted({step for work in works for step, stages in work.items() if is_step(stages)})
    rows = reading.made([works[run].get(each, {}) for run, each in product((0, 1), steps)])
    pairs = dict(zip(steps, zip(rows[: len(steps)], rows[len(steps) :], strict=True), strict=True))
    parted = by_step(pieces)
    told = [{"step": each, **_parted(parted, each), **_both(pair)} for each, pair in pairs.items()]
    found = {
        "runs": [_described(store, *each) for each in zip(runs, configs, works, strict=True)],
        "config": compared_configs(*configs),
        "pieces": pieces,
        "same_work": not pieces or {piece["state"] for piece in counting(pieces)} == {SAME},
        "parting": parting(pieces),
        "steps": told,
        "together": _together(works, pairs),
        "weights_part_at": next((each["step"] for each in told if each["between"]["weights_equal"] is False), None),
        "evaluations": _evaluations(*(_averages(reading, *each) for each in zip(runs, configs, strict=True))),
    }
    return found if step is None else found | {"detail": detail(*_pair_of(step, pairs))}


def work_of(store: Store, run: str, config: RunConfig) -> Work:
    """Return a run's finished work by step and stage, as its last batch of each step was made."""
    recorded = recorded_by(store, run)
    found: Work = {step: dict(each.work) for step, each in recorded.steps.items()}
    for work in list(found.values()):
        if "examples" in work:  # are of the run, not of each step
            found[0] = {"examples": work.pop("examples")} | found.get(0, {})
    if recorded.first_policy is not None:
        found.setdefault(0, {})["policy_import"] = recorded.first_policy
    for entry in store.ledger.entries(run=run):
        if entry.stage == "gate":
            found.setdefault(entry.step, {})["gate"] = entry
    for each in reversed(recorded_evaluations(store, run, config)):  # the first set stands for all
        found.setdefault(each.version, {})["evaluation"] = each.rounds[0]
    return found


def compared_keys(a: Work, b: Work) -> list[dict[str, Any]]:
    """Return every piece of work of either run, in order, with both keys and what they say."""
    cells = [(step, stage) for step in sorted({*a, *b}) for stage in STAGES]
    keys = ((step, stage, *(_key(work, step, stage) for work in (a, b))) for step, stage in cells)
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
    both = {piece["step"] for piece in pieces if piece["a"] and piece["b"] and piece["stage"] != "examples"}
    for piece in counting(pieces):
        if piece["state"] != SAME and piece["step"] in both:
            return {name: piece[name] for name in ("step", "stage", "state")}
    return None


def by_step(pieces: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return by step its `pieces`, `only` (the side that alone has it) and the stage where it parts first.

    Evaluations are of no step. Examples are of the run: a step that is there for their sake alone is none.
    """
    own: dict[int, list[Mapping[str, Any]]] = {}
    for each in pieces:
        if each["stage"] != "evaluation" and not _lone_import(each):
            own.setdefault(each["step"], []).append(each)
    steps = {step: found for step, found in own.items() if any(each["stage"] != "examples" for each in found)}
    return {step: {"pieces": found, **_where_apart(found)} for step, found in steps.items()}


def _lone_import(piece: Mapping[str, Any]) -> bool:
    return piece["stage"] == "policy_import" and piece["state"] in (ONLY_A, ONLY_B)


def _where_apart(own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counted = counting(own)
    made = {each["state"] for each in counted if each["stage"] != "examples"}
    first = next((each["stage"] for each in counted if each["state"] != SAME), None)
    return {"only": next((state for state in (ONLY_A, ONLY_B) if made == {state}), None), "first_difference": first}


def compared_configs(a: RunConfig, b: RunConfig) -> list[dict[str, Any]]:
    """Return the settings that differ, by dotted key; `in_keys` tells those that can change rows. Names always do."""
    old, new = (dict(flat(config.model_dump(mode="json"))) for config in (a, b))
    counting = {key for config in (a, b) for key, _ in flat(content(config, in_place=True))}
    return [
        {"key": key, "a": old.get(key), "b": new.get(key), "in_keys": key in counting}
        for key in dict.fromkeys((*old, *new))
        if key != "name" and (key in old, old.get(key)) != (key in new, new.get(key))
    ]


def _described(store: Store, run: str, config: RunConfig, work: Work) -> dict[str, Any]:
    num_steps = sum(is_step(stages) for stages in work.values())
    return {"run": run, "kind": config.kind, "state": store.runs.events(run)[-1].event, "num_steps": num_steps}


def is_step(stages: Mapping[str, Entry]) -> bool:
    """Say whether a step's work is more than what came in before the first one, and evaluations."""
    return not stages.keys() <= {"policy_import", "examples", "evaluation"}


def _key(work: Work, step: int, stage: str) -> str | None:
    entry = work.get(step, {}).get(stage)
    return None if entry is None else entry.key


def _state(one: str | None, other: str | None) -> str:
    if one is None or other is None:
        return ONLY_B if one is None else ONLY_A
    return SAME if one == other else DIFFERENT


def _parted(parted: Mapping[int, Mapping[str, Any]], step: int) -> dict[str, Any]:
    own = parted.get(step, {})
    return {name: own.get(name) for name in ("first_difference", "only")}


def _both(pair: tuple[Made, Made]) -> dict[str, Any]:
    a, b = pair
    return {"a": a.figures(), "b": b.figures(), "between": between(a, b)}


def _together(works: Sequence[Work], pairs: Mapping[int, tuple[Made, Made]]) -> dict[str, Any]:
    """Return the figures over all steps that both runs have, so that they can be set side by side."""
    both = [step for step in pairs if all(is_step(work.get(step, {})) for work in works)]
    a, b = (together(pairs[step][run] for step in both) for run in (0, 1))
    return {"steps": both, **_both((a, b))}


def _averages(reading: Reading, run: str, config: RunConfig) -> dict[int, float | None]:
    """Return by policy version the mean reward of what an evaluation counts: no opponents, and no errors made again."""
    found: dict[int, float | None] = {}
    for each in reversed(recorded_evaluations(reading.store, run, config)):  # the first set stands for all
        traces = reading.scored(each, config).traces
        found[each.version] = pc.mean(traces.filter(pc.is_null(traces["error_class"]))["reward"]).as_py()
    return found


def _evaluations(a: Mapping[int, float | None], b: Mapping[int, float | None]) -> list[dict[str, Any]]:
    return [{"version": version, "a": a.get(version), "b": b.get(version)} for version in sorted({*a, *b})]


def _pair_of(step: int, pairs: Mapping[int, tuple[Made, Made]]) -> tuple[Made, Made]:
    if step not in pairs:
        raise ConfigError(
            [f"step {step}: neither run has it; there are the steps {', '.join(map(str, pairs)) or 'none'}"]
        )
    return pairs[step]
