"""Kernels and bytes of a packed row, counted without a GPU by tensors that hold nothing.

Of layers and loss that are compiled, kernels and bytes are those of inductor's own schedule, forward and backward,
where the partitioner cut them. It is the schedule for a CPU: that for CUDA may fuse more. Nothing is built or run.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.learner_gpu import causal_model, packed_row
from configs.losses import DppoLoss, LossConfig
from configs.training import TrainingConfig
from tasks.learner import attention, head
from tasks.learner.distributed import World
from tasks.learner.head import default_chunk
from tasks.learner.loop import train_row
from tasks.learner.loss import Objective
from tasks.learner.model import PolicyModel, compile_policy
from tasks.learner.recompute import recompute_layers
from tasks.learner.speed import training_cost

VIEWS = (
    *("view", "t", "transpose", "slice", "select", "expand", "detach", "unsqueeze", "squeeze", "permute", "alias"),
    *("_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided", "split", "as_strided", "_reshape_alias"),
    *("device", "lift_fresh", "promote_types"),
)
"""Operations that move nothing."""
PRODUCTS = ("mm", "bmm", "addmm", "_varlen_attn", "_varlen_attn_backward")
"""Matrix products and attention, whose bytes are not counted: they are bound by what they compute."""
DEVICE = torch.device("cpu")


class Traffic(TorchDispatchMode):
    """Counts kernels, and the bytes that those read and write which are no matrix products."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.paused = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Say that it changes nothing, or what is compiled would not be called while it counts."""
        return True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        name = op._schema.name.split("::")[1]
        if not self.paused and name not in VIEWS:
            tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)]
            moved = 0 if name in PRODUCTS else sum(map(_moved, tensors))
            self.add(any(self.vocabulary in each.shape for each in tensors), 1, moved)
        return out

    def add(self, of_head: bool, kernels: int, moved: int) -> None:
        """Count kernels, and bytes that they move."""
        part = "head" if of_head else "layers"
        self.kernels[part] += kernels
        self.bytes[part] += moved


def _moved(tensor: Tensor) -> int:
    """Return the bytes of a tensor; what was expanded is read once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size


def roofline(
    shape: str,
    tokens: int,
    segments: int,
    compiled: bool,
    layers: int = 0,
    loss: LossConfig | None = None,
    recompute: str = "false",
) -> dict[str, Any]:
    """Count what a row takes to be trained in bfloat16, with as many layers as the shape has if `layers` is 0."""
    with FakeTensorMode(allow_non_fake_inputs=True), _as_on_cuda():
        policy = PolicyModel(causal_model(shape, torch.bfloat16, layers), 0).train()
        policy.chunk = default_chunk(policy.causal.config.vocab_size, torch.device("cuda"))
        settings = TrainingConfig.model_validate({"gradient_checkpointing": recompute})
        recompute_layers(policy.causal, policy.layers(), settings, DEVICE)
        row = packed_row(tokens, segments)
        denominators = {"rl": len(row.weighted), "ce": 0, "ref_kl": 0}
        traffic = Traffic(policy.causal.config.vocab_size)
        if compiled:
            torch._dynamo.reset()
            compile_policy(policy, DEVICE, one_graph=True, backend=counting(traffic))
        train = partial(train_row, policy, row, denominators, Objective(loss or DppoLoss()), World(0, 1, 0), DEVICE)
        train()  # compiles, which is not to be counted
        policy.zero_grad()
        traffic.kernels.clear()
        traffic.bytes.clear()
        with traffic:
            train()
        cost = training_cost(policy)
    assert cost is not None
    return {
        "shape": shape,
        "row": f"{segments}x{tokens // segments}",
        "compiled": compiled,
        "kernels": dict(traffic.kernels),
        "bytes": dict(traffic.bytes),
        "flop_of_model": cost.of([row]),
    }


@contextmanager
def _as_on_cuda() -> Iterator[None]:
    """Have the learner call what it calls on CUDA; of tensors that hold nothing only the shapes are computed."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(attention, "VARLEN_KERNELS", {("cpu", torch.bfloat16)}))
        stack.enter_context(patch.object(head, "WITH_OUT_DTYPE", ("cpu",)))
        yield


def counting(traffic: Traffic) -> Callable[..., Any]:
    """Return a backend whose graphs compute shapes, and count at each call what inductor would launch for them."""

    def inner(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        # Inductor changes the graph that it is given.
        plain = torch.fx.GraphModule(graph, _copied(graph.graph))
        kernels, moved, of_head = _scheduled(graph, inputs, options, traffic.vocabulary)

        def run(arguments: list[Any]) -> Any:
            traffic.add(of_head, kernels, moved)
            traffic.paused = True
            try:
                return torch.fx.Interpreter(plain).boxed_run(arguments)
            finally:
                traffic.paused = False

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        with config.patch(force_disable_caches=True):
            return compile_fx.compile_fx(graph, inputs, inner_compile=inner)

    return backend


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _scheduled(graph: Any, inputs: Any, options: Any, vocabulary: int) -> tuple[int, int, bool]:
    """Return kernels, their bytes without products, and whether a tensor is as wide as the vocabulary."""
    found: list[tuple[int, int]] = []

    def count(lowering: GraphLowering) -> Any:
        lowering.codegen()
        # What picks one of several outputs is a node as well, and moves nothing.
        moved = {each: each.get_read_write_buffers_sizes() for each in lowering.scheduler.nodes}
        launched = [each for each in moved if moved[each] and not isinstance(each, scheduler.NopKernelSchedulerNode)]
        own = [each for each in launched if not isinstance(each, scheduler.ExternKernelSchedulerNode)]
        found.append((len(launched), sum(moved[each] for each in own)))
        return SimpleNamespace(call=None, __file__="", cache_key="", cache_linemap=[], cache_path="")

    wide = any(
        vocabulary in getattr(node.meta.get("val"), "shape", ()) for node in graph.graph.nodes if node.op != "output"
    )
    with patch.object(GraphLowering, "compile_to_module", count):
        compile_fx.compile_fx_inner(graph, inputs, **options)
    return *found[-1], wide
