"""How fast the learner trains a row on one GPU, beside what was predicted of it: JSON lines.

    python -m benchmarks.learner_gpu --roofline                counts kernels and bytes on meta tensors; needs no GPU
    python -m benchmarks.learner_gpu --ceilings                products, copies and attention by themselves
    python -m benchmarks.learner_gpu --shape 4B --segments 1   trains rows

Weights are random, so nothing is downloaded. It needs torch, transformers, numpy, pyarrow and pydantic.
"""

import argparse
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from configs.training import TrainingConfig
from tasks.learner.attention import ATTENTION, Segments, activate_attention, packed_attention, register_attention
from tasks.learner.distributed import shard, start_world
from tasks.learner.head import default_chunk
from tasks.learner.model import PolicyModel, compile_layers, run_row
from tasks.learner.optimizer import apply_gradients, new_optimizer
from tasks.learner.rows import STREAMS, Row
from tasks.learner.speed import Cost, StepTimer, training_cost

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""Widths of the Qwen3 family; all have heads of 128, eight of them for keys and values, and a head that is tied."""
VOCABULARY = 151936
VIEWS = (
    *("view", "t", "transpose", "slice", "select", "expand", "detach", "unsqueeze", "squeeze", "permute", "alias"),
    *("_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided", "split", "as_strided", "_reshape_alias"),
)
"""Operations that move nothing."""
PRODUCTS = ("mm", "bmm", "addmm", "_varlen_attn", "_varlen_attn_backward")


def causal_model(shape: str, dtype: torch.dtype, layers: int = 0) -> Any:
    """Return a model of random weights on torch's default device, of so many layers if not 0."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    register_attention()
    sizes = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    small = shape == "tiny"
    config = Qwen3Config(
        **sizes,
        vocab_size=512 if small else VOCABULARY,
        num_key_value_heads=2 if small else 8,
        head_dim=16 if small else 128,
        tie_word_embeddings=True,
        max_position_embeddings=65536,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)


def packed_row(tokens: int, segments: int) -> Row:
    """Return a row of equal segments in which every token but the first of each has weight."""
    borders = np.linspace(0, tokens, segments + 1).astype(int)
    streams = {name: np.zeros(tokens, np.float32) for name in STREAMS} | {"temperatures": np.ones(tokens, np.float32)}
    streams["rl_weights"][:] = 1
    streams["rl_weights"][borders[:-1]] = 0
    ids = np.random.default_rng(0).integers(0, 512, tokens)
    return Row(0, 0, 0, tuple(map(str, range(segments))), tuple(borders.tolist()), ids, streams)


class Traffic(TorchDispatchMode):
    """Counts kernels, and the bytes that those read and write which are no matrix products."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        name = op._schema.name.split("::")[1]
        if name not in VIEWS:
            tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)]
            part = "head" if any(self.vocabulary in each.shape for each in tensors) else "layers"
            self.kernels[part] += 1
            if name not in PRODUCTS:
                self.bytes[part] += sum(map(_moved, tensors))
        return out


def _moved(tensor: Tensor) -> int:
    """Return the bytes of a tensor; what was expanded is read once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size


def roofline(shape: str, tokens: int, segments: int, layers: int = 0) -> dict[str, Any]:
    """Count what a row takes in bfloat16 without compiled layers, by meta tensors, which hold nothing."""
    device = torch.device("meta")
    with device:
        policy = PolicyModel(causal_model(shape, torch.bfloat16, layers), 0).train()
    policy.chunk = default_chunk(policy.causal.config.vocab_size, torch.device("cuda"))
    row = packed_row(tokens, segments)
    # Attention is counted by the formula: on meta tensors the lengths of segments are not known.
    with FlopCounterMode(display=False) as counter, Traffic(policy.causal.config.vocab_size) as traffic:
        logprobs, entropies = run_row(policy, row, device)
        (logprobs.sum() + entropies.sum()).backward()
    products = {
        str(op): number for op, number in counter.get_flop_counts()["Global"].items() if "varlen" not in str(op)
    }
    cost = training_cost(policy)
    assert cost is not None
    return {
        "shape": shape,
        "row": f"{segments}x{tokens // segments}",
        "kernels": dict(traffic.kernels),
        "bytes": dict(traffic.bytes),
        "flop_of_products": sum(products.values()),
        "flop_of_model": cost.of([row]),
    }


