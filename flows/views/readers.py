"""Readers: which stages, and what else, read a table again after the stage that wrote it is done."""

from tasks.advantage import reference
from tasks.advantage import stage as advantage
from tasks.assignment import examples
from tasks.assignment import stage as assignment
from tasks.evaluation import stage as evaluation
from tasks.filtering import stage as filtering
from tasks.packing import stage as packing
from tasks.rollout import demonstration, regrade
from tasks.rollout import stage as rollout
from tasks.runtime.prefect_task import StageTask
from tasks.training import policy as policy_import
from tasks.training import stage as training

MODULES = (
    examples, policy_import, assignment, rollout, demonstration, regrade, filtering, reference, advantage, packing,
    training, evaluation,
)  # fmt: skip
OTHERS = {
    "updates": ("diff",),
    "metrics": ("show", "curves", "diff", "the viewer"),
    "policies": ("whoever goes on from a policy",),
    "decisions": ("the account of a gate",),
    "regrades": ("why",),
}
"""What reads a table and is no stage."""
WRITTEN = ("token_masks",)
"""Tables that are optional for a stage because it may leave them out of what it writes; none reads them."""


def readers(table: str) -> list[str]:
    """Return the names of all that read `table`; none where nobody misses its rows."""
    tasks = [each for module in MODULES for each in vars(module).values() if isinstance(each, StageTask)]
    optional = () if table in WRITTEN else (table,)
    stages = [each.stage.name for each in tasks if table in each.stage.reads or {*optional} & {*each.stage.optional}]
    return list(dict.fromkeys([*stages, *OTHERS.get(table, ())]))
