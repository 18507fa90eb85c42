"""Numbers, times, lengths, sizes and texts as a person reads them, and tables for a terminal.

None is a dash everywhere, never a zero. Texts that a model, an environment or a person wrote are made harmless and
visible (`visible`), for pages and for terminals: what would act there is shown, not done.

Nothing is taken away in silence. What would act on a terminal, or hide from the eye, is shown by a sign of its own:

- controls, a carriage return too, by their Unicode pictures (U+2400 and on); newline and tab stay as they are;
- what has no picture as its number, such as U+202E in mathematical brackets: the controls from 0x80, all that turns the
  reading direction, zero-width and other format characters, fillers, tags, line and paragraph separators, lone
  surrogates (so the result can always be written as UTF-8) and noncharacters.

Letters and marks of all scripts stay. An emoji keeps its joiners (U+200D, between two emoji) and its variation selector
(U+FE0E or U+FE0F, one, right after a symbol); anywhere else these are shown by number, as a message can be hidden in
them. So are the joiners that some scripts write between letters, the selectors of rare ideographs, and the tags in the
flags of regions: those texts stay readable.

To make HTML of the result is the page's own work: a `<` is a visible character and stays.
"""

import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

DASH = "\u2013"


def number(value: float | int | None, digits: int = 3) -> str:
    """A number in few digits: thousands apart, small ones by their power of ten."""
    if value is None or isinstance(value, str):
        return value or DASH
    if isinstance(value, bool) or not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1000):
        return f"{int(value):,}"
    if abs(value) >= 1000 or round(abs(value)) >= 10**digits:  # else Python would write a power of ten
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def compact_number(value: float | int | None, spec: str = ".3g", none: str = "-") -> str:
    """A number in plain letters, for terminals and markdown: whole ones with commas between thousands."""
    if value is None:
        return none
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) >= 1000):
        return f"{int(value):,}"
    return f"{value:{spec}}"


def fixed_point(value: float | None, sign: str = "") -> str:
    """A reward or a score with three digits after the point; `sign` is + to show that of a positive one too."""
    return "-" if value is None else f"{value:{sign}.3f}"


def with_sign(value: float | None, digits: int = 3) -> str:
    """A number with its sign, also a positive one's."""
    if value is None or isinstance(value, str):
        return value or DASH
    return ("+" if value > 0 else "") + number(value, digits)


def share(value: float | None) -> str:
    """A share of one in per cent."""
    if value is None:
        return DASH
    text = number(100 * value)
    return f"{100 * value:.5g} %" if text == "100" and value != 1 else f"{text} %"  # almost all is not all


def seconds(value: float | None) -> str:
    """A time span in the unit that fits it."""
    if value is None:
        return DASH
    # The borders are where rounding would write 1000 ms, and 60.0 s below.
    if value < 0.9995:
        return f"{1000 * value:.0f} ms"
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def moment(value: str | datetime | None) -> str:
    """A moment to the second, in UTC."""
    if not value:
        return DASH
    when = datetime.fromisoformat(value) if isinstance(value, str) else value
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def short(value: str | None, most: int = 8) -> str:
    """The first characters of a key or an id, by which commands know it too."""
    return DASH if value is None else value[:most]


def line(value: str | None, most: int = 120) -> str:
    """A text on one line, cut."""
    return DASH if value is None else one_line(value, most)


