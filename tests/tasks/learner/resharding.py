"""What ranks do with a policy on disk: `python -m torch.distributed.run ... -m tests.tasks.learner.resharding FROM TO`.

They load weights, with optimizer state where there is some, and save both. Without it they make a step first.
"""

import sys
from pathlib import Path

import torch

from configs.training import TrainingConfig
from tasks.learner.checkpoint import companions, load_optimizer, save_policy
from tasks.learner.digest import OPTIMIZER_FILE
from tasks.learner.distributed import like, start_world
from tasks.learner.model import load_policy
from tasks.learner.optimizer import apply_gradients, new_optimizer


def main(source: Path, target: Path) -> None:
    """Load, make a step if it is the first, and save."""
    world, settings = start_world(), TrainingConfig(device="cpu", dtype="float32")
    policy = load_policy(source, settings, torch.device("cpu"))
    optimizer = new_optimizer(policy, settings)
    if (source / OPTIMIZER_FILE).exists():
        load_optimizer(policy, optimizer, source)
    else:
        generator = torch.Generator().manual_seed(0)
        for parameter in policy.parameters():
            parameter.grad = like(torch.randn(parameter.shape, generator=generator), parameter)
        apply_gradients(optimizer, 1e-2)
    save_policy(policy, optimizer, companions(source), target, world)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
