"""Tokens as a page shows them: which are drawn, with all their values, and how they are coloured."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ShadeScale:
    """How the values of a column become shades, a letter each."""

    letters: str
    """The shades: SIGNED, RISING, or those of `category`."""
    labels: tuple[str, ...] = ()
    """What each shade is; of SIGNED without labels, shares of the largest size of the column."""
    edges: tuple[float, ...] = ()
    """Sizes that divide the shades, each part of the shade above it."""
    category: pl.Expr | None = None
    """The letter of each token, instead of sizes."""
    depth: str = ""
    """What the depth of a shade says, if its labels do not."""


def _sizes(*edges: float) -> ShadeScale:
    return ShadeScale(RISING, (f"< {edges[0]:g}", *(f"≥ {edge:g}" for edge in edges)), edges)


def _flag(column: str, yes: str, no: str) -> ShadeScale:
    """Return the scale of a flag; the first letter of `yes` and of `no` is its shade."""
    letter = pl.when(column).then(pl.lit(yes[0])).when(~pl.col(column)).then(pl.lit(no[0]))
    return ShadeScale(yes[0] + no[0], (yes[2:], no[2:]), category=letter)


_LOG_RATIOS = (0.001, 0.01, 0.1, 0.5)
_RATIOS = [math.exp(size) for size in _LOG_RATIOS]
_PROBABILITIES = (0.99, 0.9, 0.7, 0.5, 0.25, 0.1, 0.01)
_AUTHOR = (
    pl.when("sampled")
    .then(pl.lit("s"))
    .when("is_content")
    .then(pl.lit("p"))
    .when(~pl.col("is_content"))
    .then(pl.lit("t"))
    .otherwise(pl.lit("u"))
)
SCALES = {
    "advantage": ShadeScale(SIGNED, depth="; the deepest shade is the largest of its batch of rollouts"),
    "around zero": ShadeScale(SIGNED),
    "probability": ShadeScale(
        RISING,
        (f"p > {_PROBABILITIES[0]:g}", *(f"≤ {edge:g}" for edge in _PROBABILITIES)),
        tuple(-math.log(edge) for edge in _PROBABILITIES),
        depth="; deeper is less likely",
    ),
    "ratio": ShadeScale(
        SIGNED,
        (*(f"< {1 / bound:.3g}" for bound in reversed(_RATIOS)), "1", *(f"> {bound:.4g}" for bound in _RATIOS)),
        _LOG_RATIOS,
    ),
    "mismatch": _sizes(1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1),
    "entropy": _sizes(0.01, 0.1, 0.3, 0.6, 1.0, 2.0, 4.0),
    "age": ShadeScale(RISING, ("newest", *(f"{age} older" for age in range(1, 8))), tuple(range(1, 8))),
    "outside": _flag("outside", "x outside", "i inside"),
    "trained": _flag("trained", "y trained on", "n not"),
    "author": ShadeScale("sptu", ("sampled", "given: text", "given: template", "given"), category=_AUTHOR),
}
_TABLE = """
advantage         | advantage            | advantage         | advantage
rl_weight         | rl weight            | rl_weight         | around zero
ce_weight         | ce weight            | ce_weight         | around zero
ref_kl_weight     | ref_kl weight        | ref_kl_weight     | around zero
trained_rl_weight | rl weight as trained | trained_rl_weight | around zero
engine            | engine log-prob      | engine_logprob    | probability
learner           | learner log-prob     | learner_logprob   | probability
ratio             | importance ratio     | log_ratio         | ratio
mismatch          | mismatch KL          | mismatch          | mismatch
entropy           | entropy              | entropy           | entropy
reference         | reference log-prob   | reference_logprob | probability
signal            | reference signal     | signal            | around zero
outside           | trust region         | outside           | outside
policy            | policy               | policy_age        | age
mask              | mask                 | sampled           | author
trained           | trained              | trained           | trained
"""
"""Name, label, column of view `trace_tokens` and scale of each colouring."""


@dataclass(frozen=True)
class Colouring:
    """One way to colour tokens by a column."""

    name: str
    label: str
    column: str
    scale: ShadeScale

    @property
    def description(self) -> str:
        """The meaning of the column that is named so, or else of the coloured one, and of the depth of shades."""
        columns = all_views()["trace_tokens"].columns
        return columns.get(self.name, columns[self.column]) + self.scale.depth

    def shades(self, tokens: pl.DataFrame, largest: float) -> str:
        """Return a letter for each token; `largest` is the size of the column that has the deepest shade."""
        scale = self.scale
        if scale.category is not None:
            return "".join(tokens.select(scale.category.fill_null(NONE)).to_series())
        values = tokens[self.column].cast(pl.Float64).to_numpy()
        # The smallest size that is not zero has a shade, and rounding moves no quarter of the largest to the next one.
        quarters = [share * (largest or 1.0) * (1 + 1e-6) for share in (0.25, 0.5, 0.75)]
        edges = scale.edges or (np.nextafter(0.0, 1.0), *quarters)
        steps = np.searchsorted(edges, np.abs(np.nan_to_num(values)), "right")
        places = STEPS + np.where(values < 0, -steps, steps) if scale.letters == SIGNED else steps
        return "".join(NONE if np.isnan(v) else scale.letters[place] for v, place in zip(values, places, strict=True))

    def legend(self, largest: float) -> list[tuple[str, str]]:
        """Return the letters with what they mean."""
        sizes = [f"{largest * step / STEPS:.3g}" for step in range(1, STEPS + 1)]
        labels = self.scale.labels or (*(f"-{size}" for size in reversed(sizes)), "0", *(f"+{size}" for size in sizes))
        return list(zip(self.scale.letters, labels, strict=True))


def _colouring(line: str) -> Colouring:
    name, label, column, scale = (cell.strip() for cell in line.split("|"))
    return Colouring(name, label, column, SCALES[scale])


COLOURINGS = tuple(map(_colouring, _TABLE.strip().splitlines()))
NAMES = ("none", *(colouring.name for colouring in COLOURINGS))
SHARED = {"advantage": "rl_weight", "ce_weight": "ce_weight", "engine": "engine_logprob"}
"""What is looked at where nothing is chosen: the first of these of which there is something."""


def largest(tokens: pl.DataFrame, column: str) -> float:
    """Return the largest size of a column; 0 where there is none."""
    size = tokens.select(pl.col(column).cast(pl.Float64).abs().max()).item()
    return float(size or 0.0)


def default_colouring(tokens: pl.DataFrame) -> str:
    """Return the colouring that says most of some tokens."""
    for name, column in SHARED.items():
        if largest(tokens, column):
            return name
    return "mask"


DRAWN = 4000
"""Tokens that a page draws; of more, only how many there are."""
DIGITS = 9
"""Significant digits of a value: enough to tell any two that tables hold apart, and fewer to send than all."""
EXACT = {*TRAINED_WEIGHTS, *TRAINED_WEIGHTS.values()}
"""Values that are sent with all their digits: sums of it are those of the batch row."""
_BLANKS = re.compile("^ +| +$| {2,}")
Values = dict[str, Any]


def shown_tokens(
    reader: StoreReader, trace: FoundTrace, messages: Sequence[int], start: int = 0
) -> tuple[dict[int, Values], pl.DataFrame]:
    """Return the tokens of messages as values, by message, and the rows of those that are drawn.

    Of each message `num_tokens`, how many were `left_out`, `columns` (a list for each of `TOKENS`), `drawn`
    (how each looks) and `shades` (a letter for each token, by colouring). `start` is the first token of the first
    message that is drawn.
    """
    whole = _in_order(tokens(reader, trace, within=messages, texts=False), messages)
    if start and messages:
        whole = whole.filter((pl.col("message") != messages[0]) | (pl.col("place") >= start))
    # Texts of those tokens alone that are drawn: a tokenizer is slower than all else here.
    drawn = with_texts(reader, trace, whole.head(DRAWN))
    sizes = {one.name: largest_in_batch(reader, trace, drawn, one.column) for one in COLOURINGS}
    shades = {one.name: one.shades(drawn, sizes[one.name]) for one in COLOURINGS}
    parts, at = {}, 0
    for (message,), part in drawn.group_by("message", maintain_order=True):
        of_part = {name: letters[at : at + len(part)] for name, letters in shades.items()}
        parts[message] = _token_values(part) | {"shades": of_part}
        at += len(part)
    nothing: Values = {"columns": None, "drawn": [], "shades": None}
    counts = dict(whole.group_by("message").len().iter_rows())
    values = {message: parts.get(message, nothing) for message in counts}
    return {
        message: {"num_tokens": count, "left_out": count - len(values[message]["drawn"]), **values[message]}
        for message, count in counts.items()
    }, drawn


def _in_order(rows: pl.DataFrame, messages: Sequence[int]) -> pl.DataFrame:
    """Return the tokens of messages in the order in which these are given."""
    order = pl.DataFrame({"message": list(messages)}, schema={"message": pl.Int32}).with_row_index("order")
    return rows.join(order, on="message").sort("order", "place", maintain_order=True).drop("order")


def _token_values(part: pl.DataFrame) -> Values:
    """Return the values of tokens as columns, and how each is drawn."""
    names = [name for name in part.columns if name != "message"]
    pairs = zip(part["text"], part["token_id"], strict=True)
    return {
        "columns": {name: [plain_number(value, name in EXACT) for value in part[name]] for name in names},
        "drawn": [drawn_text(text, number) for text, number in pairs],
    }


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


def plain_number(value: Any, exact: bool = False) -> Any:
    """Return a number in `DIGITS` digits, or all, what is not finite by its name; everything else as it is."""
    if not isinstance(value, float):
        return value
    if exact or not math.isfinite(value):
        return plain(value)
    return float(f"{value:.{DIGITS}g}")


def drawn_text(text: str | None, number: int) -> str:
    """Return a token as it is drawn: blanks at its ends and line ends by signs; its number where it has no text."""
    if text is None:
        return f"⟨{number}⟩"
    text = text.replace("\t", "⇥").replace("\n", "⏎\n")
    return _BLANKS.sub(lambda blanks: "·" * len(blanks[0]), text) or "∅"


def describe(counts: Mapping[int, Values]) -> Values:
    """Return how many tokens there are in some messages, and how many of them are not drawn."""
    return {name: sum(of_message[name] for of_message in counts.values()) for name in ("num_tokens", "left_out")}
