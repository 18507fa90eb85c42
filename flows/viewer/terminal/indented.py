"""Indented texts on a terminal: wrapped at the width that there is, without blanks at the ends of lines."""

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

LEAST = 8
"""Columns that a text gets however narrow the terminal is."""


@dataclass(frozen=True)
class Indented:
    """A text that stands some columns to the right."""

    text: Text
    columns: int = 4

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines."""
        for line in self.text.wrap(console, max(options.max_width - self.columns, LEAST), overflow="fold"):
            line.rstrip()
            yield Text(" " * self.columns).append_text(line) if line else Text("")
