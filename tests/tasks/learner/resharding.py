"""What ranks do with a policy on disk: `python -m torch.distributed.run ... -m tests.tasks.learner.resharding FROM TO`.

They load weights, with optimizer state where there is some, and save both. Without it they make a step first. With
`bfloat16` as third argument policies are rounded, and all ranks write them.
"""

import sys
from pathlib import Path

from configs.training import TrainingConfig
from tasks.learner import shards
from tasks.learner.checkpoint import companions, load_optimizer, save_policy, save_rounded
from tasks.learner.digest import OPTIMIZER_PREFIX
from tasks.learner.distributed import end_rank, start_world
from tasks.learner.model import load_policy
from tasks.learner.optimizer import new_optimizer
from tests.fixtures.policies import CPU, random_steps
from tests.tasks.learner.processes import run_ranks

SMALL = 1 << 14
"""Bytes of a file, so that a tiny policy is several."""


def save_again(world, source, target, dtype="float32"):
    """Load, make a step if it is the first, and save; return what was saved."""
    settings = TrainingConfig(device="cpu", dtype=dtype, policy_dtype=dtype)
    policy = load_policy(source, settings, CPU)
    optimizer = new_optimizer(policy, settings)
    if any(source.glob(f"{OPTIMIZER_PREFIX}*")):
        load_optimizer(policy, optimizer, source)
    else:
        random_steps(policy, optimizer, 1)
    save = save_rounded if dtype == "bfloat16" else save_policy
    save(policy, optimizer, companions(source, dtype), target, world)
    return policy


def through_ranks(number, source, target, *dtype):
    """Load and save a policy by so many ranks, in processes of their own."""
    run_ranks(number, "tests.tasks.learner.resharding", source, target, *dtype)
    return target


if __name__ == "__main__":
    shards.SHARD_BYTES = SMALL
    save_again(start_world(), Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    end_rank()
