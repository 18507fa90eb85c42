"""Training: one policy version to the next, through the learner.

Reads batches; writes updates, token_statistics, token_masks and policies.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from configs.run import View
from storage.policies.manifest import remember_digests
from storage.refs import File
from storage.schemas.stage_tables import TOKEN_MASKS, UPDATES
from tasks.arrays.images import attach_images
from tasks.learner.protocol import LearnerLost
from tasks.runtime.prefect_task import as_task
from tasks.runtime.services import LearnerService, retry_lost
from tasks.runtime.stage import Policy, Stage, Tables
from tasks.training.policy import policy_row


def training(
    tables: Tables, config: View, *, step: int, key: str, policy: Policy, directory: Path, learner: LearnerService
) -> Tables:
    """Train `policy` on the batches of one step and leave the new weights in `directory`.

    A learner that dies is brought back to `policy` and trains the same batches again, which gives the same weights.
    Raises what the service raises when the learner does not come back.
    """
    # AdamW's state is twice the size of the weights; without it a resumed run trains the steps since again.
    save_optimizer = (step + 1) % config.training.save_optimizer_every == 0

    def train() -> Tables:
        client = learner.restore(policy)
        for path in directory.iterdir():  # left by a learner that died: weights are written into an empty directory
            path.unlink()
        updates, statistics = client.train(
            attach_images(tables["batches"], tables.get("batch_images")),
            step=step,
            policy_key_in=policy.key,
            policy_key_out=key,
            directory_out=str(directory),
            save_optimizer=save_optimizer,
            state_directory=learner.state_directory,
        )
        remember_digests(directory, [File(**file) for file in client.state()["files"]])
        row = policy_row(client, key, step + 1, policy.key, config.model.vocab_size, save_optimizer)
        return {"updates": updates_table(updates), **token_tables(statistics), "policies": row}

    with learner.turn():
        return retry_lost(train, LearnerLost)


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
    version=2,
    reads=("batches",),
    writes=("updates", "token_statistics", "token_masks", "policies"),
    optional=("batch_images", "token_masks"),
    sections=("training", "model"),
    function=training,
)
task = as_task(STAGE)
