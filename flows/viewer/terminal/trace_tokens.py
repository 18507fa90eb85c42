"""Tokens of a trace on a terminal as a list: one line each, with all that was measured of it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl
from rich.cells import set_cell_size
from rich.console import Console, RenderableType
from rich.text import Text

from flows.viewer.data.attempts import largest_advantage
from flows.viewer.data.tokenizers import with_texts
from flows.viewer.data.tokens import tokens
from flows.viewer.data.tokens_colourings import chosen
from flows.viewer.data.tokens_shown import scaled
from flows.viewer.data.trace import Found
from flows.viewer.library import Library
from flows.viewer.terminal.colours import MEASURES, Colours
from flows.viewer.texts import one_line
from flows.viewer.words import DASH

if TYPE_CHECKING:
    from flows.viewer.terminal.trace import Wanted

MOST_TOKENS = 400
"""Tokens that are printed; of more, the first."""
NUMBER, TEXT, VALUE = 7, 22, 10
"""Columns of a terminal for a number that says where, for a token's text, for a value."""
COLUMNS = {
    "advantage": "advantage",
    "rl_weight": "rl",
    "trained_rl_weight": "rl-train",
    "ce_weight": "ce",
    "trained_ce_weight": "ce-train",
    "ref_kl_weight": "ref-kl",
    "trained_ref_kl_weight": "kl-train",
    "engine_logprob": "engine",
    "learner_logprob": "learner",
    "log_ratio": "log ratio",
    "mismatch": "mismatch",
    "entropy": "entropy",
    "reference_logprob": "reference",
    "signal": "signal",
    "outside": "outside",
    "trained": "trained",
}
"""What is told of a token, where any token has it, and its heading."""


def listed(
    library: Library, found: Found, rows: pl.DataFrame, own: pl.DataFrame, wanted: "Wanted", out: Console
) -> Iterator[RenderableType]:
    """Yield the tokens of the messages `own` as a table; columns in which no token has a value are left out."""
    read = tokens(library, found, own["message"].to_list())
    read = read if "text" in read.columns else with_texts(library, found, read)
    colour = wanted.colour or chosen(read)
    scale = Colours(colour, read, largest_advantage(library, found))
    shown = read if wanted.whole else read.head(MOST_TOKENS)
    every = sorted((name for name in COLUMNS if _says_something(read, name)), key=MEASURES[colour].column.__ne__)
    room = max(1, (out.width - len(_line(("", "", ""), "", ()))) // VALUE)
    known = every[:room]
    if out.color_system:
        yield Text("\n").append_text(scale.legend())
    yield Text(_line(("message", "place", "id"), "token", [COLUMNS[name] for name in known]), "dim", no_wrap=True)
    for token in shown.iter_rows(named=True):
        yield _told(token, known, scale)
    if every[room:]:
        left_out = ", ".join(COLUMNS[name] for name in every[room:])
        yield Text(f"No room for {left_out} (--width {out.width + VALUE * len(every[room:])}, --json)", "dim")
    if len(read) > len(shown):
        yield Text(f"... {len(read) - len(shown)} more tokens (--messages A:B, --whole)", "dim")


def _says_something(tokens: pl.DataFrame, name: str) -> bool:
    """Say whether any token has a value; weights that are all zero are those of a component without members.

    Those that were trained say something where they are others than those of the credit.
    """
    if name.startswith("trained_"):
        return name.removeprefix("trained_") in scaled(tokens)
    values = tokens[name].drop_nulls()
    return len(values) > 0 and (not name.endswith("_weight") or bool((values != 0).any()))


def _told(token: dict[str, Any], known: Sequence[str], scale: Colours) -> Text:
    """Return the line of a token; its text alone is coloured."""
    text = DASH if token["text"] is None else one_line(token["text"], TEXT)
    numbers = [str(token[name]) for name in ("message", "place", "token_id")]
    line = Text(_line(numbers, text, [_value(token[name]) for name in known]), no_wrap=True, overflow="ignore")
    start = len(_line(numbers, "", ()).rstrip()) + 2
    line.stylize(scale.of(token), start, start + len(text))
    return line


def _line(numbers: Sequence[str], text: str, values: Sequence[str]) -> str:
    """Return a line of columns; wide characters keep them under each other."""
    before = "".join(f"{each:>{NUMBER}}" for each in numbers)
    return f"{before}  {set_cell_size(text, TEXT)}{''.join(f'{each:>{VALUE}}' for each in values)}"


def _value(value: Any) -> str:
    if value is None:
        return DASH
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:.3g}"
