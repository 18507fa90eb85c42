"""Tokens as a page shows them: which are drawn, with all their values, and how they are coloured."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from flows.queries.request import plain
from flows.queries.rollouts import largest_advantage
from flows.queries.store_reader import StoreReader
from flows.queries.tokens import TRAINED_WEIGHTS, tokens, with_texts
from flows.queries.trace import FoundTrace
from storage.read.views import all_views

SIGNED, RISING, NONE = "abcdoefgh", "ABCDEFGH", "-"
"""Shades from far below zero to far above it, from little to much, and of what was not measured."""
STEPS = len(SIGNED) // 2
_TABLE = """
advantage         | advantage            | advantage         | ±
rl_weight         | rl weight            | rl_weight         | ±
ce_weight         | ce weight            | ce_weight         | ±
ref_kl_weight     | ref_kl weight        | ref_kl_weight     | ±
trained_rl_weight | rl weight as trained | trained_rl_weight | ±
engine            | engine log-prob      | engine_logprob    | p 0.99 0.9 0.7 0.5 0.25 0.1 0.01
learner           | learner log-prob     | learner_logprob   | p 0.99 0.9 0.7 0.5 0.25 0.1 0.01
ratio             | importance ratio     | log_ratio         | ± 0.001 0.01 0.1 0.5
mismatch          | mismatch KL          | mismatch          | > 1e-8 1e-6 1e-5 1e-4 1e-3 1e-2 1e-1
entropy           | entropy              | entropy           | > 0.01 0.1 0.3 0.6 1 2 4
reference         | reference log-prob   | reference_logprob | p 0.99 0.9 0.7 0.5 0.25 0.1 0.01
signal            | reference signal     | signal            | ±
outside           | trust region         | outside           | x:outside i:inside
policy            | versions older       | policy_age        | > 1 2 3 4 5 6 7
mask              | sampled or given     | sampled           | s:sampled u:given
content           | body or template     | is_content        | p:body t:template
trained           | trained              | trained           | y:trained n:not
"""
"""Name, label, column of view `trace_tokens` and scale of each colouring.