def pretty(value: Any) -> str:
    """JSON, or what was read of it, over lines; no JSON, and what has too many levels, stays as it is."""
    try:
        return json.dumps(json.loads(value) if isinstance(value, str) else value, indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return str(value)


def count(value: float | None) -> str:
    """How many there are: each digit below a million, larger ones in millions or billions."""
    if value is None or abs(value) < 1e6:
        return number(value)
    return _scale(value, 1000.0, ("", " k", " M", " G"))


def size(value: float | None) -> str:
    """Bytes in the unit that fits them."""
    return DASH if value is None else _scale(value, 1024.0, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scale(value: float, base: float, units: tuple[str, ...]) -> str:
    unit, rest = 0, float(value)
    # Below ten thousand every digit is shown: 1234 says more than 1.23 k.
    while rest >= (base if unit else 10 * base) and unit < len(units) - 1:
        rest, unit = rest / base, unit + 1
    return f"{rest:.0f}{units[unit]}" if unit == 0 or rest >= 100 else f"{rest:.3g}{units[unit]}"


def config_value(value: Any) -> str:
    """A setting as a config file has it: text in quotes, nothing as null."""
    return json.dumps(value, ensure_ascii=False, default=str)


FILTERS = {
    each.__name__: each
    for each in (number, with_sign, share, seconds, moment, short, line, pretty, count, size, config_value)
}
"""By the names that templates know them by."""


PRINTED_WIDTH = 160
"""Columns of output that goes to a file or a pipe."""
LONGEST_LINE = 20_000
"""Characters of a line that are printed."""
LONGEST_ROW = 4000
"""Characters of a table's row that are printed, shared by its cells: laying out long ones takes minutes."""


class PlainConsole(Console):
    """A console on which no text acts: neither its control characters nor its brackets mean anything."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Take a text as it is printed by itself or in a table; what acts or hides in it is shown."""
        return super().render_str(visible(text), **options)


def console() -> Console:
    """Return a console that marks nothing up: names of runs may hold brackets.

    Lines break between words where somebody looks; a program that reads them gets each as one.
    """
    width = None if fits_width() else PRINTED_WIDTH
    return PlainConsole(width=width, markup=False, emoji=False, highlight=False, soft_wrap=not fits_width())


COLOURS = {"good": "green", "bad": "red", "warn": "yellow", "going": "cyan"}
"""What colours mean on a terminal; a pipe and NO_COLOR get none."""


def paint(text: str, look: str) -> Text:
    """Return a text in the colour of its look: good, bad, warn or going; of any other look in none."""
    return Text(one_line(text, LONGEST_ROW), style=COLOURS.get(look, ""))


def fits_width() -> bool:
    """Return whether lines have to fit a width: on a terminal, or where COLUMNS says how long they may be."""
    return sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()


def say(line: str) -> None:
    """Print a line; where it does not fit, it goes on below, indented as it begins."""
    line = one_line(line, LONGEST_LINE)
    if fits_width():
        begin = line[: len(line) - len(line.lstrip(" │├└─"))]
        rest = begin.replace("├", "│").replace("└", " ").replace("─", " ") + "  "
        line = "\n".join(_wrap(line, console().width, rest))
    print(line)


def _wrap(text: str, width: int, rest: str = "") -> list[str]:
    """Return a text in lines of at most `width`, broken between words; those after the first begin with `rest`."""
    if cell_len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=rest, break_on_hyphens=False, drop_whitespace=True)


class Grid:
    """Rows as a table, or where that is wider than the terminal, as records: a line for each of a row's values.

    The last `num_optional` columns of a table are left out where it is too wide with them.
    """

    def __init__(
        self, headings: Sequence[str], rows: Sequence[Sequence[str | Text]], left: Container[int], num_optional: int = 0
    ) -> None:
        self.headings, self.rows, self._left, self._num_optional = headings, rows, left, num_optional

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # No column is ever narrowed: a number that is broken over two lines is read as two.
        columns = zip(self.headings, *self.rows, strict=True)
        widths = [max(cell_len(str(cell)) for cell in column) + 2 for column in columns]
        least = len(widths) - self._num_optional
        fitting = [number for number in range(len(widths), least - 1, -1) if sum(widths[:number]) <= options.max_width]
        if not fitting:
            yield Text("\n".join(self._records(options.max_width)))
            return
        table = Table(box=None, padding=(0, 1))
        for place, heading in enumerate(self.headings[: fitting[0]]):
            table.add_column(Text(heading), justify="left" if place in self._left else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row[: fitting[0]]))
        yield table

    def _records(self, width: int) -> Iterator[str]:
        name = max(map(cell_len, self.headings))
        for number, row in enumerate(self.rows):
            if number:
                yield ""
            for heading, value in zip(self.headings, row, strict=True):
                yield from _wrap(f"{heading:<{name}}  {value}".rstrip(), width, " " * (name + 2))


def grid(
    headings: Iterable[str], rows: Iterable[Iterable[Any]], left: Container[int] = (0,), num_optional: int = 0
) -> Grid:
    """Return rows as a table; the columns at the places `left` stand at the left, numbers at the right.

    Long cells are cut: a row of them would fill the screen.
    """
    named = [one_line(heading, LONGEST_ROW) for heading in headings]
    most = LONGEST_ROW // max(len(named), 1)
    cells = [[cell if isinstance(cell, Text) else one_line(str(cell), most) for cell in row] for row in rows]
    return Grid(named, cells, left, num_optional)


