"""Colourings of tokens by name, each with a sentence, a legend, and the steps of its shades."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

BELOW, MIDDLE, ABOVE, RISING, NONE = "dcba", "o", "efgh", "ABCDEFGH", "-"
STEPS = len(ABOVE)
LOG_RATIO = (0.001, 0.01, 0.1, 0.5)
"""Sizes of the log ratio that divide the shades of the importance ratio."""
SURPRISE = (0.99, 0.9, 0.7, 0.5, 0.25, 0.1, 0.01)
"""Probabilities that divide the shades of a log-prob."""
MISMATCH = (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
ENTROPY = (0.01, 0.1, 0.3, 0.6, 1.0, 2.0, 4.0)
Values = npt.NDArray[Any]
Legend = list[tuple[str, str]]


@dataclass(frozen=True)
class Colouring:
    """One way to colour tokens: `shades` gives a letter for each token, `legend` the letters with what they mean."""

    name: str
    label: str
    told: str
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
        steps = np.clip(np.ceil(np.nan_to_num(share) * STEPS - 1e-6), 1, STEPS).astype(int)
        return _signed(values, np.where(values == 0, 0, steps))

    return shades


def ratio(tokens: pl.DataFrame, largest: float) -> str:
    """Return shades of the importance ratio around one, by the size of its logarithm."""
    values = tokens["log_ratio"].to_numpy()
    return _signed(values, np.searchsorted(LOG_RATIO, np.abs(np.nan_to_num(values, posinf=9, neginf=-9)), "right"))


def rising(column: str, edges: Sequence[float]) -> Callable[[pl.DataFrame, float], str]:
    """Return shades from little to much, divided at some edges; an edge belongs to what is above it."""

    def shades(tokens: pl.DataFrame, largest: float) -> str:
        values = tokens[column].cast(pl.Float64).to_numpy()
        steps = np.searchsorted(edges, np.nan_to_num(values, posinf=1e9), "right")
        return _joined(values, [RISING[step] for step in steps])

    return shades


def _signed(values: Values, steps: Values) -> str:
    letters = [
        MIDDLE if step == 0 else (ABOVE if value > 0 else BELOW)[step - 1]
        for value, step in zip(values, steps, strict=True)
    ]
    return _joined(values, letters)


def _joined(values: Values, letters: Sequence[str]) -> str:
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


def _weight(component: str, of: str) -> Colouring:
    column = f"{component}_weight"
    told = f"Weight of the token in the {of} component, as the advantage stage gave it; zero: no member."
    return Colouring(column, f"{component} weight", told, column, relative(column), around)


_MASK = (("s", "sampled"), ("p", "given: text"), ("t", "given: template"), ("u", "given"))
COLOURINGS = (
    Colouring(
        "advantage",
        "advantage",
        "Advantage of the token in the rl component. The deepest shade is the largest of its batch of rollouts.",
        "advantage",
        relative("advantage"),
        around,
    ),
    _weight("rl", "rl"),
    _weight("ce", "cross-entropy"),
    _weight("ref_kl", "reference-KL"),
    Colouring(
        "trained_rl_weight",
        "rl weight as trained",
        "Weight in the rl component as the batch row has it: scaled where losses are divided by constant lengths.",
        "trained_rl_weight",
        relative("trained_rl_weight"),
        around,
    ),
    Colouring(
        "engine",
        "engine log-prob",
        "How likely the token was to the engine that sampled it, temperature applied; deeper is less likely.",
        "engine_logprob",
        unlikely("engine_logprob"),
        likely,
    ),
    Colouring(
        "learner",
        "learner log-prob",
        "How likely it was to the learner before the update, at the same temperature; deeper is less likely.",
        "learner_logprob",
        unlikely("learner_logprob"),
        likely,
    ),
    Colouring(
        "ratio",
        "importance ratio",
        "Probability by the learner over that by the engine: exp(learner log-prob - engine log-prob).",
        "ratio",
        ratio,
        around_one,
    ),
    Colouring(
        "mismatch",
        "mismatch KL",
        "r - 1 - log r of the importance ratio r: its mean over rl tokens is the step's mismatch KL.",
        "mismatch",
        rising("mismatch", MISMATCH),
        from_edges(MISMATCH),
    ),
    Colouring(
        "entropy",
        "entropy",
        "Entropy of the learner's distribution before the token, in nats.",
        "entropy",
        rising("entropy", ENTROPY),
        from_edges(ENTROPY),
    ),
    Colouring(
        "reference",
        "reference log-prob",
        "How likely it was to the frozen reference; deeper is less likely.",
        "reference_logprob",
        unlikely("reference_logprob"),
        likely,
    ),
    Colouring(
        "signal",
        "reference signal",
        "The reference's log-prob less the engine's: what the reference-KL component pulls by.",
        "signal",
        relative("signal"),
        around,
    ),
    Colouring(
        "outside",
        "trust region",
        "Outside, clipped, or in a sequence that was left out: the rl loss gave the token no gradient.",
        "outside",
        flag("outside", "x", "i"),
        legend_of_pairs(("x", "outside"), ("i", "inside")),
    ),
    Colouring(
        "mask", "mask", "Who wrote the token: the policy, or the environment.", "sampled", mask, legend_of_pairs(*_MASK)
    ),
    Colouring(
        "trained",
        "trained",
        "Whether an update was made with the token in its loss.",
        "trained",
        flag("trained", "y", "n"),
        legend_of_pairs(("y", "trained on"), ("n", "not")),
    ),
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
