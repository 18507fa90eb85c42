"""AdamW over the policy's parameters, with a learning rate that is a pure function of the step."""

import math

import torch

from configs.sections import TrainingConfig
from tasks.learner.distributed import World, local
from tasks.learner.model import Policy


def learning_rate(step: int, settings: TrainingConfig) -> float:
    """Return the rate of the 0-based `step`: linear warm-up to the peak, then constant or linear down to zero.

    Warm-up reaches the peak with its last step; the decay starts there and is zero from `decay_steps` on.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if not settings.decay_steps:
        return settings.learning_rate
    left = settings.decay_steps - step
    return settings.learning_rate * min(1.0, max(0.0, left / max(1, settings.decay_steps - settings.warmup_steps)))


def new_optimizer(policy: Policy, settings: TrainingConfig) -> torch.optim.AdamW:
    """Return AdamW without state. Weight decay is for matrices; norms and biases have none."""
    parameters = list(policy.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )


def clip_gradients(policy: Policy, limit: float, world: World) -> float:
    """Scale all gradients so that their global norm is at most `limit`; return the norm before.

    Summed in float64, so that the number of ranks hardly shows. A norm that is not finite leaves the gradients as they
    are: the caller refuses the step.
    """
    shards = [local(p.grad) for p in policy.parameters() if p.grad is not None]
    own = sum(float(torch.linalg.vector_norm(shard, dtype=torch.float64)) ** 2 for shard in shards)
    norm = math.sqrt(sum(world.gather(own)))
    if limit < norm < math.inf:
        for shard in shards:
            shard.mul_(limit / norm)
    return norm


def apply_gradients(optimizer: torch.optim.AdamW, rate: float) -> None:
    """Make one step at learning rate `rate` and clear the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
