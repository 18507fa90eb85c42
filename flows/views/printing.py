"""Printing: tables and sizes for people, on a terminal or into a file.

Texts of models, environments and people go through here: what would act on the terminal is shown, not done.
"""

import sys
from collections.abc import Container, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.viewer.texts import one_line, visible

PRINTED_WIDTH = 160
"""Columns of output that goes to a file or a pipe."""
LONGEST_LINE = 20_000
"""Characters of a line that are printed."""
LONGEST_ROW = 4000
"""Characters of a table's row that are printed, shared by its cells: laying out long ones takes minutes."""


class Plain(Console):
    """A console on which no text acts: neither its control characters nor its brackets mean anything."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Take a text as it is printed by itself or in a table; what acts or hides in it is shown."""
        return super().render_str(visible(text), **options)


def console() -> Console:
    """Return a console that marks nothing up: names of runs may hold brackets."""
    width = None if sys.stdout.isatty() else PRINTED_WIDTH
    return Plain(width=width, markup=False, emoji=False, highlight=False, soft_wrap=True)


def say(line: str) -> None:
    """Print a line: one, whatever is in it."""
    print(one_line(line, LONGEST_LINE))


def grid(headings: Iterable[str], rows: Iterable[Iterable[Any]], left: Container[int] = (0,)) -> Table:
    """Return rows as a table; the columns at the places `left` stand at the left, numbers at the right.

    Long cells are cut: a row of them would fill the screen.
    """
    named = [_cell(heading, LONGEST_ROW) for heading in headings]
    most = LONGEST_ROW // max(len(named), 1)
    table = Table(box=None, padding=(0, 1))
    for place, heading in enumerate(named):
        table.add_column(heading, justify="left" if place in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(str(cell), most) for cell in row))
    return table


def _cell(text: str, most: int) -> Text:
    return Text(one_line(text, most))


def bytes_text(number: float) -> str:
    """Return a number of bytes in the unit that fits it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
