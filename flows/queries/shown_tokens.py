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

SIGNED, RISING, NONE = "abcdoefgh", "ABCDEFGH", "-"
"""Shades from far below zero to far above it, from little to much, and of what was not measured."""
STEPS = len(SIGNED) // 2
LOG_RATIO = (0.001, 0.01, 0.1, 0.5)
"""Sizes of the log ratio that divide the shades of the importance ratio."""
SURPRISE = (0.99, 0.9, 0.7, 0.5, 0.25, 0.1, 0.01)
"""Probabilities that divide the shades of a log-prob."""
MISMATCH = (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
ENTROPY = (0.01, 0.1, 0.3, 0.6, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Colouring:
    """One way to colour tokens by a column, with a letter for each shade."""

    name: str
    label: str
    description: str
    """What it is, in a sentence."""
    column: str
    letters: str
    """The shades: SIGNED, RISING, or those of `category`."""
    labels: tuple[str, ...] = ()
    """What each shade is; of SIGNED without labels, shares of the largest size of the column."""
    edges: tuple[float, ...] = ()
    """Sizes that divide the shades, each part of the shade above it."""
    category: pl.Expr | None = None
    """The letter of each token, instead of sizes."""

    def shades(self, tokens: pl.DataFrame, largest: float) -> str:
        """Return a letter for each token; `largest` is the size of the column that has the deepest shade."""
        if self.category is not None:
            return "".join(tokens.select(self.category.fill_null(NONE)).to_series())
        values = tokens[self.column].cast(pl.Float64).to_numpy()
        # The smallest size that is not zero has a shade, and rounding moves no quarter of the largest to the next one.
        quarters = [share * (largest or 1.0) * (1 + 1e-6) for share in (0.25, 0.5, 0.75)]
        edges = self.edges or (np.nextafter(0.0, 1.0), *quarters)
        steps = np.searchsorted(edges, np.abs(np.nan_to_num(values)), "right")
        places = STEPS + np.where(values < 0, -steps, steps) if self.letters == SIGNED else steps
        return "".join(NONE if np.isnan(v) else self.letters[place] for v, place in zip(values, places, strict=True))

    def legend(self, largest: float) -> list[tuple[str, str]]:
        """Return the letters with what they mean."""
        sizes = [f"{largest * step / STEPS:.3g}" for step in range(1, STEPS + 1)]
        labels = self.labels or (*(f"-{size}" for size in reversed(sizes)), "0", *(f"+{size}" for size in sizes))
        return list(zip(self.letters, labels, strict=True))


def _around_zero(name: str, label: str, description: str) -> Colouring:
    return Colouring(name, label, description, name, SIGNED)


def _likelihood(name: str, label: str, description: str) -> Colouring:
    """Return a colouring of log-probs, deeper where a token was less likely; the column says who measured them."""
    labels = (f"p > {SURPRISE[0]:g}", *(f"≤ {edge:g}" for edge in SURPRISE))
    edges = tuple(-math.log(edge) for edge in SURPRISE)
    return Colouring(name, label, description, f"{name}_logprob", RISING, labels, edges)


def _size(name: str, label: str, description: str, edges: tuple[float, ...]) -> Colouring:
    labels = (f"< {edges[0]:g}", *(f"≥ {edge:g}" for edge in edges))
    return Colouring(name, label, description, name, RISING, labels, edges)


def _flag(name: str, label: str, description: str, yes: str, no: str) -> Colouring:
    """Return a colouring of a flag; the first letter of `yes` and of `no` is its shade."""
    letter = pl.when(name).then(pl.lit(yes[0])).when(~pl.col(name)).then(pl.lit(no[0]))
    return Colouring(name, label, description, name, yes[0] + no[0], (yes[2:], no[2:]), category=letter)


_COMPONENT = "component, as the advantage stage gave it; zero: no member."
_AS_TRAINED = "Weight in the rl component as the batch row has it: scaled where losses are divided by constant lengths."
_ADVANTAGE = "Advantage of the token in the rl component. The deepest shade is the largest of its batch of rollouts."
_ENGINE = "How likely the token was to the engine that sampled it, temperature applied; deeper is less likely."
_LEARNER = "How likely it was to the learner before the update, at the same temperature; deeper is less likely."
_RATIO = "Probability by the learner over that by the engine: exp(learner log-prob - engine log-prob)."
_MISMATCH = "r - 1 - log r of the importance ratio r: its mean over rl tokens is the step's mismatch KL."
_SIGNAL = "The reference's log-prob less the engine's: what the reference-KL component pulls by."
_OUTSIDE = "Outside, clipped, or in a sequence that was left out: the rl loss gave the token no gradient."
_WROTE = "Who wrote the token: the policy, or the environment."
_POLICY = "How much older the policy that sampled the token is than the newest one that sampled a part of the rollout."
_MADE = "Whether an update was made with the token in its loss."
_BOUNDS = [math.exp(size) for size in LOG_RATIO]
_RATIOS = (*(f"< {1 / bound:.3g}" for bound in reversed(_BOUNDS)), "1", *(f"> {bound:.4g}" for bound in _BOUNDS))
_AGES = ("newest", *(f"{age} older" for age in range(1, len(RISING))))
_AUTHOR = (
    pl.when("sampled")
    .then(pl.lit("s"))
    .when("is_content")
    .then(pl.lit("p"))
    .when(~pl.col("is_content"))
    .then(pl.lit("t"))
    .otherwise(pl.lit("u"))
)
_AUTHORS = ("sampled", "given: text", "given: template", "given")
COLOURINGS = (
    _around_zero("advantage", "advantage", _ADVANTAGE),
    _around_zero("rl_weight", "rl weight", f"Weight of the token in the rl {_COMPONENT}"),
    _around_zero("ce_weight", "ce weight", f"Weight of the token in the cross-entropy {_COMPONENT}"),
    _around_zero("ref_kl_weight", "ref_kl weight", f"Weight of the token in the reference-KL {_COMPONENT}"),
    _around_zero("trained_rl_weight", "rl weight as trained", _AS_TRAINED),
    _likelihood("engine", "engine log-prob", _ENGINE),
    _likelihood("learner", "learner log-prob", _LEARNER),
    Colouring("ratio", "importance ratio", _RATIO, "log_ratio", SIGNED, _RATIOS, LOG_RATIO),
    _size("mismatch", "mismatch KL", _MISMATCH, MISMATCH),
    _size("entropy", "entropy", "Entropy of the learner's distribution before the token, in nats.", ENTROPY),
    _likelihood("reference", "reference log-prob", "How likely it was to the frozen reference; deeper is less likely."),
    _around_zero("signal", "reference signal", _SIGNAL),
    _flag("outside", "trust region", _OUTSIDE, "x outside", "i inside"),
    Colouring("policy", "policy", _POLICY, "policy_age", RISING, _AGES, tuple(range(1, len(RISING)))),
    Colouring("mask", "mask", _WROTE, "sampled", "sptu", _AUTHORS, category=_AUTHOR),
    _flag("trained", "trained", _MADE, "y trained on", "n not"),
)
NAMES = ("none", *(each.name for each in COLOURINGS))
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
    sizes = {each.name: largest_in_batch(reader, trace, drawn, each.column) for each in COLOURINGS}
    shades = {each.name: each.shades(drawn, sizes[each.name]) for each in COLOURINGS}
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
            "name": each.name,
            "label": each.label,
            "description": each.description,
            "num_measured": len(drawn) - drawn[each.column].null_count(),
            "legend": [
                {"shade": shade, "label": label}
                for shade, label in each.legend(largest_in_batch(reader, trace, drawn, each.column))
            ],
        }
        for each in COLOURINGS
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
    return {name: sum(each[name] for each in counts.values()) for name in ("num_tokens", "left_out")}
