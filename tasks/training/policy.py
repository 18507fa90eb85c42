"""The row that is recorded of a policy, and the stage that imports weights as version 0 of a run."""

import shutil
import subprocess
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Self

import pyarrow as pa

from configs.checks.run import model_config
from configs.run import View
from storage.schemas.stage_tables import POLICIES
from tasks.learner.client import Learner
from tasks.learner.protocol import LearnerError, LearnerLost
from tasks.runtime.prefect_task import as_task
from tasks.runtime.process_variables import inherited_variables, module_command
from tasks.runtime.services import LearnerService, require
from tasks.runtime.stage import Attempt, Policy, Stage, Tables, retry_lost
from tasks.runtime.weights_sum import SUMS_FILE

# Long enough to fill cache blocks of an engine, so that a stale prefix cache shows; engines use as much as fits.
PROBE_LENGTH = 160


def policy_row(
    learner: Learner, key: str, version: int, parent: str | None, vocab_size: int, has_optimizer: bool
) -> pa.Table:
    """Return the row of the policy that the learner holds, with its log-probs of a fixed token sequence.

    That is text, where the policy has a tokenizer: on tokens without sense log-probs are far below those of rollouts,
    and differences in half precision far above. The first policy's text is longer than the windows of its attention:
    by it the engine is proven to compute the model as the learner does, and later ones to hold the right weights.
    """
    state = learner.state()
    length = PROBE_LENGTH if version else max(PROBE_LENGTH, state["proof_length"])
    probe = list(islice(cycle(state["probe_token_ids"]), length)) or probe_token_ids(vocab_size, length)
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


def probe_token_ids(vocab_size: int, length: int = PROBE_LENGTH) -> list[int]:
    """Return a token sequence for a policy without a tokenizer of its own; scattered over the vocabulary."""
    return [(7919 * position + 104_729) % vocab_size for position in range(length)]


@dataclass(frozen=True)
class PolicyImportInputs:
    """Where weights come from and go, and the learner that measures them."""

    source: str
    directory: Path
    key: str
    learner: LearnerService

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        return cls(attempt.parameters, attempt.directory, attempt.key, require(attempt.services.learner))


def policy_import(inputs: PolicyImportInputs, config: View) -> Tables:
    """Copy the weights directory `source` and have the learner measure the probe on it.

    The copy makes the run whole: it can be resumed when the original is gone. Optimizer state is left behind, since
    what it belongs to is another run's schedule. Quantised weights are written again in bfloat16.
    """
    key, directory, learner = inputs.key, inputs.directory, inputs.learner
    if model_config(inputs.source).get("quantization_config"):
        _dequantise(inputs.source, directory)
    else:
        ignored = shutil.ignore_patterns("optimizer*", "manifest.json", SUMS_FILE)
        shutil.copytree(inputs.source, directory, dirs_exist_ok=True, ignore=ignored)

    def measure() -> Tables:
        client = learner.load_fresh(Policy(key, 0), directory)
        return {"policies": policy_row(client, key, 0, None, config.model.vocab_size, False)}

    with learner.turn():
        return retry_lost(measure, LearnerLost)


def _dequantise(source: str, directory: Path) -> None:
    argv = module_command("tasks.learner.quantised", source, str(directory))
    done = subprocess.run(argv, env=inherited_variables(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise LearnerError(
            f"the quantised weights in {source} could not be written in bfloat16: {done.stderr.strip()[-2000:]}\n"
            "Nothing was imported. Take the model's checkpoint in bfloat16"
        )


STAGE = Stage(
    name="policy_import",
    version=1,
    reads=(),
    writes=("policies",),
    sections=("model",),
    read_inputs=PolicyImportInputs.read,
    function=policy_import,
    services=("learner",),
)
task = as_task(STAGE)
