"""Which pages are asked for in which store, by their stable addresses."""

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from benchmarks.viewing_store import CREDITED, FORK, RUN
from flows.queries.step_history import StepHistory
from flows.viewer import addresses
from storage.read.frames import Frames, existing_store

_CHOSEN = {"sort": "reward", "order": "desc", "page": "2", "outcome": "trained"}


@dataclass(frozen=True)
class Question:
    """One page by what it is, and its address."""

    name: str
    path: str


def questions(root: Path, store: str) -> list[Question]:
    """Return what is asked of a store: of the large one everything, of others what differs there."""
    frames = Frames(existing_store(root))
    lineage = [each for each in StepHistory(frames.graph, RUN).lineages if each.for_training][-1]
    step, key = lineage.traces.step, lineage.traces.key
    columns = ("trace_id", "environment", "example_id", "num_turns")
    traces = frames.rows([lineage.traces], "traces").select(columns).collect().sort("num_turns", "trace_id")
    name, environment, example = traces.row(-1)[:3]
    searched = frames.rows([lineage.traces], "messages").filter(pl.col("trace_id") == name).select("content").collect()
    word = next(text for text in searched["content"] if text).split()[0]
    of_step = [
        Question("step", addresses.step(RUN, step)),
        Question("step, filtered and sorted", addresses.step(RUN, step, **_CHOSEN, environment=environment)),
        Question("step, text searched", addresses.step(RUN, step, search=word)),
        Question("trace", addresses.trace(RUN, name, key)),
        Question("batch", addresses.batch(RUN, step)),
    ]
    if store == "long":  # a step of two rollouts has no second page
        return [each for each in of_step if each.name != "step, filtered and sorted"]
    if store == "wide":
        return of_step
    if store == "thousand":
        return [Question("run", addresses.run(RUN)), Question("search", addresses.search(RUN, word))]
    of_runs = [
        Question("runs", addresses.runs()),
        Question("run", addresses.run(RUN)),
        Question("trace by its id alone", addresses.any_trace(name)),
        Question("example over the history", addresses.example(RUN, environment, example)),
        Question("compare two runs", addresses.compare(RUN, FORK)),
        Question("compare a step", addresses.compare_step(RUN, CREDITED, step)),
    ]
    return of_runs if store == "kept" else [*of_runs, *of_step]  # a step has a few files, whoever kept house
