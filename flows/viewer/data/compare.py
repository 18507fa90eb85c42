"""Two runs compared: what `stagecoach diff` finds, as it finds it, and the same as frames, a row for each step."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from flows.runtime.scores import compare_scores as compared_figures
from flows.runtime.scores import recorded_evaluations
from flows.viewer.data.compare_reading import KeptReading, latest
from flows.viewer.library import Library
from flows.views.differences import compare
from flows.views.recorded_rows import MEASURES
from storage.keys import canonical
from tasks.metrics.figures import MEANINGS

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


def compared(library: Library, a: str, b: str) -> Mapping[str, Any]:
    """Return how run `b` differs from run `a`, exactly as `flows.views.differences.compare` does.

    Made anew when one of them has done more. Raises NotThere for an unknown run.
    """
    state = state_of(library, a), state_of(library, b)
    reading = KeptReading(library)
    return latest(library, ("compared", a, b), state, lambda: compare(library.store, a, b, reading=reading))


def compared_steps(library: Library, a: str, b: str) -> pl.DataFrame:
    """Return one row for each step of either run.

    Columns: `step`, `first_difference` (the first stage whose key is another; null where there is none), `only` (the
    side that alone has the step), for each figure of `FIGURES` `NAME_a`, `NAME_b` and `NAME_difference` (b - a), and
    those of `BETWEEN`. Null is what was not measured. Raises NotThere.
    """
    rows = [_step(each) for each in compared(library, a, b)["steps"]]
    schema: dict[str, Any] = {"step": pl.Int64, "first_difference": pl.String, "only": pl.String}
    schema |= {f"{name}_{side}": pl.Float64 for name in FIGURES for side in ("a", "b", "difference")}
    return pl.DataFrame(rows, schema=schema | BETWEEN, orient="row", strict=False)


def compared_evaluations(library: Library, a: str, b: str) -> pl.DataFrame:
    """Return how the policies of two runs differ on held-out examples; columns as in `EVALUATIONS`.

    Policies of the same version are paired, and those that were evaluated last where their versions differ.
    Raises NotThere.
    """
    reading = KeptReading(library)
    configs = {run: library.config(run) for run in (a, b)}
    one, other = (
        {(each.set_name, each.version): each for each in recorded_evaluations(library.store, run, configs[run])}
        for run in (a, b)
    )
    rows: list[dict[str, Any]] = []
    for here, there in _pairs(list(one), list(other)):
        before, after = one[here], other[there]
        pair = compared_figures(reading.scored(before, configs[a]), reading.scored(after, configs[b]))
        same = [each.key for each in before.rounds] == [each.key for each in after.rounds]
        rows += [_evaluation(here, there, figure, same) for figure in pair]
    return pl.DataFrame(rows, schema=EVALUATIONS, orient="row")


def state_of(library: Library, run: str) -> tuple[Any, ...]:
    """Return what a comparison of a run depends on: its finished work, its config and its last event."""
    works = library.frames(run).graph.works.values()
    last = library.store.runs.events(run)[-1]
    return run, last.event, canonical(last.config), frozenset(work.identity for work in works if work.finished)


def _step(found: Mapping[str, Any]) -> dict[str, Any]:
    row = {name: found[name] for name in ("step", "first_difference", "only")}
    for name in FIGURES:
        one, other = found["a"].get(name), found["b"].get(name)
        row |= {f"{name}_a": one, f"{name}_b": other, f"{name}_difference": difference(one, other)}
    return row | {name: found["between"][name] for name in BETWEEN}


def difference(a: float | None, b: float | None) -> float | None:
    """Return b - a; None where either was not measured."""
    return None if a is None or b is None else b - a


def _pairs(
    one: Sequence[tuple[str, int]], other: Sequence[tuple[str, int]]
) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Return the evaluations, by set and version, that are set side by side."""
    pairs = [(each, each) for each in one if each in other]
    for name in dict.fromkeys(name for name, _ in one):
        lasts = [max((each for each in known if each[0] == name), default=None) for known in (one, other)]
        if lasts[0] is not None and lasts[1] is not None and lasts[0] != lasts[1]:
            pairs.append((lasts[0], lasts[1]))
    return pairs


def _evaluation(one: tuple[str, int], other: tuple[str, int], figure: Mapping[str, Any], same: bool) -> dict[str, Any]:
    interval = figure["interval"] or {}
    return {
        "set": one[0],
        "version_a": one[1],
        "version_b": other[1],
        "environment": figure["environment"],
        "figure": figure["figure"],
        "a": figure["before"],
        "b": figure["after"],
        "difference": figure["difference"],
        "low": interval.get("low"),
        "high": interval.get("high"),
        "num_examples": figure["num_examples"],
        "same_work": same,
    }


def figures_of(both: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures that `a` or `b` has, of a step or of several together, with b - a."""
    rows = []
    for name in FIGURES:
        if name in both["a"] or name in both["b"]:
            one, other = both["a"].get(name), both["b"].get(name)
            rows.append({"figure": name, "a": one, "b": other, "difference": difference(one, other)})
    return rows