def tab_separated(names: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as lines with a tab between values, their names first, for programs.

    Numbers have all their digits, moments are ISO 8601, lists and mappings are JSON; None is empty. Of a long
    value LONGEST_ROW characters are there, in which nothing acts on a terminal.
    """
    return "\n".join("\t".join(map(_plain_cell, row)) for row in (names, *rows))


def _plain_cell(value: Any) -> str:
    if isinstance(value, (list, dict)):
        value = json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, datetime):
        value = value.isoformat()
    return one_line("" if value is None else str(value), LONGEST_ROW)


def markdown_table(headings: Iterable[str], rows: Iterable[Iterable[Any]], numbers: bool = True) -> list[str]:
    """Return rows as the lines of a table in markdown; with `numbers` all columns but the first stand at the right."""
    names = list(headings)
    rule = "|---" + ("|---:" if numbers else "|---") * (len(names) - 1) + "|"
    return [f"| {' | '.join(map(str, cells))} |" if cells is not None else rule for cells in (names, None, *rows)]


BLOCKS = "▁▂▃▄▅▆▇█"


def block_rows(values: Sequence[float | None], low: float, high: float, num_rows: int = 1) -> list[str]:
    """Return values between two bounds as columns of blocks, the top line first; a value that is missing is blank."""
    eighths_per_unit = (8 * num_rows - 1) / (high - low or 1.0)
    heights = [
        0 if value is None or not math.isfinite(value) else 1 + round((value - low) * eighths_per_unit)
        for value in values
    ]
    rows = ([min(8, max(0, height - 8 * row)) for height in heights] for row in reversed(range(num_rows)))
    return ["".join(f" {BLOCKS}"[eighths] for eighths in row) for row in rows]


def sparkline(values: Sequence[float | None], width: int = 48) -> str:
    """Return values as a line of blocks, the lowest to the highest; of more than `width` of them, means of neighbours.

    A value that is missing is a space.
    """
    cells = means(values, width)
    known = [cell for cell in cells if cell is not None]
    return block_rows(cells, min(known, default=0.0), max(known, default=0.0))[0]


def means(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return at most `width` values: of more, the means of neighbours that are finite; None where there is none."""
    num_cells = min(width, len(values))
    ends = [round(place * len(values) / max(num_cells, 1)) for place in range(num_cells + 1)]
    cells = [[value for value in values[a:b] if value is not None and math.isfinite(value)] for a, b in pairwise(ends)]
    return [sum(cell) / len(cell) if cell else None for cell in cells]


def over_width(values: Sequence[float | None], num_steps: int, width: int) -> list[float | None]:
    """Return values stretched so that `num_steps` of them take a width; means of neighbours where they are too many."""
    times = max(1, width // max(1, num_steps, len(values)))
    return [value for value in means(values, width) for _ in range(times)]


EVALUATION_HEADINGS = ("held-out", "policies", "figure", "before", "after", "change", "95% interval", "n")


def environment_title(set_name: str, environment: str) -> str:
    """Return how the environment of a set is called."""
    return f"{set_name}/{environment}" if set_name not in ("", environment) else environment


def interval_text(interval: Mapping[str, float] | None, sign: str = "") -> str:
    """Return a confidence interval in brackets, a dash where there is none; `sign` is + to show the sign."""
    return "-" if interval is None else f"[{interval['low']:{sign}.3f}, {interval['high']:{sign}.3f}]"


def with_interval(value: float | None, of: Mapping[str, Any]) -> str:
    """Return a figure with the confidence interval that is beside it, if there is one; a dash for none."""
    return " ".join([fixed_point(value), *([interval_text(of["interval"])] if of.get("interval") else [])])


def before_after(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """Return how the figures of first and last policies differ as a table."""
    cells = (
        (
            environment_title(row["set"], row["environment"]),
            "{} to {}".format(*row["versions"]),
            row["figure"],
            fixed_point(row["before"]),
            fixed_point(row["after"]),
            fixed_point(row["difference"], "+"),
            interval_text(row["interval"], "+"),
            str(row["num_examples"]),
        )
        for row in rows
    )
    return grid(EVALUATION_HEADINGS, cells, left=(0, 2))


ELLIPSIS = "…"

_UNSEEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad"
    "\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e"  # joiners, marks of direction, fillers, vowels that are not drawn
    "\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ud800-\udfff\ufdd0-\ufdef\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff"
    "\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
    + "".join(f"{chr(plane * 0x10000 + 0xFFFE)}{chr(plane * 0x10000 + 0xFFFF)}" for plane in range(1, 17))
    + "]"
)
"""What stands for itself nowhere; U+200D, U+FE0E and U+FE0F do in emoji."""
_EMOJI = "\u2190-\u21ff\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff"
_SYMBOL = f"#*0-9\xa9\xae\u203c-\u3299{_EMOJI}"
_OUT_OF_PLACE = {
    "\u200d": re.compile(f"\u200d(?:(?<![{_EMOJI}]\u200d)(?<![{_EMOJI}]\ufe0f\u200d)|(?![{_EMOJI}]))"),
    "\ufe0e": re.compile(f"\ufe0e(?<![{_SYMBOL}]\ufe0e)"),
    "\ufe0f": re.compile(f"\ufe0f(?<![{_SYMBOL}]\ufe0f)"),
}
"""What emoji are joined and drawn with, where it is no part of one."""


def visible(text: str) -> str:
    """Return a text in which every character can be seen and none acts; a harmless text comes back as it is.

    `visible(visible(text))` is `visible(text)`. Time is linear in the text, tenths of a second for 10 MB.
    """
    for sign, out_of_place in _OUT_OF_PLACE.items():
        if sign in text:
            text = out_of_place.sub(_visible_sign(sign), text)
    present = "".join(set(text))
    unseen = _UNSEEN.findall(present)
    # A table of all characters of the text: translating one that the table lacks is many times slower.
    table = dict.fromkeys(present) | {sign: _visible_sign(sign) for sign in unseen}
    return text.translate({ord(sign): shown or sign for sign, shown in table.items()}) if unseen else text


def one_line(text: str, most: int) -> str:
    """Return a text visible on one line of at most `most` characters; line ends and tabs are drawn, a cut is marked."""
    head, _ = cut(text, most)
    line = visible(head).replace("\n", "⏎").replace("\t", "⇥")
    if head == text and len(line) <= most:
        return line
    return cut(line, max(most - 1, 0))[0] + ELLIPSIS


_FRAMES = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t]++(?![|+]).*\n)*")


