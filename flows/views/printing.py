"""Printing: tables and sizes for people, on a terminal or into a file."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.views.panel import printable

PRINTED_WIDTH = 140
"""Columns of output that goes to a file or a pipe."""


def console() -> Console:
    """Return a console that marks nothing up: names of runs may hold brackets."""
    width = None if sys.stdout.isatty() else PRINTED_WIDTH
    return Console(width=width, markup=False, highlight=False, soft_wrap=True)


def grid(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Return rows as a table, the first column at the left, numbers at the right."""
    table = Table(box=None, padding=(0, 1))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*(printable(str(cell)) for cell in row))
    return table


def bytes_text(number: float) -> str:
    """Return a number of bytes in the unit that fits it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
