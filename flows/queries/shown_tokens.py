"""Tokens of a page: which of them are drawn, with all their values and the shades of every colouring."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from flows.queries.rollouts import largest_advantage
from flows.queries.store_reader import StoreReader
from flows.queries.token_colours import COLOURINGS, largest
from flows.queries.tokens import TRAINED_WEIGHTS, tokens, with_texts
from flows.queries.trace import FoundTrace

DRAWN = 4000
"""Tokens that a page draws; of more, only how many there are."""
DIGITS = 9
"""Significant digits of a value: enough to tell any two that tables hold apart, and fewer to send than all."""
EXACT = {*TRAINED_WEIGHTS, *TRAINED_WEIGHTS.values()}
"""What is told in all its digits: sums of it are those of the batch row."""
_BLANKS = re.compile("^ +| +$| {2,}")
Values = dict[str, Any]


def shown_tokens(
    library: StoreReader, found: FoundTrace, messages: Sequence[int], start: int = 0
) -> tuple[dict[int, Values], pl.DataFrame]:
    """Return the tokens of messages as values, by message, and the rows of those that are drawn.

    Of each message `num_tokens`, how many were `left_out`, `columns` (a list for each of `data.tokens.TOKENS`), `drawn`
    (how each looks) and `shades` (a letter for each token, by colouring). `start` is the first token of the first
    message that is drawn.
    """
    whole = _in_order(tokens(library, found, within=messages, texts=False), messages)
    if start and messages:
        whole = whole.filter((pl.col("message") != messages[0]) | (pl.col("place") >= start))
    drawn = with_texts(library, found, whole.head(DRAWN))
    sizes = {each.name: _largest(library, found, drawn, each.column) for each in COLOURINGS}
    shades = {each.name: each.shades(drawn, sizes[each.name]) for each in COLOURINGS}
    parts, at = {}, 0
    for (message,), part in drawn.group_by("message", maintain_order=True):
        of_part = {name: letters[at : at + len(part)] for name, letters in shades.items()}
        parts[message] = _drawn(part) | {"shades": of_part}
        at += len(part)
    nothing: Values = {"columns": None, "drawn": [], "shades": None}
    counts = dict(whole.group_by("message").len().iter_rows())
    told = {message: parts.get(message, nothing) for message in counts}
    return {
        message: {"num_tokens": count, "left_out": count - len(told[message]["drawn"]), **told[message]}
        for message, count in counts.items()
    }, drawn


def _in_order(rows: pl.DataFrame, messages: Sequence[int]) -> pl.DataFrame:
    """Return the tokens of messages in the order in which these are given."""
    order = pl.DataFrame({"message": list(messages)}, schema={"message": pl.Int32}).with_row_index("order")
    return rows.join(order, on="message").sort("order", "place", maintain_order=True).drop("order")


def _drawn(part: pl.DataFrame) -> Values:
    """Return the values of tokens as columns, and how each is drawn."""
    names = [name for name in part.columns if name != "message"]
    pairs = zip(part["text"], part["token_id"], strict=True)
    return {
        "columns": {name: [plain_number(value, name in EXACT) for value in part[name]] for name in names},
        "drawn": [drawn_text(text, number) for text, number in pairs],
    }


def colourings(library: StoreReader, found: FoundTrace, drawn: pl.DataFrame) -> list[Values]:
    """Return what tokens can be coloured by: name, label, told, how many tokens were measured, and the legend."""
    return [
        {
            "name": each.name,
            "label": each.label,
            "told": each.told,
            "num_measured": len(drawn) - drawn[each.column].null_count(),
            "legend": [
                {"shade": shade, "label": label}
                for shade, label in each.legend(_largest(library, found, drawn, each.column))
            ],
        }
        for each in COLOURINGS
    ]


def scaled(drawn: pl.DataFrame) -> list[str]:
    """Return the weights, of `TRAINED_WEIGHTS`, with which some token was trained otherwise than its credit says."""
    return [name for name, trained in TRAINED_WEIGHTS.items() if bool((drawn[trained] != drawn[name]).any())]


def _largest(library: StoreReader, found: FoundTrace, drawn: pl.DataFrame, column: str) -> float:
    own = largest(drawn, column)
    return max(own, largest_advantage(library, found) or 0.0) if column == "advantage" else own


def plain_number(value: Any, exact: bool = False) -> Any:
    """Return a number in `DIGITS` digits, or all, what is not finite by its name; everything else as it is."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if exact else float(f"{value:.{DIGITS}g}")


def drawn_text(text: str | None, number: int) -> str:
    """Return a token as it is drawn: blanks at its ends and line ends by signs; its number where it has no text."""
    if text is None:
        return f"⟨{number}⟩"
    text = text.replace("\t", "⇥").replace("\n", "⏎\n")
    return _BLANKS.sub(lambda blanks: "·" * len(blanks[0]), text) or "∅"


def describe(counts: Mapping[int, Values]) -> Values:
    """Return how many tokens there are in some messages, and how many of them are not drawn."""
    return {name: sum(each[name] for each in counts.values()) for name in ("num_tokens", "left_out")}
