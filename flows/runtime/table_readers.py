"""Readers: which stages, and what else, read a table again after the stage that wrote it is done."""

from tasks.stages import EVALUATION, STAGES

OTHERS = {
    "updates": ("diff",),
    "metrics": ("show", "curves", "diff", "the viewer"),
    "policies": ("whoever goes on from a policy",),
    "decisions": ("the account of a gate",),
    "regrades": ("why",),
}
"""What reads a table and is no stage."""
NO_READERS = ("gate", "metrics", "import", EVALUATION)
"""A gate looks at a batch before training, which would miss it too, and metrics are written with their step; an import
reads only what came in with it."""
WRITTEN = ("token_masks",)
"""Tables that are optional for a stage because it may leave them out of what it writes; none reads them."""


def readers(table: str) -> list[str]:
    """Return the names of all that read `table`; none where nobody misses its rows."""
    optional = () if table in WRITTEN else (table,)
    declared = [task.stage for each in STAGES if each.name not in NO_READERS for task in each.tasks]
    stages = [stage.name for stage in declared if table in stage.reads or {*optional} & {*stage.optional}]
    return list(dict.fromkeys([*stages, *OTHERS.get(table, ())]))
