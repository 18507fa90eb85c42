"""Viewer: a store that is only read, as polars frames, for a person who writes Python.

    import stagecoach

    store = stagecoach.open("stagecoach-store")
    store                                  # its runs
    store.rollouts("demo", 3).group_by("outcome").len()
    store.frame("step_rewards", "demo")    # any table or view that `stagecoach sql` knows

Results that are committed later are in the next call. Texts in the frames are as they were written: what a model or an
environment wrote may act where it is printed raw; `flows.reporting.formats.visible` makes it harmless.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from configs.errors import did_you_mean
from flows.queries import batch, compare, messages, metrics, rollouts, runs, scores, tokens, trace
from flows.queries.charts import charts
from flows.queries.request import NotThere
from flows.queries.store_reader import StoreReader
from flows.reporting.formats import compact_number, visible
from flows.viewer.rendering import templates
from storage.read.frames import Frames

COLUMNS = (
    *("step", "trace_id", "environment", "example_id", "agent", "prompt", "reply", "reward", "advantage", "outcome"),
    *("detail", "is_truncated", "num_output_tokens", "num_turns", "seconds", "error_class", "policy_version"),
    *("group_id", "rewards", "metrics"),
)
"""What a frame of rollouts has; a frame of steps has as many."""
SHOWN = ("Reward", "Held-out average")
LONGEST = 600
"""Characters of a message that are printed; the frames have all of it."""


class Batch(NamedTuple):
    """The packed batch of a step: the one trained last."""

    rows: pl.DataFrame
    """Update, rank, micro-step, tokens and fill of each row."""
    samples: pl.DataFrame
    """By row and place, each with its trace, reward and advantage."""
    updates: pl.DataFrame
    """What each optimizer step on it measured; no rows before training."""


class Comparison(NamedTuple):
    """Two runs, a and b; differences are b - a."""

    steps: pl.DataFrame
    """Reward and loss of both by step, and the first stage whose key differs."""
    figures: pl.DataFrame
    """Every figure of both by step."""
    evaluations: pl.DataFrame
    """How their policies differ on held-out examples."""


@dataclass(frozen=True, repr=False)
class Rollout:
    """One rollout as a run uses it."""

    run: str
    row: dict[str, Any]
    """Its row in the table traces."""
    outcome: dict[str, Any]
    """Its outcome and the reason, as `stagecoach why --json` has it of each run."""
    messages: pl.DataFrame
    """Parent, role, content, body and counts of tokens, in order."""
    tokens: pl.DataFrame
    """Texts and measurements of its tokens; see view `trace_tokens`."""

    def __repr__(self) -> str:
        reward = compact_number(self.row["reward"])
        lines = [f"rollout {self.row['trace_id']} of run {self.run}: reward {reward}, {self.outcome['outcome']}"]
        for role, content in self.messages.select("role", pl.col("content").fill_null("")).iter_rows():
            more = f" ... ({len(content) - LONGEST} characters more)" if len(content) > LONGEST else ""
            lines.append(f"[{role}] {content[:LONGEST]}{more}")
        return visible("\n".join(lines))


class Plot(NamedTuple):
    """A picture, which a notebook shows."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg


class Viewer:
    """The runs of a store as frames. A run is named, or `latest`; NotThere says what is missing."""

    def __init__(self, store: str | Path) -> None:
        """Open the store at a root, a directory or a URL. Raises LayoutError where there is none."""
        self.reader = StoreReader.at(store)

    def __repr__(self) -> str:
        columns = ("run", "kind", "state", "steps_done", "steps_planned", "last_reward", "held_out", "changed_at")
        return visible(f"store {self.reader.store.root.address}\n{self.runs().select(columns)}")

    def frame(self, name: str, run: str = "latest") -> pl.DataFrame:
        """Return the rows of a table or view that a run uses; SchemaError for an unknown name."""
        return self.tables(run)[name].collect()

    def tables(self, run: str = "") -> Frames:
        """Return all tables and views as lazy frames: the rows that a run uses, or without one all rows."""
        return self.reader.frames(self._name(run) if run else "")

    def runs(self, *, all_columns: bool = False) -> pl.DataFrame:
        """Return all runs, the newest last: state, steps, reward, model, tokens, parent."""
        rows = runs.runs(self.reader)
        return rows if all_columns else rows.drop("look", "message", "bytes", "rewards", "losses")

    def steps(self, run: str = "latest", *, all_columns: bool = False) -> pl.DataFrame:
        """Return one row for each step of a run: the numbers that most look for, or every one, as columns."""
        rows = metrics.steps(self.reader, self._name(run))
        return rows if all_columns else rows[:, : len(COLUMNS)]

    def rollouts(self, run: str = "latest", step: int | None = None, *, all_columns: bool = False) -> pl.DataFrame:
        """Return the rollouts of a step, without one of the last step.

        The columns are COLUMNS, or all those of `traces` with outcome, advantage and verdict, and the texts.
        """
        name = self._name(run)
        number = max(rollouts.steps_of(self.reader, name), default=0) if step is None else step
        lineages = rollouts.lineages_of(self.reader, name, number)
        texts = rollouts.rollout_columns(self.reader, name, lineages, {"prompt", "reply"})
        rows = rollouts.traces_of(self.reader, name, lineages).with_columns(*texts.select("prompt", "reply"))
        return rows if all_columns else rows.select(COLUMNS)

    def plot(self, *names: str, figures: Sequence[str] = SHOWN) -> Plot:
        """Return charts of some runs, or of the latest, by the titles that the charts of a run's page have.

        Reward has a band of one standard deviation, the held-out average its intervals. Raises NotThere.
        """
        lines: dict[str, list[dict[str, Any]]] = {}
        for run in map(self._name, names or ("latest",)):
            numbers = metrics.numbers(self.reader, run)
            steps = [entry.step for entry in numbers]
            for section in charts(numbers, scores.held_out(self.reader, run)):
                for chart in section["charts"]:
                    shown = lines.setdefault(chart["title"], [])
                    for one in chart["series"]:
                        name = f"{run} {one['name']}"
                        shown.append({**one, "name": name, "steps": chart.get("versions", steps)})
        for figure in {*figures} - {*SHOWN, *lines}:
            raise NotThere(f"no figure {figure!r} was measured{did_you_mean(figure, lines)}")
        plots = {figure: lines[figure] for figure in figures if figure in lines}
        return Plot(visible(templates().get_template("plot.html").render(plots=plots)))

    def trace(self, trace_id: str, run: str = "") -> Rollout:
        """Return a rollout by its id, or the first eight characters of it or more.

        Without a run it is as the run has it that computed it.
        """
        reader, found = self.reader, trace.trace_use(self.reader, trace_id, self._name(run) if run else "")
        of_trace = messages.messages(reader, found), tokens.tokens(reader, found)
        return Rollout(found.run, dict(found.row), trace.outcome_of(reader, found), *of_trace)

    def batch(self, run: str, step: int) -> Batch:
        """Return the packed batch of a step. Raises NotThere where it has none."""
        of = batch.packed_step(self.reader, self._name(run), step)
        return Batch(batch.rows(self.reader, of), batch.samples(self.reader, of), batch.updates(self.reader, of))

    def compare(self, a: str, b: str) -> Comparison:
        """Return how run `b` differs from run `a`."""
        comparison = compare.compare(self.reader, self._name(a), self._name(b))
        return Comparison(*(pl.DataFrame(comparison[name]) for name in Comparison._fields))

    def _name(self, run: str) -> str:
        return self.reader.latest() if run == "latest" else run
