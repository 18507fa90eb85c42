"""Refills: how many groups of a step are still to be replaced, and a warning where too few are left."""

from collections.abc import Mapping, Sequence

from tasks.assignment.group_refill import groups_to_refill
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Ref

COLUMNS = ["group_id", "environment"]


def missing_groups(place: RunContext, assigned: Sequence[Ref], credits: Ref) -> Mapping[str, int]:
    """Return how many groups of the first of some finished assignments have no replacement yet, by environment."""
    first, every = (place.table("assignments", refs, COLUMNS) for refs in (assigned[:1], assigned))
    return groups_to_refill(first, every, place.table("credits", (credits,)), place.config.assignment.oversampling)


def short_of_groups(step: int, counts: Mapping[str, int]) -> str:
    """Return a warning where a step trains on fewer groups than it wanted; empty where that is not so."""
    if not counts or counts["admitted"] >= counts["wanted"]:
        return ""
    return (
        f"step {step}: {counts['admitted']} of {counts['wanted']} groups teach something, after {counts['drawn']} "
        f"groups in {counts['batches']} batch(es); it trains on those. The others were equal in reward, filtered or "
        "refused: look at the verdicts; choose other examples, assignment.refill or more filtering.max_batch_attempts"
    )
