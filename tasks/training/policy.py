"""The row that is recorded of a policy, and the stage that imports weights as version 0 of a run."""

import shutil
from pathlib import Path

import pyarrow as pa

from configs.run import View
from storage.schemas.stage_tables import POLICIES
from tasks.learner.client import Learner
from tasks.learner.protocol import LearnerLost
from tasks.runtime.prefect_task import as_task
from tasks.runtime.services import LearnerService, retry_lost
from tasks.runtime.stage import Policy, Stage, Tables

# Long enough to fill cache blocks of an engine, so that a stale prefix cache shows; engines use as much as fits.
PROBE_LENGTH = 160


def policy_row(
    learner: Learner, key: str, version: int, parent: str | None, vocab_size: int, has_optimizer: bool
) -> pa.Table:
    """Return the row of the policy that the learner holds, with its log-probs of a fixed token sequence.

    That is text, where the policy has a tokenizer: on tokens without sense log-probs are far below those of rollouts,
    and differences in half precision far above.
    """
    state = learner.state()
    probe = list(state["probe_token_ids"])[:PROBE_LENGTH] or probe_token_ids(vocab_size)
    row = {
        "policy_key": key,
        "version": version,
        "parent_key": parent,
        "weights_sha256": state["weights_sha256"],
        "has_optimizer": has_optimizer,
        "probe_token_ids": probe,
        "probe_logprobs": learner.probe(probe),
    }
    return pa.Table.from_pylist([row], schema=POLICIES.arrow)


def probe_token_ids(vocab_size: int) -> list[int]:
    """Return a token sequence for a policy without a tokenizer of its own; scattered over the vocabulary."""
    return [(7919 * position + 104_729) % vocab_size for position in range(PROBE_LENGTH)]


def policy_import(
    tables: Tables, config: View, *, key: str, source: str, directory: Path, learner: LearnerService
) -> Tables:
    """Copy the weights directory `source` and have the learner measure the probe on it.

    The copy makes the run whole: it can be resumed when the original is gone. Optimizer state is left behind, since
    what it belongs to is another run's schedule.
    """
    shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("optimizer*", "manifest.json"))

    def measure() -> Tables:
        client = learner.load_fresh(Policy(key, 0), directory)
        return {"policies": policy_row(client, key, 0, None, config.model.vocab_size, False)}

    with learner.turn():
        return retry_lost(measure, LearnerLost)


STAGE = Stage(
    name="policy_import",
    version=1,
    reads=(),
    writes=("policies",),
    sections=("model",),
    function=policy_import,
)
task = as_task(STAGE)
