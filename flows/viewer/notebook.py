"""The viewer's door for notebooks: the frames behind every page, from a store that is only read.

    import stagecoach

    store = stagecoach.open("stagecoach-store")
    store                                  # the runs; `store.run("demo")` its last steps and what was written
    store.traces("demo", 3).group_by("outcome").len()

What is committed meanwhile is seen by the next call. Texts in the frames are as they were written: what a model or an
environment wrote may act where it is printed raw; `flows.reporting.formats.visible` makes it harmless.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from flows.queries import (
    batch,
    compare,
    compare_rows,
    messages,
    metrics,
    rollouts,
    runs,
    scores,
    tokens,
    trace,
)
from flows.queries.request import NotThere, plain
from flows.queries.step import groups
from flows.queries.store_reader import StoreReader
from flows.queries.tokens import with_texts
from flows.queries.trace import trace_use
from flows.reporting.formats import visible
from flows.viewer.first_look import (
    HEADINGS,
    FirstTable,
    Printable,
    rollout_text,
    run_row,
    shorten,
    step_grid,
    with_prompts,
)
from storage.read.frames import Frames


def open_viewer(store: str | Path) -> "Viewer":
    """Open the store at a root, a directory or a URL, to look at it. Raises LayoutError where there is none."""
    return Viewer(StoreReader.at(store))


class Viewer(Printable):
    """Everything that pages show, as polars frames. A run is named, or `latest`; NotThere says what is not there."""

    def __init__(self, reader: StoreReader) -> None:
        self.reader = reader

    def parts(self) -> Iterable[str | FirstTable]:
        """Return the runs of the store, the newest last."""
        rows = self.runs().to_dicts()
        yield f"store {self.reader.store.root.address}: {len(rows)} runs" + ("" if rows else "; none has begun")
        if rows:
            yield FirstTable(HEADINGS, map(run_row, rows))

    def run(self, name: str = "latest") -> "RunView":
        """One run: what it came to, its steps, and its rollouts with their texts."""
        return RunView(self, self._run_name(name))

    def rollouts(self, run: str = "latest", step: int | None = None) -> pl.DataFrame:
        """The traces of a step, of the last one if none is named, with the columns `prompt` and `reply`."""
        name = self._run_name(run)
        if step is None:
            step = max(rollouts.steps_of(self.reader, name), default=0)
        return with_prompts(self.traces(name, step), self.tables(name).messages)

    def runs(self) -> pl.DataFrame:
        """All runs, the newest last: state, steps, reward, model, tokens, parent."""
        return runs.runs(self.reader)

    def steps(self, run: str = "latest") -> pl.DataFrame:
        """One row for each step of a run, every number of it a column."""
        return metrics.steps(self.reader, self._run_name(run))

    def series(self, run: str = "latest") -> pl.DataFrame:
        """One row for each number of each step: run, step, finished, scope, name, value."""
        return metrics.series(self.reader, self._run_name(run))

    def scores(self, run: str = "latest") -> pl.DataFrame:
        """What the policies of a run scored on held-out examples, with intervals."""
        return scores.scores(self.reader, self._run_name(run))

    def stage_times(self, run: str = "latest") -> pl.DataFrame:
        """When each piece of work that a run uses was done."""
        return self.tables(run).stage_times.collect()

    def slices(self, run: str = "latest") -> pl.DataFrame:
        """The slices that a run uses, own and shared ones."""
        return self.tables(run).slices.collect()

    def traces(self, run: str, step: int) -> pl.DataFrame:
        """One row for each trace of a step, with its outcome, advantage and verdict."""
        return rollouts.traces(self.reader, self._run_name(run), step)

    def evaluation(self, run: str, version: int, set_name: str | None = None) -> pl.DataFrame:
        """The same of an evaluation of a policy, of one set or of all."""
        return rollouts.evaluation_traces(self.reader, self._run_name(run), version, set_name)

    def groups(self, run: str, step: int) -> pl.DataFrame:
        """One row for each group of a step and each agent in it, with what its rollouts earned."""
        return groups(self.reader, self._run_name(run), step)

    def trace(self, trace_id: str, run: str = "") -> "TraceView":
        """A trace by its id, or the first eight characters of it or more.

        Without a run it is as the run has it that computed it.
        """
        return TraceView(self.reader, trace_use(self.reader, trace_id, self._run_name(run) if run else ""))

    def attempts(self, run: str, environment: str, example_id: str) -> pl.DataFrame:
        """All attempts at an example over the history of a run, in training and in evaluations."""
        return rollouts.attempts(self.reader, self._run_name(run), environment, example_id)

    def batch(self, run: str, step: int) -> "BatchView":
        """The packed batch of a step: the one trained last."""
        return BatchView(self.reader, batch.packed_step(self.reader, self._run_name(run), step))

    def compare(self, a: str, b: str) -> "ComparisonView":
        """Two runs side by side."""
        return ComparisonView(self.reader, self._run_name(a), self._run_name(b))

    def tables(self, run: str = "") -> Frames:
        """The stored tables themselves, lazily: the rows that a run uses, or all; `outcomes` and `accounting` too."""
        return self.reader.frames(self._run_name(run) if run else "")

    def page(self, address: str) -> dict[str, Any]:
        """All that the page of an address says, as plain values: `viewer.page("/runs/demo/steps/3")`."""
        # Not at the top: a notebook that never asks for a page needs no templates.
        from flows.viewer.routes import PAGES, parsed_address

        name, asked = parsed_address(address)
        found: dict[str, Any] = plain(PAGES[name].read(self.reader.still(), asked).values)
        return found

    def _run_name(self, run: str) -> str:
        return self.reader.latest() if run == "latest" else run


class RunView(Printable):
    """One run of a store."""

    def __init__(self, viewer: Viewer, name: str) -> None:
        self._viewer, self.name = viewer, name
        known = viewer.runs()
        self._row = known.row(by_predicate=pl.col("run") == name, named=True) if name in known["run"] else None
        if self._row is None:
            raise NotThere(f"there is no run {name!r} in the store; it has: {', '.join(known['run']) or 'none'}")

    @property
    def steps(self) -> pl.DataFrame:
        """One row for each step, every number of it a column."""
        return self._viewer.steps(self.name)

    @property
    def scores(self) -> pl.DataFrame:
        """What its policies scored on held-out examples, with intervals."""
        return self._viewer.scores(self.name)

    def rollouts(self, step: int | None = None) -> pl.DataFrame:
        """The traces of a step, of the last one if none is named, with the columns `prompt` and `reply`."""
        return self._viewer.rollouts(self.name, step)

    def parts(self) -> Iterator[str | FirstTable]:
        """Return its state, its last steps, and the best and the worst rollout of the last step."""
        assert self._row is not None
        yield FirstTable(HEADINGS, [run_row(self._row)])
        steps = self.steps
        if len(steps):
            yield ""
            yield step_grid(steps)
            rows = self.rollouts(steps["step"].max())  # type: ignore[arg-type]
            ordered = rows.sort("reward", "place", descending=[True, False], nulls_last=True).to_dicts()
            for row in ordered[:1] + ordered[1:][-1:]:
                yield ""
                yield rollout_text(row)


class TraceView(Printable):
    """One trace as a run uses it."""

    def __init__(self, reader: StoreReader, found: trace.FoundTrace) -> None:
        self._reader = reader
        self.found = found
        """Its row and the work that it went through."""

    def parts(self) -> Iterator[str]:
        """Return its outcome and its messages."""
        row = self.found.row
        reward = "not scored" if row["reward"] is None else f"reward {row['reward']:.3g}"
        yield f"rollout {row['trace_id']} of run {self.found.run}: {reward}, {self.outcome['outcome']}"
        for message in self.messages.to_dicts():
            yield f"[{visible(message['role'])}] {shorten(message['content'])}"

    @property
    def fields(self) -> dict[str, Any]:
        """Its row in the table traces, with the run, and the key of the work that made it."""
        return {"run": self.found.run, "key": self.found.key, **self.found.row}

    @cached_property
    def outcome(self) -> dict[str, Any]:
        """Its outcome and why, as `stagecoach why --json` has it of each run."""
        return trace.outcome_of(self._reader, self.found)

    @cached_property
    def messages(self) -> pl.DataFrame:
        """Its messages in order: parent, role, content, body, and counts of tokens."""
        return messages.messages(self._reader, self.found)

    @property
    def branches(self) -> list[list[int]]:
        """The ways from a root to each leaf, each a list of messages."""
        return messages.branches(self.messages)

    @cached_property
    def tokens(self) -> pl.DataFrame:
        """Its tokens with their texts and all that was measured of them; see `flows.queries.tokens`."""
        found = tokens.tokens(self._reader, self.found)
        return found if "text" in found.columns else with_texts(self._reader, self.found, found)


class BatchView:
    """The packed batch of a step."""

    def __init__(self, reader: StoreReader, of: batch.PackedStep) -> None:
        self._reader = reader
        self.of = of
        """The work that made it, and what it was made of."""

    @property
    def rows(self) -> pl.DataFrame:
        """Its rows: update, rank, micro-step, tokens, fill."""
        return batch.rows(self._reader, self.of)

    @property
    def samples(self) -> pl.DataFrame:
        """Its samples by row and place, each with its trace, reward and advantage."""
        return batch.samples(self._reader, self.of)

    @property
    def updates(self) -> pl.DataFrame:
        """What each optimizer step on it measured; no rows before training."""
        return batch.updates(self._reader, self.of)

    def tokens(self, row: int) -> pl.DataFrame:
        """The tokens of a row as the learner was given them."""
        return batch.tokens(self._reader, self.of, row)


class ComparisonView:
    """Two runs, `a` and `b`, side by side; differences are b less a."""

    def __init__(self, reader: StoreReader, a: str, b: str) -> None:
        self._reader, self.a, self.b = reader, a, b

    @property
    def steps(self) -> pl.DataFrame:
        """One row for each step of either run: figures of both, and where their work parts."""
        return compare.compared_steps(self._reader, self.a, self.b)

    @property
    def evaluations(self) -> pl.DataFrame:
        """How their policies differ on held-out examples."""
        return compare.compared_evaluations(self._reader, self.a, self.b)

    def traces(self, step: int) -> pl.DataFrame:
        """One row for each rollout of either run at a step, those of both once."""
        return compare_rows.compared_traces(self._reader, self.a, self.b, step)

    def groups(self, step: int) -> pl.DataFrame:
        """One row for each group of either run at a step; groups at the same example are paired."""
        return compare_rows.compared_groups(self._reader, self.a, self.b, step)

    def samples(self, step: int) -> pl.DataFrame:
        """The advantages of the training samples that both runs have at a step."""
        return compare_rows.compared_samples(self._reader, self.a, self.b, step)

    def attempts(self, environment: str, example_id: str) -> pl.DataFrame:
        """The attempts of both runs at an example."""
        return compare_rows.compared_attempts(self._reader, self.a, self.b, environment, example_id)
