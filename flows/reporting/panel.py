"""Panel: what a person sees of a run while it runs: one live panel on a terminal, plain lines anywhere else.

Driven by small events from the run's threads, none of which can fail the run or carry markup: text of models is shown
with signs for what would act or hide (`flows.reporting.formats.visible`). Rich draws in a thread of its own.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel as Frame
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flows.reporting.formats import (
    block_rows,
    compact_number,
    describe_scores,
    environment_title,
    fixed_point,
    over_width,
    visible,
)
from flows.reporting.messages import losses_message

PLOT_ROWS = 4
NARROWEST_CHART = 34
"""Columns below which a chart says nothing: a terminal of 80 has two side by side, one of 200 has all."""
CHART_GAP = 2
HELD_OUT, ENTROPY, THROUGHPUT = "held out", "entropy", "tokens/s"
"""Names of charts beside the one of what a step measures."""
KEPT_NOTES = 3
LONGEST_NOTE = 400
REFRESHES_PER_SECOND = 4


class Panel:
    """One run's panel: `with Panel("demo", num_steps=20) as panel: panel.stage(0, "rollout") ...`.

    A run without steps of its own, an evaluation, has 0. It is live on a terminal, unless `plain` is asked for or the
    environment says CI; plain lines go to `stream`.
    """

    def __init__(
        self,
        title: str,
        num_steps: int,
        ui_url: str = "",
        plain: bool = False,
        measure: str = "reward",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        first_step: int = 0,
    ) -> None:
        self.title, self.num_steps, self.ui_url = printable(title), num_steps, ui_url
        self._end = first_step + num_steps
        """The number of the last step, counted from 1: that of the recorded run where steps are replayed."""
        self.measure = measure
        """What the number of a step is: reward, or loss where there are no rewards."""
        self._stream = stream or sys.stdout
        self._clock, self._begun = clock, clock()
        # Notes come from several threads and rich draws in one of its own; a draw may be asked for while it is held.
        self._lock = threading.RLock()
        self._now = self._lost = ""
        self._series: dict[str, list[float | None]] = {measure: [], ENTROPY: [], THROUGHPUT: [], HELD_OUT: []}
        """The values of each chart: by step, and of held-out examples by evaluation."""
        self._seconds: list[float] = []
        self._num_cached = 0
        self._notes: list[str] = []
        self._live = None if plain or not is_terminal(self._stream) else self._start_live()
        if self._live is None:
            facts = ", ".join(filter(None, (f"{num_steps} steps" if num_steps else "", ui_url)))
            self._line(": ".join(filter(None, (self.title, facts))))

    def __enter__(self) -> "Panel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        """Show one event of a run; an event that the panel has no place for is left out."""
        match event:
            case "plan":
                num_found = facts["num_pieces"] - len(facts["missing"])
                self.note(f"{len(facts['missing'])} pieces of work to do, {num_found} cached")
            case "prefect":
                self.ui_url = facts["url"]
                self.note(f"Prefect: {self.ui_url}")
            case "note" | "warning":
                self.note(facts["text"])
            case "stage" if facts["evaluating"]:  # its step is the version of the policy
                self.stage(None, f"evaluation: {facts['stage']}")
            case "stage":
                self.stage(facts["step"], facts["stage"])
            case "starting":
                self.stage(None, f"starting {facts['service']}")
            case "rollouts":
                self.stage(facts["step"], f"rollout {facts['done']}/{facts['wanted']}")
            case "step":
                self.step(facts)
            case "evaluation":
                self.evaluation(facts["version"], facts["scores"], facts.get("set", ""))

    def stage(self, step: int | None, stage: str) -> None:
        """A stage begins; None where it is of no step."""
        with self._lock:
            of_step = f"step {step + 1}/{self._end}  " if self.num_steps and step is not None else ""
            self._now = of_step + printable(stage)

    def step(self, facts: Mapping[str, Any]) -> None:
        """A step is done: its number, reward, `update`, tokens handled, seconds by stage, `metrics`, lost rollouts.

        Of a step that was not `computed` all work was in the ledger: it says nothing of how fast this run is.
        """
        measured = facts if self.measure == "reward" else facts["update"] or {}
        cached, seconds = not facts.get("computed", True), sum(facts["seconds"].values())
        number, lost = facts["step"] + 1, printable(losses_message([facts]))
        values = {
            self.measure: measured.get(self.measure),
            ENTROPY: facts.get("metrics", {}).get("updates/entropy/mean"),
            THROUGHPUT: facts["tokens"] / seconds if seconds > 0 and not cached else None,
        }
        with self._lock:
            for name, value in values.items():
                self._series[name].append(value)
            self._num_cached += cached
            self._seconds += [] if cached else [seconds]
            self._lost = f"step {number}: {lost}" if lost else ""
            if self._live is None:
                pace = f"{_speed(values[THROUGHPUT])}  {seconds:.1f} s  left {duration(self._seconds_left())}"
                head = f"step {number:>{len(str(self._end))}}/{self._end}"
                figure = f"{self.measure} {fixed_point(values[self.measure])}"
                self._line("  ".join(filter(None, (head, figure, lost, "cached" if cached else pace))))

    def evaluation(self, version: int, scores: Sequence[Mapping[str, Any]], set_name: str = "") -> list[str]:
        """A policy was scored on held-out examples; the chart has the mean over environments. Returns the lines shown.

        `scores` are one for each environment, as `flows.reporting.formats.describe_scores` takes them.
        """
        averages = [score["average"] for score in scores if score["average"] is not None]
        with self._lock:
            self._series[HELD_OUT].append(sum(averages) / len(averages) if averages else None)
        lines = [
            f"evaluation of policy {version} on {environment_title(set_name, score['environment'])}: "
            f"{describe_scores(score)}"
            for score in scores
        ]
        for line in lines:
            self.note(line)
        return lines

    def note(self, text: str) -> None:
        """Say something in one line."""
        line = printable(text)[:LONGEST_NOTE]
        with self._lock:
            self._notes = [*self._notes, line][-KEPT_NOTES:]
            if self._live is None:
                self._line(line)

    def close(self) -> None:
        """Leave the last state on the terminal and let go of it; calling it again does nothing."""
        with self._lock:
            live, self._live = self._live, None
            self._now = ""
        # Outside of the lock: it waits for rich's own thread, which takes the lock to draw.
        if live is not None:
            live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the panel; rich calls this some times a second."""
        yield self._draw(options.max_width - 4)  # without the frame and its padding

    def _draw(self, width: int) -> Frame:
        with self._lock:
            done = len(self._series[self.measure])
            head = Table.grid(expand=True)
            head.add_column()
            head.add_column(justify="right")
            cached = f", {self._num_cached} cached" if self._num_cached else ""
            steps = f"{done}/{self.num_steps} steps{cached}" if self.num_steps else ""
            figures = f"{duration(self._clock() - self._begun)} gone"
            parts: list[RenderableType] = [head]
            if self.num_steps:
                last = next((value for value in reversed(self._series[THROUGHPUT]) if value is not None), None)
                figures = f"{_speed(last)}  {figures}  {duration(self._seconds_left())} left"
                bar = Table.grid(expand=True)  # a bar ends no line by itself
                bar.add_row(ProgressBar(total=self.num_steps, completed=done))
                parts += [bar, self._charts(width)]
            head.add_row(Text(self._now or steps), Text(figures))
            lost = [self._lost] if self._lost else []
            parts += [Text(line, no_wrap=True, overflow="ellipsis") for line in (*lost, *self._notes)]
            subtitle = Text(self.ui_url) if self.ui_url else None
            return Frame(Group(*parts), title=Text(self.title), subtitle=subtitle, padding=(0, 1))

    def _start_live(self) -> Live:
        console = Console(file=self._stream)
        # What others print to stderr stands above the panel instead of tearing it.
        live = Live(self, console=console, refresh_per_second=REFRESHES_PER_SECOND, redirect_stderr=True)
        live.start()
        return live

    def _seconds_left(self) -> float | None:
        """Return the seconds to the end at the pace of the last steps; None before the first."""
        # The first steps load and compile: an average over all would promise too late an end for long.
        recent = self._seconds[-5:]
        return sum(recent) / len(recent) * max(0, self.num_steps - len(self._series[self.measure])) if recent else None

    def _charts(self, width: int) -> Table:
        """Return what steps have measured as charts side by side, over the width; the first one in any case."""
        drawn = [name for name, values in self._series.items() if name == self.measure or any(map(_is_known, values))]
        columns = min(len(drawn), max(1, (width + CHART_GAP) // (NARROWEST_CHART + CHART_GAP)))
        charts = [self._chart(name, (width + CHART_GAP) // columns - CHART_GAP) for name in drawn]
        table = Table.grid(padding=(0, CHART_GAP, 0, 0), pad_edge=False)
        for first in range(0, len(charts), columns):
            table.add_row(*charts[first : first + columns])
        return table

    def _chart(self, name: str, width: int) -> Text:
        values = self._series[name]
        last = next(filter(_is_known, reversed(values)), None)
        figure = f"{last or 0:,.0f}" if name == THROUGHPUT else fixed_point(last)
        number = "{:,.0f}".format if name == THROUGHPUT else compact_number
        # Shares and rewards are seen against 1; of the others nobody knows the most beforehand.
        top = 1.0 if name in (self.measure, HELD_OUT) else 0.0
        known = [value for value in values if value is not None and math.isfinite(value)]
        low, high = min([0.0, *known]), max([top, *known])
        # The scale: the greatest and the least value at the left, the first and the last step below.
        scale = [number(high), *[""] * (PLOT_ROWS - 2), number(low)]
        margin, is_evaluation = max(map(len, scale)), name == HELD_OUT
        num_wide = len(values) if is_evaluation else self.num_steps
        stretched = over_width(values, num_wide, width - margin - 1)
        rows = zip(scale, block_rows(stretched, low, high, PLOT_ROWS), strict=True)
        first = 1 if is_evaluation else self._end - self.num_steps + 1
        begin, end = f"{'evaluation' if is_evaluation else 'step'} {first} ", str(first + len(values) - 1)
        room = max(len(stretched) - len(begin), len(end))  # the first steps have fewer columns than the numbers below
        axis = f"{'':{margin}} {begin}{end:>{room}}" if len(values) > 1 else ""
        lines = [f"{name} {figure}", *(f"{label:>{margin}} {line}" for label, line in rows), axis]
        return Text("\n".join(line.ljust(width) for line in lines), no_wrap=True)

    def _line(self, text: str) -> None:
        with suppress(BrokenPipeError):  # nobody reads any more; the run goes on
            print(text, file=self._stream, flush=True)


def _is_known(value: float | None) -> bool:
    return value is not None


def _speed(tokens_per_second: float | None) -> str:
    return "- tokens/s" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"


def is_terminal(stream: TextIO) -> bool:
    """Return whether a live panel would be seen there: a terminal that can draw, and no CI."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")


def printable(text: str) -> str:
    """Return text on one line in which nothing can act on a terminal."""
    return " ".join(visible(text).split())


def duration(seconds: float | None) -> str:
    """Return a time as 0:07, 12:30 or 1:02:03; a dash where it is not known."""
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
