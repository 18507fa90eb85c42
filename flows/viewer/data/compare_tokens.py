"""The same rollout in two runs, token by token: what each run made of a token, and trained it with."""

import polars as pl

from flows.viewer.data.tokens import PLACE, tokens
from flows.viewer.data.trace import Found
from flows.viewer.library import Library

MEASURES = ("advantage", "rl_weight", "ce_weight", "ref_kl_weight", "signal", "trained_rl_weight")
"""What can differ between runs that share a rollout, as in `flows.viewer.data.tokens.TOKENS`."""


def compared_tokens(library: Library, one: Found, other: Found) -> pl.DataFrame:
    """Return one row for each token that was sampled, of the same rollout in two runs.

    Columns: message, place, token_id, text, and each measure as `NAME_a`, `NAME_b` and `NAME_difference` (b - a; null
    where either has none).
    """
    rows = tokens(library, one).filter("sampled").select(*PLACE, "token_id", "text", *MEASURES)
    beside = tokens(library, other).select(*PLACE, *(pl.col(name).alias(f"{name}_b") for name in MEASURES))
    joined = rows.join(beside, on=PLACE, how="left", maintain_order="left")
    named = [
        each.cast(pl.Float64).alias(f"{name}_{side}")
        for name in MEASURES
        for side, each in (
            ("a", pl.col(name)),
            ("b", pl.col(f"{name}_b")),
            ("difference", pl.col(f"{name}_b") - pl.col(name)),
        )
    ]
    return joined.select(*PLACE, "token_id", "text", *named)


def changed_measures(rows: pl.DataFrame) -> dict[str, int]:
    """Return how many tokens differ, by measure; those of which one run has a value and the other none too."""
    return {name: int(rows.select(_differs(name).sum()).item() or 0) for name in MEASURES}


def _differs(name: str) -> pl.Expr:
    return ~pl.col(f"{name}_a").eq_missing(pl.col(f"{name}_b"))
