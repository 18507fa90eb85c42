"""What ranks do with a policy on disk: `python -m torch.distributed.run ... -m tests.tasks.learner.resharding FROM TO`.

They load weights, with optimizer state where there is some, and save both. Without it they make a step first. With
`bfloat16` as third argument policies are rounded, and all ranks write them.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

from configs.training import TrainingConfig
from tasks.learner import shards
from tasks.learner.checkpoint import companions, load_optimizer, save_policy, save_rounded
from tasks.learner.digest import OPTIMIZER_PREFIX
from tasks.learner.distributed import World, end_rank, like, start_world
from tasks.learner.model import PolicyModel, load_policy
from tasks.learner.optimizer import apply_gradients, new_optimizer

CPU = torch.device("cpu")
SMALL = 1 << 14
"""Bytes of a file, so that a tiny policy is several."""


def save_again(world: World, source: Path, target: Path, dtype: str = "float32") -> PolicyModel:
    """Load, make a step if it is the first, and save; return what was saved."""
    settings = TrainingConfig(device="cpu", dtype=dtype, policy_dtype=dtype)
    policy = load_policy(source, settings, CPU)
    optimizer = new_optimizer(policy, settings)
    if any(source.glob(f"{OPTIMIZER_PREFIX}*")):
        load_optimizer(policy, optimizer, source)
    else:
        generator = torch.Generator().manual_seed(0)
        for parameter in policy.parameters():
            parameter.grad = like(torch.randn(parameter.shape, generator=generator), parameter)
        apply_gradients(optimizer, 1e-2)
    save = save_rounded if dtype == "bfloat16" else save_policy
    save(policy, optimizer, companions(source, dtype), target, world)
    return policy


def through_ranks(number: int, source: Path, target: Path, *dtype: str) -> Path:
    """Load and save a policy by so many ranks, in processes of their own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    done = subprocess.run(
        [*command, "-m", "tests.tasks.learner.resharding", str(source), str(target), *dtype],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return target


if __name__ == "__main__":
    shards.SHARD_BYTES = SMALL
    save_again(start_world(), Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    end_rank()
