"""A step: its figures, its groups with rewards side by side, and its traces as a list to filter, sort and search."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from flows.viewer import addresses
from flows.viewer.data import step as data
from flows.viewer.data import step_choice, step_figures, step_search, step_traces
from flows.viewer.data.retired import retired
from flows.viewer.data.step_columns import read_names
from flows.viewer.data.step_mismatch import with_mismatch
from flows.viewer.data.trace_walk import written
from flows.viewer.library import Library
from flows.viewer.page import Asked, Crumb, NotThere, Page
from flows.views.show import GOING, process_gone
from tasks.fates import Chain

CARRIED = ("sort", "order", "columns", "size", "group_sort", "group_order")
"""What stays in the address on the way to the step before or after."""


def page(library: Library, asked: Asked) -> Page:
    """Return a step. Raises NotThere, and BadQuestion where the list of traces is asked for what is not known."""
    run, step = asked.path["run"], asked.place("step")
    chains = step_traces.chains_of(library, run, step)
    frame = step_traces.of_chains(library, run, chains)
    asked_for = (*read_names(asked.text("columns")), asked.text("sort"))
    frame = with_mismatch(library, run, chains, frame, asked_for)
    values = {
        "run": run,
        "step": step,
        "evaluation": None,
        "retired": retired(library, [work for chain in chains for work in step_traces.works_of(chain)]),
        **_of_step(library, run, chains, frame),
        **told(library, run, frame, asked),
        **neighbours(step_traces.steps_of(library, run), step),
        "compared": _parent(library, run, step),
        "carried": {name: asked.query[name] for name in CARRIED if asked.query.get(name)},
    }
    return Page("step.html", f"Step {step}", values, crumbs(run), is_going(library, run))


def told(library: Library, run: str, frame: pl.DataFrame, asked: Asked) -> dict[str, Any]:
    """Return what the traces of a step, or of an evaluation, come to: figures, rewards, groups and the list."""
    choice = data.choice_of(asked)
    chosen = step_choice.choose(frame, choice, step_search.found(library, run, frame, choice.search))
    return {
        "figures": step_figures.figures(frame),
        "histogram": step_figures.histogram(frame),
        "groups": data.group_page(frame, asked),
        "traces": data.listed(frame, chosen, choice),
        "list_asked": written(asked),
    }


def _of_step(library: Library, run: str, chains: Sequence[Chain], frame: pl.DataFrame) -> dict[str, Any]:
    judged = {chain.verdicts.key for chain in chains if chain.verdicts}
    return {
        "stages": sorted({chain.traces.stage for chain in chains}),
        "computed_by": sorted({chain.traces.computed_by for chain in chains} - {run}),
        "finished": all(chain.traces.finished for chain in chains),
        "num_batches": len(chains),
        "num_judged_apart": len(judged),
        "packed": any(chain.batches for chain in chains),
        "updates": step_figures.updates(library, run, chains),
        "policies": step_figures.policies(library, run, frame, chains),
    }


def neighbours(places: Sequence[int], place: int) -> dict[str, int | None]:
    """Return the places before and after one; None at the ends."""
    return {
        "previous": max((each for each in places if each < place), default=None),
        "next": min((each for each in places if each > place), default=None),
    }


def crumbs(run: str) -> tuple[Crumb, ...]:
    """Return the way to what belongs to a run."""
    return (Crumb(run, addresses.run(run)),)


def is_going(library: Library, run: str) -> bool:
    """Say whether a run may still change."""
    last = library.store.runs.events(run)[-1]
    return last.event in GOING and not process_gone(last)


def _parent(library: Library, run: str, step: int) -> str | None:
    """Return the run that this one is a fork of, where that has the same step."""
    parent = library.store.runs.events(run)[-1].parent_run
    if not parent or parent == run:
        return None
    try:
        return parent if step in step_traces.steps_of(library, parent) else None
    except NotThere:  # it was removed
        return None
