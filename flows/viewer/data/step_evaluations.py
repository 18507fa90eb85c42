"""Evaluations of a run: which set, and which of its rounds, the rollouts of a piece of work are of."""

from collections.abc import Sequence

import polars as pl

from configs.run import content
from flows.queries.store_reader import Library
from storage.keys import canonical_json
from storage.read.lineage import Graph, Work
from tasks.stages import EVALUATION_ASSIGNMENT


def rounds_of(library: Library, run: str, works: Sequence[Work]) -> pl.DataFrame:
    """Return for each work of rollouts its `key`, the `set` (empty for the one without a name) and the `round`."""
    sets = library.config(run).evaluation.of_sets()
    names = {canonical_json(content(each)): name for name, each in reversed(sets.items())}
    rows = [(work.key, *_place(library.graph, work, names)) for work in works]
    return pl.DataFrame(rows, schema={"key": pl.String, "set": pl.String, "round": pl.Int64}, orient="row")


def _place(graph: Graph, work: Work, names: dict[str, str]) -> tuple[str, int]:
    """Go back to the first assignment of an evaluation: later ones try again what failed before."""
    assigned, number = graph.works.get(work.inputs[EVALUATION_ASSIGNMENT]), 0
    while assigned and assigned.inputs.get(EVALUATION_ASSIGNMENT) in graph.works:
        assigned, number = graph.works[assigned.inputs[EVALUATION_ASSIGNMENT]], number + 1
    said = assigned.entry.section.get("evaluation") if assigned else None
    return (names.get(canonical_json(said), "") if said is not None else ""), number