def error_words(text: str, most: int) -> str:
    """Return what an error says on one line of at most `most` characters; of a long one its beginning and its end.

    Of tracebacks in it only the last lines stay: what was raised and why. The end is kept because a wrapped error, and
    what to do about one, stands there.
    """
    text = _FRAMES.sub("", text).strip()
    if len(text) <= most:
        return one_line(text, most)
    end = one_line(text[-(most * 2 // 3) :], most * 2 // 3)
    return f"{one_line(text, most - len(end) - 1)} {end}"


def cut(text: str, most: int) -> tuple[str, int]:
    """Return the first `most` characters of a text, and how many were left out."""
    return text[:most], max(len(text) - most, 0)


def _visible_sign(character: str) -> str:
    """Return the sign of a character that cannot be shown itself."""
    number = ord(character)
    if number < 0x20 or number == 0x7F:
        return chr(0x2400 + number) if number < 0x20 else "\u2421"
    return f"⟨U+{number:04X}⟩"


def describe_scores(scores: Mapping[str, Any]) -> str:
    """Return one environment's scores in a line, with their confidence intervals."""
    figures = {"avg": scores["average"]} | {f"pass@{passes['k']}": passes["estimate"] for passes in scores["pass_at"]}
    intervals = zip(figures.items(), (scores, *scores["pass_at"]), strict=True)
    parts = [f"{name} {with_interval(value, of)}" for (name, value), of in intervals if value is not None]
    if scores["errors"]:
        classes = ", ".join(f"{error} {count}" for error, count in scores["errors"].items())
        parts.append(f"{sum(scores['errors'].values())} of {scores['num_attempts']} failed ({classes})")
    return ", ".join(parts if scores["average"] is not None else ["nothing was scored", *parts])
