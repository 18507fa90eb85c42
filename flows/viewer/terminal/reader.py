"""A reader of rollouts on the terminal: a list, one rollout after the other with its replies, and a filter.

It reads lines, so that it works wherever one can type.
"""

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from rich.text import Text

from flows.queries.request import BadQuestion, NotThere
from flows.queries.rollout_list import TraceChoice, choose, list_page
from flows.queries.rollouts import lineages_of, search_mask, steps_of, traces_of
from flows.queries.store_reader import StoreReader
from flows.queries.trace import find_trace
from flows.reporting.formats import compact_number, one_line
from flows.viewer.terminal.trace import terminal, trace_parts
from flows.viewer.terminal.trace_body import Wanted

HELP = """\
NUMBER shows a rollout; n or Enter the next one, p the one before; l lists them again; s NUMBER goes to another step;
f NAME=VALUE ... filters (outcome, environment, agent, error, example, search, sort, order), f alone takes that back;
q leaves."""
SIZE = 20
FILTERS = [each.name for each in fields(TraceChoice) if each.name not in ("page", "size", "columns")]
PROMPT = "rollouts> "


def read_rollouts(library: StoreReader, run: str, ask: Callable[[str], str] = input) -> int:
    """Read the rollouts of a run's last step until `q` or the end of the input; return the exit status.

    `ask` prints a prompt and returns a line. Raises NotThere where the run has no rollouts.
    """
    reader = Reader(library, run)
    print(reader.list_lines())
    while True:
        try:
            line = ask(PROMPT)
        except EOFError:
            return 0
        if line.strip() in ("q", "quit"):
            return 0
        try:
            reader.obey(line)
        except (BadQuestion, NotThere, ValueError) as problem:
            print(problem)
        sys.stdout.flush()


class Reader:
    """The rollouts that are read: a step, a filter, and the place of the one that was shown last."""

    def __init__(self, library: StoreReader, run: str) -> None:
        self._library, self._run = library, run
        steps = steps_of(library, run)
        if not steps:
            raise NotThere(f"run {run!r} has no rollouts yet")
        self._step = steps[-1]
        self._choice = TraceChoice(size=SIZE)
        self._place = -1
        self._rows = self._read()

    def obey(self, line: str) -> None:
        """Do what a line says and print what comes of it. Raises BadQuestion, NotThere, ValueError."""
        word, *rest = shlex.split(line) or ["n"]
        match word:
            case "l":
                print(self.list_lines())
            case "n" | "p":
                self._show(self._place + (1 if word == "n" else -1))
            case "f":
                self._choice = self._filter(dict(each.partition("=")[::2] for each in rest))
                self._again()
            case "s":
                lineages_of(self._library, self._run, int(*rest))  # of a step that is not there nothing changes
                self._step = int(*rest)
                self._again()
            case _ if word.isdecimal():
                self._show(int(word) - 1)
            case _:
                print(HELP)

    def _filter(self, asked: Mapping[str, Any]) -> TraceChoice:
        if wrong := [name for name in asked if name not in FILTERS]:
            raise BadQuestion(f"no filter {wrong[0]!r}; there are {', '.join(FILTERS)}")
        choice: TraceChoice = replace(TraceChoice(size=SIZE), **asked)
        choose(self._frame(), choice)  # or what cannot be asked for would stay
        return choice

    def _again(self) -> None:
        self._place, self._rows = -1, self._read()
        print(self.list_lines())

    def _frame(self) -> Any:
        library = self._library.still()
        return traces_of(library, self._run, lineages_of(library, self._run, self._step))

    def _read(self) -> list[dict[str, Any]]:
        frame = self._frame()
        choice = replace(self._choice, size=max(1, frame.height))
        chosen = choose(frame, choice, search_mask(self._library, self._run, frame, choice.search))
        rows: list[dict[str, Any]] = list_page(frame, chosen, choice)["rows"]
        return rows

    def list_lines(self) -> str:
        """Return the rollouts around the one that was shown last, a line for each."""
        first = max(0, self._place - SIZE // 2)
        lines = [f"step {self._step} of {self._run}: {len(self._rows)} rollouts; h for help"]
        for place, row in enumerate(self._rows[first : first + SIZE], first):
            mark = ">" if place == self._place else " "
            said = f"{row['trace_id'][:8]}  {compact_number(row.get('reward')):>7}  {row['outcome'] or '':<10}"
            tried = one_line(f"{row['environment']} {row['example_id']}", 40)
            lines.append(f"{mark}{place + 1:>4}  {said}  {tried}")
        if len(self._rows) > first + SIZE:
            lines.append(f"  ... and {len(self._rows) - first - SIZE} more")
        return "\n".join(lines)

    def _show(self, place: int) -> None:
        if not 0 <= place < len(self._rows):
            raise BadQuestion(f"there are rollouts 1 to {len(self._rows)}")
        self._place = place
        out = terminal()
        out.print(Text(f"rollout {place + 1} of {len(self._rows)}", style="bold"))
        found = find_trace(self._library, self._run, self._rows[place]["trace_id"])
        for part in trace_parts(self._library, found, Wanted(text=True), out):
            out.print(part)
