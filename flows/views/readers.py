"""Readers: which stages, and what else, read a table again after the stage that wrote it is done."""

from tasks import (
    advantage,
    assignment,
    demonstration,
    evaluation,
    examples,
    filtering,
    packing,
    policy_import,
    reference,
    regrade,
    rollout,
    training,
)
from tasks.stage import StageTask

MODULES = (
    examples, policy_import, assignment, rollout, demonstration, regrade, filtering, reference, advantage, packing,
    training, evaluation,
)  # fmt: skip
OTHERS = {
    "updates": ("show", "diff"),
    "policies": ("whoever goes on from a policy",),
    "decisions": ("the account of a gate",),
    "regrades": ("why",),
}
"""What reads a table and is no stage."""


def readers(table: str) -> list[str]:
    """Return the names of all that read `table`; none where nobody misses its rows."""
    tasks = [each for module in MODULES for each in vars(module).values() if isinstance(each, StageTask)]
    stages = [task.stage.name for task in tasks if table in (*task.stage.reads, *task.stage.optional)]
    return list(dict.fromkeys([*stages, *OTHERS.get(table, ())]))
