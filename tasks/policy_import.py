"""Import of a policy: weights that someone else made become version 0 of a run.

Reads nothing; writes policies.
"""

import shutil
from pathlib import Path

from configs.run import View
from tasks.learner.client import LearnerLost
from tasks.policy import MOST_LOSSES, LearnerRoom, policy_row
from tasks.stage import Policy, Stage, Tables, as_task


def policy_import(
    tables: Tables, config: View, *, key: str, source: str, directory: Path, learner: LearnerRoom
) -> Tables:
    """Copy the weights directory `source` and have the learner measure the probe on it.

    The copy makes the run whole: it can be resumed when the original is gone. Optimizer state is left behind, since
    what it belongs to is another run's schedule.
    """
    shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("optimizer*", "manifest.json"))
    for losses in range(MOST_LOSSES + 1):
        try:
            mind = learner.fresh(Policy(key, 0), directory)
            return {"policies": policy_row(mind, key, 0, None, config.model.vocab_size, False)}
        except LearnerLost:
            if losses == MOST_LOSSES:
                raise
    raise AssertionError("either there is a policy or the learner was lost too often")


STAGE = Stage(
    name="policy_import",
    version=1,
    reads=(),
    writes=("policies",),
    sections=("model",),
    function=policy_import,
    needs=("key", "source", "directory", "learner"),
)
task = as_task(STAGE)
