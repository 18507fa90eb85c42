"""Colourings of tokens by name: what `?color=` chooses from, with a sentence and a legend for each."""

import polars as pl

from flows.viewer.data.tokens_shades import (
    ENTROPY,
    MISMATCH,
    Colouring,
    around,
    around_one,
    flag,
    from_edges,
    likely,
    mask,
    named,
    ratio,
    relative,
    rising,
    unlikely,
)


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
        named(("x", "outside"), ("i", "inside")),
    ),
    Colouring("mask", "mask", "Who wrote the token: the policy, or the environment.", "sampled", mask, named(*_MASK)),
    Colouring(
        "trained",
        "trained",
        "Whether an update was made with the token in its loss.",
        "trained",
        flag("trained", "y", "n"),
        named(("y", "trained on"), ("n", "not")),
    ),
)
NAMES = ("none", *(each.name for each in COLOURINGS))
SHARED = {"advantage": "rl_weight", "ce_weight": "ce_weight", "engine": "engine_logprob"}
"""What is looked at where nothing is chosen: the first of these of which there is something."""


def largest(tokens: pl.DataFrame, column: str) -> float:
    """Return the largest size of a column; 0 where there is none."""
    size = tokens.select(pl.col(column).cast(pl.Float64).abs().max()).item()
    return float(size or 0.0)


def chosen(tokens: pl.DataFrame) -> str:
    """Return the colouring that says most of some tokens."""
    for name, column in SHARED.items():
        if largest(tokens, column):
            return name
    return "mask"
