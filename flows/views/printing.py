"""Printing: tables and sizes for people, on a terminal or into a file."""

import sys
from collections.abc import Container, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.views.panel import printable

PRINTED_WIDTH = 160
"""Columns of output that goes to a file or a pipe."""


def console() -> Console:
    """Return a console that marks nothing up: names of runs may hold brackets."""
    width = None if sys.stdout.isatty() else PRINTED_WIDTH
    return Console(width=width, markup=False, emoji=False, highlight=False, soft_wrap=True)


def grid(headings: Iterable[str], rows: Iterable[Iterable[Any]], left: Container[int] = (0,)) -> Table:
    """Return rows as a table; the columns at the places `left` stand at the left, numbers at the right."""
    table = Table(box=None, padding=(0, 1))
    for place, heading in enumerate(headings):
        table.add_column(Text(printable(heading)), justify="left" if place in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    return table


def bytes_text(number: float) -> str:
    """Return a number of bytes in the unit that fits it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
