"""The optimizer (AdamW, Muon with AdamW for the rest, or sign-SGD), gradient clipping and the learning rate schedule.

The update rules are those of torch and pytorch_optimizer; only Muon on sharded matrices needs code of its own.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from configs.training import MuonOptimizer, SignSgdOptimizer, TrainingConfig, WsdSchedule
from tasks.learner.distributed import World, like, local, whole
from tasks.learner.model import PolicyModel


@dataclass(frozen=True)
class OptimizerPart:
    """A torch optimizer over some of the parameters."""

    inner: torch.optim.Optimizer
    moments: tuple[str, ...]
    """Names of its state tensors for each parameter, of the parameter's shape."""
    counts_steps: bool = False
    """Whether its state has a step counter."""
    rate_ratio: float = 1.0
    """Its learning rate divided by that of the schedule."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that it updates."""
        for group in self.inner.param_groups:
            yield from group["params"]


@dataclass(frozen=True)
class Optimizer:
    """All parts together; each parameter that is trained belongs to one of them."""

    parts: tuple[OptimizerPart, ...]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for part in self.parts:
            part.inner.zero_grad(set_to_none=True)


def new_optimizer(policy: PolicyModel, settings: TrainingConfig) -> Optimizer:
    """Return the configured optimizer without state. Weight decay is for matrices; norms and biases have none."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    if isinstance(settings.optimizer, SignSgdOptimizer):
        return Optimizer((_sign_sgd(parameters, settings.optimizer, settings),))
    if not isinstance(settings.optimizer, MuonOptimizer):
        return Optimizer((_adamw(parameters, settings),))
    # Muon is for maps from one space onto another; embedding and output head are updated by AdamW.
    edges = {id(p) for p in _embedding_and_head(policy)}
    inner = [p for p in parameters if p.ndim == 2 and id(p) not in edges]
    others = [p for p in parameters if p.ndim != 2 or id(p) in edges]
    # Torch refuses an optimizer without parameters.
    parts = [_muon(inner, settings.optimizer, settings)] if inner else []
    return Optimizer((*parts, *([_adamw(others, settings)] if others else [])))


def clip_gradients(policy: PolicyModel, limit: float, world: World) -> float:
    """Scale all gradients so that their global norm is at most `limit`; return the norm before.

    Summed in float64, so that the number of ranks hardly shows. A norm that is not finite leaves the gradients as they
    are: the caller refuses the step.
    """
    shards = [local(p.grad) for p in policy.parameters() if p.grad is not None]
    # One kernel for many shards, and one copy to the host. Torch's own function for this sums in float32.
    norms = torch.stack(torch._foreach_norm(shards, 2, dtype=torch.float64)).tolist()
    # Of several copies the first one counts.
    one_copy = world.gather(sum(each**2 for each in norms))[: world.size // world.replicas]
    norm = math.sqrt(sum(one_copy))
    if limit < norm < math.inf:
        torch._foreach_mul_(shards, limit / norm)
    return norm


def apply_gradients(optimizer: Optimizer, rate: float) -> None:
    """Make one step at learning rate `rate` and clear the gradients."""
    for part in optimizer.parts:
        for group in part.inner.param_groups:
            group["lr"] = rate * part.rate_ratio
        part.inner.step()
    optimizer.zero_grad()


def learning_rate(step: int, settings: TrainingConfig) -> float:
    """Return the learning rate of the 0-based optimizer step: linear warm-up to the peak, then the schedule's decay.

    A pure function of the step: a run that was killed, resumed or branched off has the same rates.

    Warm-up reaches the peak with its last step. After a share x of the decay, `min_ratio + (1 - min_ratio) f(x)` of the
    peak is left, with f(x) = 1 - x (linear), (1 + cos(pi x)) / 2 (cosine; SGDR, arXiv 1608.03983) or 1 - sqrt(x) (wsd;
    arXiv 2405.18392). From `decay_steps` on x is 1.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    schedule = settings.schedule
    if schedule.type == "constant" or not settings.decay_steps:
        return settings.learning_rate
    start = settings.warmup_steps
    if isinstance(schedule, WsdSchedule):
        start = settings.decay_steps - schedule.final_steps
    left = min(1.0, max(0.0, (settings.decay_steps - step) / max(1, settings.decay_steps - start)))
    shape = schedule.shape if isinstance(schedule, WsdSchedule) else schedule.type
    return settings.learning_rate * (schedule.min_ratio + (1 - schedule.min_ratio) * _decay_shape(shape, left))


