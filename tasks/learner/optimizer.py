"""What makes an update of a gradient: AdamW, Muon with AdamW beside it, or sign-SGD, as kept libraries have them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from configs.optimizers import MuonOptimizer, SignSgdOptimizer
from configs.training import TrainingConfig
from tasks.learner.distributed import World, like, local, whole
from tasks.learner.model import PolicyModel


@dataclass(frozen=True)
class OptimizerPart:
    """A torch optimizer over some of the parameters."""

    inner: torch.optim.Optimizer
    moments: tuple[str, ...]
    """Tensors of state that it keeps for each parameter, of the parameter's shape."""
    counts_steps: bool = False
    """Whether its state has the number of steps."""
    rate_ratio: float = 1.0
    """Its learning rate over that of the schedule."""

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
    """Return the chosen optimizer without state. Weight decay is for matrices; norms and biases have none."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    if isinstance(settings.optimizer, SignSgdOptimizer):
        return Optimizer((_sign_sgd(parameters, settings.optimizer, settings),))
    if not isinstance(settings.optimizer, MuonOptimizer):
        return Optimizer((_adamw(parameters, settings),))
    edges = {id(p) for p in _edges(policy)}
    inner = [p for p in parameters if p.ndim == 2 and id(p) not in edges]
    others = [p for p in parameters if p.ndim != 2 or id(p) in edges]
    parts = [_muon(inner, settings.optimizer, settings)] if inner else []
    return Optimizer((*parts, *([_adamw(others, settings)] if others else [])))


def clip_gradients(policy: PolicyModel, limit: float, world: World) -> float:
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


def apply_gradients(optimizer: Optimizer, rate: float) -> None:
    """Make one step at learning rate `rate` and clear the gradients."""
    for part in optimizer.parts:
        for group in part.inner.param_groups:
            group["lr"] = rate * part.rate_ratio
        part.inner.step()
    optimizer.zero_grad()


class WholeMuon(torch.optim.Muon):
    """torch's Muon, given one whole matrix after the other: Newton-Schulz needs all rows of it.

    On sharded matrices torch's own would run by shards, and its bfloat16 products would round otherwise for every
    number of ranks. Here every rank makes the same update and keeps its rows of it, and of the momentum.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Make one step; as much memory as one whole matrix with gradient and momentum is needed on the way."""
        assert closure is None, "gradients are there when a step is made"
        for group in self.param_groups:
            options = {name: group[name] for name in self.defaults}
            for parameter in group["params"]:
                self._step_matrix(parameter, options)

    def _step_matrix(self, parameter: nn.Parameter, options: dict[str, Any]) -> None:
        if parameter.grad is None:
            return
        matrix, state = nn.Parameter(whole(parameter.detach())), self.state[parameter]
        matrix.grad = whole(parameter.grad)
        single = torch.optim.Muon([matrix], **options)
        single.state[matrix] = {name: whole(moment) for name, moment in state.items()}
        single.step()
        parameter.copy_(like(matrix.detach(), parameter))
        state.update({name: like(moment, parameter) for name, moment in single.state[matrix].items()})


def _adamw(parameters: list[nn.Parameter], settings: TrainingConfig) -> OptimizerPart:
    made = torch.optim.AdamW(
        _decayed_apart(parameters, settings),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )
    return OptimizerPart(made, ("exp_avg", "exp_avg_sq"), counts_steps=True)


def _muon(parameters: list[nn.Parameter], chosen: MuonOptimizer, settings: TrainingConfig) -> OptimizerPart:
    made = WholeMuon(
        parameters,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        momentum=chosen.momentum,
        nesterov=chosen.nesterov,
        ns_steps=chosen.ns_steps,
        adjust_lr_fn=chosen.adjust_lr,
    )
    ratio = 1.0 if chosen.learning_rate is None else chosen.learning_rate / settings.learning_rate
    return OptimizerPart(made, ("momentum_buffer",), rate_ratio=ratio)


def _sign_sgd(parameters: list[nn.Parameter], chosen: SignSgdOptimizer, settings: TrainingConfig) -> OptimizerPart:
    # It imports more than a hundred optimizers: only whoever asks for this one waits for them.
    from pytorch_optimizer import SignSGD

    groups = _decayed_apart(parameters, settings)
    made = SignSGD(groups, lr=settings.learning_rate, momentum=chosen.momentum, foreach=False)
    return OptimizerPart(made, ("momentum_buffer",) if chosen.momentum else ())


def _decayed_apart(parameters: list[nn.Parameter], settings: TrainingConfig) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _edges(policy: PolicyModel) -> Iterator[nn.Parameter]:
    """Yield the matrices that look tokens up rather than map one space onto another."""
    for module in policy.modules():
        if isinstance(module, nn.Embedding):
            yield module.weight
    yield policy.causal.get_output_embeddings().weight
