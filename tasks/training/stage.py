"""Training: one policy version to the next, through the learner.

Reads batches; writes updates, token_statistics, token_masks and policies.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from configs.run import View
from storage.schemas.learner_tables import TOKEN_MASKS, UPDATES
from tasks.learner.errors import LearnerLost
from tasks.runtime.prefect_task import as_task
from tasks.runtime.stage import Policy, Stage, Tables
from tasks.training.policy import MOST_LOSSES, LearnerRoom, policy_row


def training(
    tables: Tables, config: View, *, step: int, key: str, policy: Policy, directory: Path, learner: LearnerRoom
) -> Tables:
    """Train `policy` on the batches of one step and leave the new weights in `directory`.

    A learner that dies is brought back to `policy` and trains the same batches again, which gives the same weights.
    Raises what the room raises when the learner does not come back.
    """
    save_optimizer = (step + 1) % config.training.save_optimizer_every == 0
    losses = 0
    while True:
        try:
            mind = learner.at(policy)
            updates, statistics = mind.train(
                tables["batches"],
                step=step,
                policy_key_in=policy.key,
                policy_key_out=key,
                directory_out=str(directory),
                save_optimizer=save_optimizer,
            )
            row = policy_row(mind, key, step + 1, policy.key, config.model.vocab_size, save_optimizer)
            return {"updates": updates_table(updates), **token_tables(statistics), "policies": row}
        except LearnerLost:
            losses += 1  # at() waits for a restart, but what never dies is not restarted
            if losses > MOST_LOSSES:
                raise
            _empty(directory)


def _empty(directory: Path) -> None:
    """Remove what a learner wrote before it died: a policy is written into an empty directory, once."""
    for path in directory.iterdir():
        path.unlink()


def updates_table(updates: list[dict[str, Any]]) -> pa.Table:
    """Return the learner's measurements, a dictionary for each optimizer step, as rows of updates."""
    rows = [{**update, "metrics": json.dumps(update["metrics"], sort_keys=True)} for update in updates]
    return pa.Table.from_pylist(rows, schema=UPDATES.arrow)


def token_tables(statistics: pa.Table) -> Tables:
    """Return `token_statistics`, and `token_masks` for the samples of which tokens were masked, if there are any."""
    made = {"token_statistics": statistics.drop_columns(["masked"])}
    masked = statistics["masked"].combine_chunks()
    samples = pc.unique(pc.list_parent_indices(masked).filter(pc.list_flatten(masked)))
    return made | ({"token_masks": statistics.select(TOKEN_MASKS.arrow.names).take(samples)} if len(samples) else {})


STAGE = Stage(
    name="training",
    version=1,
    reads=("batches",),
    writes=("updates", "token_statistics", "token_masks", "policies"),
    optional=("token_masks",),
    sections=("training", "model"),
    function=training,
    needs=("step", "key", "policy", "directory", "learner"),
)
task = as_task(STAGE)
