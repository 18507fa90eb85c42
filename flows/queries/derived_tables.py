"""The tables that are made out of those of a store: outcomes, accounting and rollouts.

What makes them is imported when one is asked for: most questions in SQL name only tables that are stored.
"""

from typing import TYPE_CHECKING

from storage.read.frames import Derivation, Frames

if TYPE_CHECKING:
    import polars as pl


def _outcomes(frames: Frames) -> "pl.LazyFrame":
    from flows.queries.outcomes import outcomes

    return outcomes(frames)


def _accounting(frames: Frames) -> "pl.LazyFrame":
    from flows.queries.outcomes import accounting

    return accounting(frames)


def _rollouts(frames: Frames) -> "pl.LazyFrame":
    from flows.queries.rollout_table import rollouts

    return rollouts(frames)


DERIVED: dict[str, Derivation] = {"outcomes": _outcomes, "accounting": _accounting, "rollouts": _rollouts}
"""For `storage.open(root, derived=DERIVED)`."""