def measured(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Train rows, one optimizer step each; yield the figures of every step, the first of which compiles."""
    settings = TrainingConfig()
    torch.use_deterministic_algorithms(options.deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    chosen = activate_attention(options.attention, device)
    start_world()
    half = device.type == "cuda"
    with device:
        policy = PolicyModel(causal_model(options.shape, torch.float32), 0).train()
    policy.chunk = options.chunk or default_chunk(policy.causal.config.vocab_size, device)
    if options.recompute:
        policy.causal.gradient_checkpointing_enable({"use_reentrant": False})
    # On the CPU attention goes segment by segment, which is another graph for each row.
    options.compile = options.compile and half
    if options.compile:
        compile_layers(policy.layers(), device, one_graph=True)
    shard(policy, policy.layers(), device, half)
    optimizer, row = new_optimizer(policy, settings), packed_row(options.tokens, options.segments)
    cost = training_cost(policy)
    names = ("shape", "tokens", "segments", "compile", "recompute", "deterministic", "chunk")
    setting = {name: getattr(options, name) for name in names} | {"attention": chosen, "device": _name(device)}
    for step in range(options.steps):
        yield setting | {"step": step, **one_step(policy, optimizer, row, cost, device)}


def one_step(policy: PolicyModel, optimizer: Any, row: Row, cost: Cost | None, device: torch.device) -> dict[str, Any]:
    """Make one optimizer step of one row; return its figures."""
    timer = StepTimer(device)
    logprobs, entropies = run_row(policy, row, device)
    (logprobs.sum() + 1e-3 * entropies.sum()).backward()
    timer.end("gradients")
    apply_gradients(optimizer, 1e-6)
    timer.end("optimizer")
    return timer.figures([row], cost, 1)


def ceilings(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Time by themselves the products of a layer and the head, a copy, and attention: no row is faster than these."""
    sizes, tokens, dtype = SHAPES[options.shape], options.tokens, torch.bfloat16
    heads, kv_heads, width = (4, 2, 16) if options.shape == "tiny" else (sizes["num_attention_heads"], 8, 128)
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    outputs = {"q": heads * width, "kv": kv_heads * width, "up": inner, "head": 512 if width == 16 else VOCABULARY}
    new = {"device": device, "dtype": dtype}
    for name, out in outputs.items():
        rows = min(tokens, 4096) if name == "head" else tokens
        left, right = torch.randn(rows, hidden, **new), torch.randn(hidden, out, **new)
        seconds = timed(lambda left=left, right=right: left @ right, device)
        yield {"product": name, "shape": [rows, hidden, out], "tflops": 2 * rows * hidden * out / seconds / 1e12}
    block = torch.empty(2**28 if device.type == "cuda" else 2**20, **new)
    seconds = timed(lambda: block.clone(), device)
    yield {"copy": block.numel() * 2, "gigabytes_per_second": block.numel() * 4 / seconds / 1e9}
    yield attention_ceiling(options, (heads, kv_heads, width), device, dtype)


def attention_ceiling(
    options: argparse.Namespace, sizes: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Time attention of one layer forward and backward."""
    heads, kv_heads, width = sizes
    chosen = activate_attention(options.attention, device)
    segments = Segments(packed_row(options.tokens, options.segments).borders, device)
    states = [
        torch.randn(1, each, options.tokens, width, device=device, dtype=dtype, requires_grad=True)
        for each in (heads, kv_heads, kv_heads)
    ]

    def both() -> None:
        out, _ = packed_attention(torch.nn.Identity(), *states, None, segments=segments)
        torch.autograd.grad(out.sum(), states)

    pairs = options.segments * (options.tokens / options.segments) ** 2
    return {"attention": chosen, "tflops": 6 * heads * width * pairs / timed(both, device) / 1e12}


def timed(call: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """Return the seconds of a call: the median, after two calls that count for nothing."""
    found = []
    for _ in range(repeats + 2):
        wait = torch.cuda.synchronize if device.type == "cuda" else contextlib.nullcontext
        wait()
        start = time.perf_counter()
        call()
        wait()
        found.append(time.perf_counter() - start)
    return float(np.median(found[2:]))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def main() -> None:
    """Command line: print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--tokens", type=int, default=16384, help="in a row")
    parser.add_argument("--segments", type=int, default=8, help="of a row, all of one length")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--attention", choices=["auto", "fa2", "fa3", "fa4"], default="auto")
    parser.add_argument("--chunk", type=int, help="tokens of logits at a time")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--recompute", action="store_true", help="activations of every layer")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ceilings", action="store_true", help="time the parts by themselves")
    parser.add_argument("--roofline", action="store_true", help="count on meta tensors")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.roofline:
        print(json.dumps(roofline(options.shape, options.tokens, options.segments)))
        return
    for line in (ceilings if options.ceilings else measured)(options, device):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
