"""Training: one policy version to the next, through the learner.

Reads batches; writes updates, token_statistics, token_masks and policies.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from configs.run import View
from storage.policies.manifest import remember_digests
from storage.refs import File
from storage.schemas.stage_tables import TOKEN_MASKS, TOKEN_STATISTICS, UPDATES
from tasks.learner.protocol import STATISTICS_FILE, BatchReference, LearnerLost
from tasks.runtime.prefect_task import as_task
from tasks.runtime.services import LearnerService, require
from tasks.runtime.stage import Attempt, Outputs, Policy, Stage, retry_lost
from tasks.runtime.stored_rows import StoredRows, in_parts
from tasks.training.policy import policy_row

TOKENS_OF_A_PART = 1 << 25
"""Of the table token_masks: a reader of Parquet takes about seven bytes for each bit of a part."""


@dataclass(frozen=True)
class TrainingInputs:
    """The batches of a step, the policy that is trained on them, and the learner."""

    batches: StoredRows
    batch_images: StoredRows | None
    """None for a batch of text."""
    batch_experts: StoredRows | None
    """None where no experts were recorded."""
    samples: StoredRows | None
    """Where preferences are learnt: which samples are compared."""
    step: int
    policy: Policy
    new_policy_key: str
    new_directory: Callable[[], Path]
    learner: LearnerService

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        batches, images = attempt.rows("batches"), attempt.optional_rows("batch_images")
        others = images, attempt.optional_rows("batch_experts"), attempt.optional_rows("samples")
        policy, learner = require(attempt.policy), require(attempt.services.learner)
        return cls(batches, *others, attempt.step, policy, attempt.key, attempt.new_directory, learner)


def training(inputs: TrainingInputs, config: View) -> Outputs:
    """Train the policy on the batches of one step and leave the new weights in the last `new_directory`.

    A lost learner is restored to the policy and trains the same batches again, which gives the same weights.
    Raises what the service raises when the learner does not come back.
    """
    batches, policy, learner = inputs.batches, inputs.policy, inputs.learner
    others = (rows.slices if rows else () for rows in (inputs.batch_images, inputs.batch_experts))
    reference = BatchReference(batches.store, batches.slices, *others)
    step, key = inputs.step, inputs.new_policy_key
    labels = _labels(inputs.samples) if inputs.samples else None
    # AdamW's state is twice the size of the weights; without it a resumed run trains the steps since again.
    save_optimizer = (step + 1) % config.training.save_optimizer_every == 0

    def train() -> Outputs:
        client = learner.restore(policy)
        directory = (
            inputs.new_directory()
        )  # one that was lost may live on another machine, and write into its own to the end
        updates = client.train(
            reference,
            step=step,
            policy_key_in=policy.key,
            policy_key_out=key,
            directory_out=str(directory),
            save_optimizer=save_optimizer,
            state_directory=learner.state_directory,
            labels=labels,
        )
        remember_digests(directory, [File(**file) for file in client.state()["files"]])
        row = policy_row(client, key, step + 1, policy.key, config.model.vocab_size, save_optimizer)
        return {"updates": updates_table(updates), **token_tables(directory / STATISTICS_FILE), "policies": row}

    with learner.turn():
        return retry_lost(train, LearnerLost)


def _labels(samples: StoredRows) -> dict[str, tuple[str, float]]:
    """Return the group and the advantage of each sample that has one."""
    rows = samples.table(["sample_id", "group_id", "advantage"]).to_pylist()
    return {row["sample_id"]: (row["group_id"], row["advantage"]) for row in rows if row["advantage"]}


def updates_table(updates: list[dict[str, Any]]) -> pa.Table:
    """Return the learner's measurements, a dictionary for each optimizer step, as rows of updates."""
    rows = [{**update, "metrics": json.dumps(update["metrics"], sort_keys=True)} for update in updates]
    return pa.Table.from_pylist(rows, schema=UPDATES.arrow)


def token_tables(file: Path) -> Outputs:
    """Return `token_statistics`, and `token_masks` for the samples of which tokens were masked, if there are any.

    Both are read from the learner's file, a part after the other, and the file is gone when the last was read.
    """
    return {"token_statistics": in_parts(_statistics(file)), "token_masks": _masks(file)}


def _statistics(file: Path) -> Iterator[pa.Table]:
    for part in _read(file):
        yield part.select(TOKEN_STATISTICS.arrow.names)


def _masks(file: Path) -> Iterator[pa.Table]:
    held, num_tokens = list[pa.Table](), 0
    for part in _read(file):
        masked = part["masked"].combine_chunks()
        samples = pc.unique(pc.list_parent_indices(masked).filter(pc.list_flatten(masked)))
        held.append(part.select(TOKEN_MASKS.arrow.names).take(samples))
        num_tokens += len(pc.list_flatten(held[-1]["masked"]))
        if num_tokens >= TOKENS_OF_A_PART:
            yield pa.concat_tables(held)
            held, num_tokens = [], 0
    if num_tokens:
        yield pa.concat_tables(held)
    file.unlink()  # it is no part of the policy


def _read(file: Path) -> Iterator[pa.Table]:
    with pa.OSFile(str(file), "r") as source, pa.ipc.open_stream(source) as reader:
        for batch in reader:
            yield pa.Table.from_batches([batch])


STAGE = Stage(
    name="training",
    version=2,
    reads=("batches",),
    writes=("updates", "token_statistics", "token_masks", "policies"),
    optional=("batch_images", "batch_experts", "samples", "token_masks"),
    sections=("training", "model"),
    read_inputs=TrainingInputs.read,
    function=training,
    services=("learner",),
)
task = as_task(STAGE)
