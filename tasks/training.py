"""Training: one policy version to the next, through the learner.

Reads batches; writes updates, token_statistics and policies.
"""

import json
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from configs.run import View
from storage.schemas import POLICIES, UPDATES
from tasks.learner.client import Learner, LearnerLost
from tasks.stage import Policy, Stage, Tables, as_task

# Long enough to fill cache blocks of an engine, so that a stale prefix cache shows; engines use as much as fits.
PROBE_LENGTH = 160


class LearnerRoom(Protocol):
    """What the stage asks of whoever keeps the learner alive."""

    def at(self, policy: Policy) -> Learner:
        """Return a learner that holds the weights and the optimizer state of `policy`."""
        ...


def training(
    tables: Tables, config: View, *, step: int, key: str, policy: Policy, directory: Path, learner: LearnerRoom
) -> Tables:
    """Train `policy` on the batches of one step and leave the new weights in `directory`.

    A learner that dies is brought back to `policy` and trains the same batches again, which gives the same weights.
    Raises what the room raises when the learner does not come back.
    """
    save_optimizer = (step + 1) % config.training.save_optimizer_every == 0
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
            row = policy_row(mind, key, policy.version + 1, policy.key, config.model.vocab_size, save_optimizer)
            return {"updates": updates_table(updates), "token_statistics": statistics, "policies": row}
        except LearnerLost:
            continue  # at() waits for the restart, and gives up after the configured number of them


def updates_table(updates: list[dict[str, Any]]) -> pa.Table:
    """Return the learner's measurements, a dictionary for each optimizer step, as rows of updates."""
    rows = [{**update, "metrics": json.dumps(update["metrics"], sort_keys=True)} for update in updates]
    return pa.Table.from_pylist(rows, schema=UPDATES.arrow)


def policy_row(
    learner: Learner, key: str, version: int, parent: str | None, vocab_size: int, has_optimizer: bool
) -> pa.Table:
    """Return the row of the policy that the learner holds, with its log-probs of a fixed token sequence."""
    probe = probe_token_ids(vocab_size)
    row = {
        "policy_key": key,
        "version": version,
        "parent_key": parent,
        "weights_sha256": learner.state()["weights_sha256"],
        "has_optimizer": has_optimizer,
        "probe_token_ids": probe,
        "probe_logprobs": learner.probe(probe),
    }
    return pa.Table.from_pylist([row], schema=POLICIES.arrow)


def probe_token_ids(vocab_size: int) -> list[int]:
    """Return the fixed token sequence on which engine and learner are compared; scattered over the vocabulary."""
    return [(7919 * position + 104_729) % vocab_size for position in range(PROBE_LENGTH)]


STAGE = Stage(
    name="training",
    version=1,
    reads=("batches",),
    writes=("updates", "token_statistics", "policies"),
    sections=("training", "model"),
    function=training,
    needs=("step", "key", "policy", "directory", "learner"),
)
task = as_task(STAGE)
