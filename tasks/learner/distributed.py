"""The learner's ranks: one process, or several under torchrun, with the same code.

Parameters are sharded with FSDP2, which is bit-identical to no sharding; so one rank in float32 goes without, whose
small models would spend most of their time in its hooks. FSDP2 averages gradients over ranks, and gloo refuses another
divisor, so the loss is multiplied by the number of ranks instead.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tasks.learner.context_parallel import ContextGroup
from tasks.learner.expert_parallel import deal_experts
from tasks.learner.protocol import LearnerError

# Ranks wait for the next request in a broadcast, as long as rollouts take. A long timeout costs nothing: the death of a
# rank closes its connections, which the others notice at once.
PATIENCE = timedelta(days=30)
# Kernels of NCCL notice nothing: its watchdog ends a rank that waits longer in one, as `learner.hang_seconds` would.
WATCHDOG = timedelta(minutes=30)
BACKEND, LONGEST = ("cpu:gloo,cuda:nccl", WATCHDOG) if torch.cuda.is_available() else ("gloo", PATIENCE)

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The ranks that train together, seen from one of them."""

    rank: int
    size: int
    local_rank: int
    replicas: int = 1
    """Copies of the weights. The ranks of one copy, which come one after the other, have a shard of it each."""
    context: ContextGroup | None = None
    """The ranks beside this one that share its rows; None where each rank has rows of its own."""
    expert_parallel: int = 1
    """The ranks that have the experts of one copy of a layer, some each."""
    control: dist.ProcessGroup | None = None
    """All ranks, for what they say to each other on the CPU."""

    @property
    def ranks_per_row(self) -> int:
        """How many ranks share a row."""
        return self.context.size if self.context else 1

    def arrange(self, replicas: int, context_parallel: int, expert_parallel: int = 1) -> "World":
        """Return the same ranks with so many copies of the weights, so many at one row, and so many to deal experts to.

        All ranks must call this together. Raises LearnerError where their number is no multiple of the first two.
        """
        if (self.replicas, self.ranks_per_row, self.expert_parallel) == (replicas, context_parallel, expert_parallel):
            return self
        for name, number in (("replicas", replicas), ("context_parallel", context_parallel)):
            if self.size % number:
                raise LearnerError(f"learner.{name} is {number}, which does not divide the {self.size} processes")
        group = dist.new_subgroups(context_parallel)[0] if context_parallel > 1 else None
        context = ContextGroup(group, self.rank % context_parallel, context_parallel) if group else None
        return replace(self, replicas=replicas, context=context, expert_parallel=expert_parallel)

    def broadcast(self, message: Any) -> Any:
        """Return rank 0's `message` on every rank."""
        if self.size == 1:
            return message
        container = [message]
        dist.broadcast_object_list(container, src=0, group=self.control)
        return container[0]

    def gather(self, part: Any) -> list[Any]:
        """Return every rank's `part`, in rank order, on every rank."""
        if self.size == 1:
            return [part]
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, part, group=self.control)
        return parts

    def gather_to_first(self, part: Any) -> list[Any] | None:
        """Return every rank's `part`, in rank order, on rank 0; None on the others."""
        if self.size == 1:
            return [part]
        parts: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(part, parts, dst=0, group=self.control)
        return parts

    def agree(self, action: Callable[[], T]) -> T:
        """Return what `action` returns, which waits for no other rank. What it refuses on one rank, all refuse.

        All ranks must call this together: those that went on alone would wait for the others for ever.
        """
        result: T | None = None
        refusal: LearnerError | None = None
        try:
            result = action()
        except LearnerError as error:
            refusal = error
        for refused in filter(None, self.gather(refusal)):
            raise refused
        return cast(T, result)


ALONE = World(0, 1, 0)


def start_world() -> World:
    """Join the ranks that torchrun started, or form a world of one rank, which needs no port. Once per process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group(BACKEND, timeout=LONGEST)
        control = dist.new_group(backend="gloo", timeout=PATIENCE)
        return World(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"]), control=control)
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1, timeout=LONGEST)
    return ALONE


def end_rank() -> NoReturn:
    """End the process of a rank whose work is done, without the interpreter's own end.

    There torch's threads now and then abort the process ("terminate called without an active exception"), also after
    the group is left, and torchrun takes that for a failure of the rank.
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def shard(
    policy: nn.Module,
    layers: nn.ModuleList,
    device: torch.device,
    half: bool,
    replicas: int = 1,
    expert_parallel: int = 1,
) -> None:
    """Shard `policy` over all ranks, layer by layer, in place; `half` computes in bfloat16 from float32 weights.

    With `replicas`, there are so many copies: weights are gathered among the ranks of one of them alone, and gradients
    are added over all (hybrid sharding). One rank that does not compute in bfloat16 keeps its parameters as they are.
    Experts are dealt to `expert_parallel` ranks.
    """
    if dist.get_world_size() == 1 and not half:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    size = dist.get_world_size()
    axes, names = ((replicas, size // replicas), ("replicate", "shard")) if replicas > 1 else ((size,), ("shard",))
    mesh: DeviceMesh = init_device_mesh(device.type, axes, mesh_dim_names=names)
    # Inputs keep their type: temperatures would lose digits in bfloat16.
    precision = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        if half
        else MixedPrecisionPolicy()
    )
    if expert_parallel > 1:
        deal_experts(layers, device, replicas, expert_parallel, precision)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    # Last, because it takes the parameters that no layer has: embedding, final norm and output head.
    fully_shard(policy, mesh=mesh, mp_policy=precision)


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on `device`, without waiting for what that is busy with."""
    tensor = torch.from_numpy(array)
    # A copy from memory that is not pinned waits for every kernel before it.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def whole(tensor: Tensor) -> Tensor:
    """Return a parameter's or a norm's full value on every rank; all ranks must call this together."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a gradient, sharing its memory."""
    shard_of = getattr(tensor, "to_local", None)
    return tensor if shard_of is None else shard_of()


def like(full: Tensor, parameter: Tensor) -> Tensor:
    """Return `full`, which every rank has, sharded as `parameter` is. Nothing is communicated."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(parameter, DTensor):
        here = full.to(parameter.device)
        return distribute_tensor(here, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return full.to(parameter.device)