def _decay_shape(shape: str, left: float) -> float:
    """Return f(1 - `left`): `left` is the share of the decay that is still to come."""
    if shape == "cosine":
        return (1 - math.cos(math.pi * left)) / 2
    return 1 - math.sqrt(1 - left) if shape == "sqrt" else left


class WholeMuon(torch.optim.Muon):
    """torch's Muon, given one whole matrix after the other: Newton-Schulz needs all rows of it.

    On sharded matrices torch's own would orthogonalise each shard by itself, and its bfloat16 products would round
    differently for every number of ranks. Here every rank computes the same update of the whole matrix and keeps its
    rows of it, and of the momentum.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one step; needs memory for one whole matrix with its gradient and momentum at a time."""
        assert closure is None, "gradients are there when a step is torch_optimizer"
        for group in self.param_groups:
            options = {name: group[name] for name in self.defaults}
            for parameter in group["params"]:
                self._step_matrix(parameter, options)

    def _step_matrix(self, parameter: nn.Parameter, options: dict[str, Any]) -> None:
        if parameter.grad is None:
            return
        matrix, state = nn.Parameter(whole(parameter.detach())), self.state[parameter]
        matrix.grad = whole(parameter.grad)
        # An optimizer for this one matrix, so that the update is torch's own to the last bit.
        single = torch.optim.Muon([matrix], **options)
        single.state[matrix] = {name: whole(moment) for name, moment in state.items()}
        single.step()
        parameter.copy_(like(matrix.detach(), parameter))
        state.update({name: like(moment, parameter) for name, moment in single.state[matrix].items()})


def _adamw(parameters: list[nn.Parameter], settings: TrainingConfig) -> OptimizerPart:
    torch_optimizer = torch.optim.AdamW(
        _decay_groups(parameters, settings),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )
    return OptimizerPart(torch_optimizer, ("exp_avg", "exp_avg_sq"), counts_steps=True)


def _muon(parameters: list[nn.Parameter], own: MuonOptimizer, settings: TrainingConfig) -> OptimizerPart:
    torch_optimizer = WholeMuon(
        parameters,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        momentum=own.momentum,
        nesterov=own.nesterov,
        ns_steps=own.ns_steps,
        adjust_lr_fn=own.adjust_lr,
    )
    ratio = 1.0 if own.learning_rate is None else own.learning_rate / settings.learning_rate
    return OptimizerPart(torch_optimizer, ("momentum_buffer",), rate_ratio=ratio)


def _sign_sgd(parameters: list[nn.Parameter], own: SignSgdOptimizer, settings: TrainingConfig) -> OptimizerPart:
    # Imported here because it imports more than a hundred optimizers, which takes seconds.
    from pytorch_optimizer import SignSGD

    groups = _decay_groups(parameters, settings)
    torch_optimizer = SignSGD(groups, lr=settings.learning_rate, momentum=own.momentum, foreach=False)
    return OptimizerPart(torch_optimizer, ("momentum_buffer",) if own.momentum else ())


def _decay_groups(parameters: list[nn.Parameter], settings: TrainingConfig) -> list[dict[str, Any]]:
    groups: dict[Any, list[nn.Parameter]] = {}
    for each in parameters:
        # Torch updates a group at once, which must be sharded over the same ranks.
        groups.setdefault((each.ndim < 2, getattr(each, "device_mesh", None)), []).append(each)
    return [
        {"params": group, "weight_decay": 0.0 if is_vector else settings.weight_decay}
        for (is_vector, _), group in groups.items()
    ]


def _embedding_and_head(policy: PolicyModel) -> Iterator[torch.Tensor]:
    """Yield the matrices that look tokens up rather than map one space onto another."""
    for module in policy.modules():
        if isinstance(module, nn.Embedding):
            yield module.weight
    yield policy.causal.get_output_embeddings().weight
