"""Expert parallelism: the ranks of a group have some experts of each layer each, for the rows of all of them.

Made when a policy is sharded, where `learner.expert_parallel` is above 1. Ranks gather states, choices and weights of
the group's tokens, each computes its own experts of these, and the sums go back to the ranks of the tokens (GShard,
arXiv 2006.16668, with an all-gather in place of its all-to-all: no more is sent where a token uses as many experts as
the group has ranks).
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single_autograd, reduce_scatter_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def deal_experts(
    layers: nn.ModuleList, device: torch.device, replicas: int, size: int, precision: MixedPrecisionPolicy
) -> None:
    """Deal the experts of all layers to groups of `size` ranks; those with the same ones shard them (FSDP2)."""
    axes = replicas, dist.get_world_size() // (replicas * size), size
    mesh = init_device_mesh(device.type, axes, mesh_dim_names=("replicate", "shard", "expert"))
    shards = mesh["replicate", "shard"] if replicas > 1 else mesh["shard"]
    for experts in (module for name, module in layers.named_modules() if name.endswith(".experts")):
        for name, tensor in [*experts.named_parameters()]:
            dealt = distribute_tensor(tensor.detach(), mesh["expert"], [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(dealt, tensor.requires_grad))
        experts.forward = partial(_compute, experts, mesh["expert"])
        # By the last axis: transformers fuses what it reads along the others.
        fully_shard(experts, mesh=shards, mp_policy=precision, shard_placement_fn=lambda own: Shard(own.ndim - 1))


def _compute(experts: Any, mesh: DeviceMesh, states: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """Return what the experts of all ranks make of states (t, H), by choices and their weights (t, k)."""
    number, longest = experts.num_experts // mesh.size(), torch.tensor(len(states))
    dist.all_reduce(longest, dist.ReduceOp.MAX, mesh.get_group())  # on the CPU, as rows are

    def gather(values: Tensor, filler: float = 0) -> Tensor:
        filled = nn.functional.pad(values, (0, 0, 0, int(longest) - len(values)), value=filler)
        gathered: Tensor = all_gather_single_autograd(filled, 0, mesh)
        return gathered

    everybody, counted = gather(states), gather(weights)
    local = gather(choices, -1) - mesh.get_local_rank() * number
    own = (local >= 0) & (local < number)
    counted = counted.masked_fill(~own, 0)
    # Without any token a rank would leave out what the others wait for; this one counts nothing.
    own[0, 0] = True
    token, place = own.nonzero(as_tuple=True)
    local = local.clamp(0, number - 1)[token, place, None]
    dealt = OwnExperts(experts, number)
    made = type(experts).forward(dealt, everybody[token], local, counted[token, place, None])
    sums = torch.zeros_like(everybody).index_add(0, token, made)
    of_own: Tensor = reduce_scatter_single_autograd(sums, "sum", 0, mesh)
    return of_own[: len(states)].clone()


class OwnExperts:
    """Stands for a module of experts that has those of this rank alone."""

    def __init__(self, experts: Any, number: int) -> None:
        self._experts, self.num_experts = experts, number

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module; of its weights those of this rank."""
        value = getattr(self._experts, name)
        if not isinstance(value, DTensor):
            return value
        own, size = value.to_local(), value.device_mesh.size()
        if own.requires_grad:
            # FSDP averages over ranks with the same experts; each has the sum over the rows of its group.
            own.register_hook(lambda gradient: gradient / size)
        return own