A scale has the sizes that divide its shades: of values around zero (±; without sizes, quarters of the largest), from
zero on (>), or of log-probs, whose sizes are probabilities (p). Of a flag it has shade and label of yes and of no.
"""


@dataclass(frozen=True)
class Colouring:
    """One way to colour tokens by a column."""

    name: str
    label: str
    column: str
    kind: str
    """±, >, p, or the shade and label of yes."""
    edges: tuple[str, ...]

    @cached_property
    def letters(self) -> str:
        """The shades, a letter each."""
        flags = f"{self.kind[0]}{self.edges[0][0]}" if ":" in self.kind else ""
        return flags or (SIGNED if self.kind == "±" else RISING)

    @property
    def description(self) -> str:
        """The meaning of the column that is named so, or else of the coloured one."""
        columns = all_views()["trace_tokens"].columns
        return columns.get(self.name, columns[self.column])

    def _sizes(self, largest: float) -> list[float]:
        sizes = [float(edge) for edge in self.edges] or [largest * step / STEPS for step in range(1, STEPS + 1)]
        return [-math.log(size) for size in sizes] if self.kind == "p" else sizes

    def shades(self, tokens: pl.DataFrame, largest: float) -> str:
        """Return a letter for each token; `largest` is the size of the column that has the deepest shade."""
        if ":" in self.kind:
            letters = {True: self.letters[0], False: self.letters[1]}
            return "".join(letters.get(value, NONE) for value in tokens[self.column])
        values = tokens[self.column].cast(pl.Float64).to_numpy()
        edges = self._sizes(largest)
        if not self.edges:
            # The smallest size that is not zero has a shade, and rounding moves no quarter of the largest to the next.
            edges = [float(np.nextafter(0.0, 1.0)), *(size * (1 + 1e-6) for size in self._sizes(largest or 1.0)[:-1])]
        steps = np.searchsorted(edges, np.abs(np.nan_to_num(values)), "right")
        places = STEPS + np.where(values < 0, -steps, steps) if self.kind == "±" else steps
        return "".join(NONE if np.isnan(v) else self.letters[place] for v, place in zip(values, places, strict=True))

    def legend(self, largest: float) -> list[tuple[str, str]]:
        """Return the letters with their meanings."""
        edges = self.edges or [f"{size:.3g}" for size in self._sizes(largest)]
        if ":" in self.kind:
            labels = [self.kind[2:], edges[0][2:]]
        elif self.kind == "±":
            labels = [*(f"-{edge}" for edge in reversed(edges)), "0", *(f"+{edge}" for edge in edges)]
        else:
            first, sign = (">", "≤") if self.kind == "p" else ("<", "≥")
            labels = [f"{first} {edges[0]}", *(f"{sign} {edge}" for edge in edges)]
        return list(zip(self.letters, labels, strict=True))


def _colouring(line: str) -> Colouring:
    name, label, column, scale = (cell.strip() for cell in line.split("|"))
    kind, *edges = scale.split()
    return Colouring(name, label, column, kind, tuple(edges))


COLOURINGS = tuple(map(_colouring, _TABLE.strip().splitlines()))
NAMES = ("none", *(colouring.name for colouring in COLOURINGS))
SHARED = {"advantage": "rl_weight", "ce_weight": "ce_weight", "engine": "engine_logprob"}
"""The colouring where none is chosen: the first of these whose column has a value."""


def largest(tokens: pl.DataFrame, column: str) -> float:
    """Return the largest size of a column; 0 where there is none."""
    size = tokens.select(pl.col(column).cast(pl.Float64).abs().max()).item()
    return float(size or 0.0)


def default_colouring(tokens: pl.DataFrame) -> str:
    """Return the colouring that says most of some tokens."""
    return next((name for name, column in SHARED.items() if largest(tokens, column)), "mask")


DRAWN = 4000
"""Tokens that a page draws; of more, only how many there are."""
_BLANKS = re.compile("^ +| +$| {2,}")
Values = dict[str, Any]


def shown_tokens(
    reader: StoreReader, trace: FoundTrace, messages: Sequence[int], start: int = 0
) -> tuple[dict[int, Values], pl.DataFrame]:
    """Return the tokens of messages as values, by message, and the rows of those that are drawn.

    Of each message `num_tokens`, how many were `left_out`, `columns` (a list for each column of `tokens`), `drawn`
    (how each looks) and `shades` (a letter for each token, by colouring). `start` is the first token of the first
    message that is drawn.
    """
    order = pl.DataFrame({"message": list(messages)}, schema={"message": pl.Int32}).with_row_index("order")
    rows = tokens(reader, trace, within=messages, texts=False).join(order, on="message")
    rows = rows.sort("order", "place", maintain_order=True).drop("order")
    if start and messages:
        rows = rows.filter((pl.col("message") != messages[0]) | (pl.col("place") >= start))
    # Texts of those tokens alone that are drawn: a tokenizer is slower than all else here.
    drawn = with_texts(reader, trace, rows.head(DRAWN))
    sizes = {one.name: largest_in_batch(reader, trace, drawn, one.column) for one in COLOURINGS}
    parts: dict[Any, Values] = {
        message: {
            "columns": {name: plain(part[name].to_list()) for name in part.columns if name != "message"},
            "drawn": [drawn_text(*token) for token in part.select("text", "token_id").iter_rows()],
            "shades": {one.name: one.shades(part, sizes[one.name]) for one in COLOURINGS},
        }
        for (message,), part in drawn.group_by("message", maintain_order=True)
    }
    nothing: Values = {"columns": None, "drawn": [], "shades": None}
    values = {
        message: {"num_tokens": count, **parts.get(message, nothing)}
        for message, count in rows.group_by("message", maintain_order=True).len().iter_rows()
    }
    return {
        message: {"left_out": part["num_tokens"] - len(part["drawn"]), **part} for message, part in values.items()
    }, drawn


def colourings(reader: StoreReader, trace: FoundTrace, drawn: pl.DataFrame) -> list[Values]:
    """Return what tokens can be coloured by: name, label, `description`, number of measured tokens, legend."""
    return [
        {
            "name": colouring.name,
            "label": colouring.label,
            "description": colouring.description,
            "num_measured": len(drawn) - drawn[colouring.column].null_count(),
            "legend": [
                {"shade": shade, "label": label}
                for shade, label in colouring.legend(largest_in_batch(reader, trace, drawn, colouring.column))
            ],
        }
        for colouring in COLOURINGS
    ]


def scaled_weights(drawn: pl.DataFrame) -> list[str]:
    """Return the weights, of `TRAINED_WEIGHTS`, with which some token was trained otherwise than its credit says."""
    return [name for name, trained in TRAINED_WEIGHTS.items() if bool((drawn[trained] != drawn[name]).any())]


def largest_in_batch(reader: StoreReader, trace: FoundTrace, drawn: pl.DataFrame, column: str) -> float:
    """Return the largest size of a column of tokens; for the advantage that of the whole batch of rollouts."""
    own = largest(drawn, column)
    # By the batch, so that the same shade means the same in every trace of it.
    return max(own, largest_advantage(reader, trace) or 0.0) if column == "advantage" else own


def drawn_text(text: str | None, number: int) -> str:
    """Return a token as it is drawn: blanks at its ends and line ends by signs; its number where it has no text."""
    if text is None:
        return f"⟨{number}⟩"
    text = text.replace("\t", "⇥").replace("\n", "⏎\n")
    return _BLANKS.sub(lambda blanks: "·" * len(blanks[0]), text) or "∅"


def describe(counts: Mapping[int, Values]) -> Values:
    """Return how many tokens there are in some messages, and how many of them are not drawn."""
    return {name: sum(of_message[name] for of_message in counts.values()) for name in ("num_tokens", "left_out")}
