"""Indented texts on a terminal: wrapped at the width that there is, without blanks at the ends of lines."""

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

LEAST = 8
"""Columns that a text gets however narrow the terminal is."""
LONG = 100_000
"""Characters from which on lines are broken wherever they are full, and without colours: wrapping takes minutes."""


@dataclass(frozen=True)
class Indented:
    """A text that stands some columns to the right."""

    text: Text
    columns: int = 4

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines."""
        width, before = max(options.max_width - self.columns, LEAST), " " * self.columns
        if len(self.text) > LONG:
            for plain in self.text.plain.expandtabs(8).split("\n"):
                most = width if plain.isascii() else width // 2  # a character takes two columns at most
                for start in range(0, max(len(plain), 1), most):
                    yield Segment(f"{before}{plain[start : start + most]}".rstrip() + "\n")
            return
        for line in self.text.wrap(console, width, overflow="fold"):
            line.rstrip()
            yield Text(before).append_text(line) if line else Text("")
