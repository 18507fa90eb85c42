"""Tokens as a page shows them: which are drawn, with all their values, and how they are coloured."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from flows.queries.request import plain
from flows.queries.rollouts import largest_advantage
from flows.queries.store_reader import StoreReader
from flows.queries.tokens import TRAINED_WEIGHTS, tokens, with_texts
from flows.queries.trace import FoundTrace

BELOW, MIDDLE, ABOVE, RISING, NONE = "dcba", "o", "efgh", "ABCDEFGH", "-"
STEPS = len(ABOVE)
LOG_RATIO = (0.001, 0.01, 0.1, 0.5)
"""Sizes of the log ratio that divide the shades of the importance ratio."""
SURPRISE = (0.99, 0.9, 0.7, 0.5, 0.25, 0.1, 0.01)
"""Probabilities that divide the shades of a log-prob."""
MISMATCH = (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
ENTROPY = (0.01, 0.1, 0.3, 0.6, 1.0, 2.0, 4.0)
Numbers = npt.NDArray[Any]
Legend = list[tuple[str, str]]


@dataclass(frozen=True)
class Colouring:
    """One way to colour tokens: `shades` gives a letter for each token, `legend` the letters with what they mean."""

    name: str
    label: str
    description: str
    """What it is, in a sentence."""
    column: str
    shades: Callable[[pl.DataFrame, float], str]
    legend: Callable[[float], Legend]
    """Both are given the largest size of the column, by which some are measured."""


def relative(column: str) -> Callable[[pl.DataFrame, float], str]:
    """Return shades around zero, the deepest those of the largest size; what is not zero never looks like it."""

    def shades(tokens: pl.DataFrame, largest: float) -> str:
        values = tokens[column].cast(pl.Float64).to_numpy()
        share = np.abs(values) / (largest or 1.0)
        # A little less, or a share that is a whole step would round up to the next one.
        steps = np.clip(np.ceil(np.nan_to_num(share) * STEPS - 1e-6), 1, STEPS).astype(int)
        return _sign_letters(values, np.where(values == 0, 0, steps))

    return shades


def ratio(tokens: pl.DataFrame, largest: float) -> str:
    """Return shades of the importance ratio around one, by the size of its logarithm."""
    values = tokens["log_ratio"].to_numpy()
    # Infinite ratios have the deepest shade; what is NaN becomes NONE later, whatever its step.
    return _sign_letters(
        values, np.searchsorted(LOG_RATIO, np.abs(np.nan_to_num(values, posinf=9, neginf=-9)), "right")
    )


def rising(column: str, edges: Sequence[float]) -> Callable[[pl.DataFrame, float], str]:
    """Return shades from little to much, divided at some edges; an edge belongs to what is above it."""

    def shades(tokens: pl.DataFrame, largest: float) -> str:
        values = tokens[column].cast(pl.Float64).to_numpy()
        steps = np.searchsorted(edges, np.nan_to_num(values, posinf=1e9), "right")
        return _join_letters(values, [RISING[step] for step in steps])

    return shades


def _sign_letters(values: Numbers, steps: Numbers) -> str:
    letters = [
        MIDDLE if step == 0 else (ABOVE if value > 0 else BELOW)[step - 1]
        for value, step in zip(values, steps, strict=True)
    ]
    return _join_letters(values, letters)


def _join_letters(values: Numbers, letters: Sequence[str]) -> str:
    missing = np.isnan(values)
    return "".join(NONE if gone else letter for gone, letter in zip(missing, letters, strict=True))


def mask(tokens: pl.DataFrame, largest: float) -> str:
    """Return who wrote each token: s the policy, p and t an environment (text, template), u unknown which."""
    names = {True: "p", False: "t", None: "u"}
    pairs = zip(tokens["sampled"], tokens["is_content"], strict=True)
    return "".join("s" if sampled else names[content] for sampled, content in pairs)


def flag(column: str, yes: str, no: str) -> Callable[[pl.DataFrame, float], str]:
    """Return one of two letters for each token."""
    letters = {True: yes, False: no, None: NONE}
    return lambda tokens, largest: "".join(letters[value] for value in tokens[column])


def around(largest: float) -> Legend:
    """Return the legend of `relative`."""
    sizes = [f"{largest * step / STEPS:.3g}" for step in range(1, STEPS + 1)]
    below = [(letter, f"-{size}") for letter, size in zip(reversed(BELOW), reversed(sizes), strict=True)]
    return [*below, (MIDDLE, "0"), *((letter, f"+{size}") for letter, size in zip(ABOVE, sizes, strict=True))]


def around_one(largest: float) -> Legend:
    """Return the legend of `ratio`."""
    bounds = [np.exp(size) for size in LOG_RATIO]
    below = [(letter, f"< {1 / bound:.3g}") for letter, bound in zip(reversed(BELOW), reversed(bounds), strict=True)]
    return [*below, (MIDDLE, "1"), *((letter, f"> {bound:.4g}") for letter, bound in zip(ABOVE, bounds, strict=True))]


def from_edges(edges: Sequence[float]) -> Callable[[float], Legend]:
    """Return the legend of `rising`."""
    labels = [f"< {edges[0]:g}", *(f"≥ {edge:g}" for edge in edges)]
    return lambda largest: list(zip(RISING, labels, strict=True))


def likely(largest: float) -> Legend:
    """Return the legend of `unlikely`."""
    labels = [f"p > {SURPRISE[0]:g}", *(f"≤ {edge:g}" for edge in SURPRISE)]
    return list(zip(RISING, labels, strict=True))


def unlikely(column: str) -> Callable[[pl.DataFrame, float], str]:
    """Return shades of log-probs, deeper where a token was less likely."""

    def shades(tokens: pl.DataFrame, largest: float) -> str:
        negated = tokens.select((-pl.col(column).cast(pl.Float64)).alias(column))
        return rising(column, [-np.log(edge) for edge in SURPRISE])(negated, largest)

    return shades


def legend_of_pairs(*pairs: tuple[str, str]) -> Callable[[float], Legend]:
    """Return a legend that is the same whatever the numbers are."""
    return lambda largest: list(pairs)


def _around_zero(name: str, label: str, description: str) -> Colouring:
    """Return a colouring of a column of its own name, which has two signs."""
    return Colouring(name, label, description, name, relative(name), around)


def _likelihood(name: str, label: str, description: str) -> Colouring:
    """Return a colouring of log-probs; the column is named after who measured them."""
    column = f"{name}_logprob"
    return Colouring(name, label, description, column, unlikely(column), likely)


def _size(name: str, label: str, description: str, edges: Sequence[float]) -> Colouring:
    """Return a colouring of a column of its own name, which is never below zero."""
    return Colouring(name, label, description, name, rising(name, edges), from_edges(edges))


_GIVEN = "component, as the advantage stage gave it; zero: no member."
_AS_TRAINED = "Weight in the rl component as the batch row has it: scaled where losses are divided by constant lengths."
_ADVANTAGE = "Advantage of the token in the rl component. The deepest shade is the largest of its batch of rollouts."
_ENGINE = "How likely the token was to the engine that sampled it, temperature applied; deeper is less likely."
_LEARNER = "How likely it was to the learner before the update, at the same temperature; deeper is less likely."
_RATIO = "Probability by the learner over that by the engine: exp(learner log-prob - engine log-prob)."
_MISMATCH = "r - 1 - log r of the importance ratio r: its mean over rl tokens is the step's mismatch KL."
_SIGNAL = "The reference's log-prob less the engine's: what the reference-KL component pulls by."
_OUTSIDE = "Outside, clipped, or in a sequence that was left out: the rl loss gave the token no gradient."
_WROTE = "Who wrote the token: the policy, or the environment."
_MASK = legend_of_pairs(("s", "sampled"), ("p", "given: text"), ("t", "given: template"), ("u", "given"))
_POLICY = "How much older the policy that sampled the token is than the newest one that sampled a part of the rollout."
_AGES = tuple(range(1, len(RISING)))
_POLICIES = legend_of_pairs((RISING[0], "newest"), *((RISING[age], f"{age} older") for age in _AGES))
_INSIDE = legend_of_pairs(("x", "outside"), ("i", "inside"))
_TRAINED = legend_of_pairs(("y", "trained on"), ("n", "not"))
_MADE = "Whether an update was made with the token in its loss."
COLOURINGS = (
    _around_zero("advantage", "advantage", _ADVANTAGE),
    _around_zero("rl_weight", "rl weight", f"Weight of the token in the rl {_GIVEN}"),
    _around_zero("ce_weight", "ce weight", f"Weight of the token in the cross-entropy {_GIVEN}"),
    _around_zero("ref_kl_weight", "ref_kl weight", f"Weight of the token in the reference-KL {_GIVEN}"),
    _around_zero("trained_rl_weight", "rl weight as trained", _AS_TRAINED),
    _likelihood("engine", "engine log-prob", _ENGINE),
    _likelihood("learner", "learner log-prob", _LEARNER),
    Colouring("ratio", "importance ratio", _RATIO, "ratio", ratio, around_one),
    _size("mismatch", "mismatch KL", _MISMATCH, MISMATCH),
    _size("entropy", "entropy", "Entropy of the learner's distribution before the token, in nats.", ENTROPY),
    _likelihood("reference", "reference log-prob", "How likely it was to the frozen reference; deeper is less likely."),
    _around_zero("signal", "reference signal", _SIGNAL),
    Colouring("outside", "trust region", _OUTSIDE, "outside", flag("outside", "x", "i"), _INSIDE),
    Colouring("policy", "policy", _POLICY, "policy_age", rising("policy_age", _AGES), _POLICIES),
    Colouring("mask", "mask", _WROTE, "sampled", mask, _MASK),
    Colouring("trained", "trained", _MADE, "trained", flag("trained", "y", "n"), _TRAINED),
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
