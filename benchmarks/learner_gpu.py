"""How fast the learner trains a row on one GPU, beside what was predicted of it: JSON lines.

    python -m benchmarks.learner_gpu --roofline                counts kernels and bytes; needs no GPU
    python -m benchmarks.learner_gpu --ceilings                products, copies and attention by themselves
    python -m benchmarks.learner_gpu --shape 4B --segments 1   trains rows
    python -m benchmarks.learner_gpu --hand-over /dev/shm      what lies between a step and its policy's first rollout

Weights are random, so nothing is downloaded. It needs torch, transformers, numpy, pyarrow and pydantic.
"""

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.losses import DppoLoss
from configs.training import TrainingConfig
from tasks.learner import client
from tasks.learner.attention import ATTENTION, Segments, activate_attention, packed_attention, register_attention
from tasks.learner.distributed import World, shard, start_world
from tasks.learner.fp8 import use_fp8
from tasks.learner.head import default_chunk
from tasks.learner.loop import train_row
from tasks.learner.loss import Objective
from tasks.learner.model import PolicyModel, compile_policy
from tasks.learner.optimizer import apply_gradients, new_optimizer
from tasks.learner.recompute import recompute_layers
from tasks.learner.rows import STREAMS, Row
from tasks.learner.speed import Cost, StepTimer, training_cost

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""Widths of the Qwen3 family; all have heads of 128, eight of them for keys and values, and a head that is tied."""
VOCABULARY = 151936


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


def packed_row(tokens: int, segments: int, prompt: int = 0) -> Row:
    """Return a row of equal segments in which every token but the first of each has weight.

    With a `prompt` all begin with the same tokens, so many, which have none.
    """
    borders = np.linspace(0, tokens, segments + 1).astype(int)
    streams = {name: np.zeros(tokens, np.float32) for name in STREAMS} | {"temperatures": np.ones(tokens, np.float32)}
    streams["rl_weights"][:] = 1
    streams["rl_weights"][borders[:-1]] = 0
    ids = np.random.default_rng(0).integers(0, 512, tokens)
    begun = borders[:-1, None] + np.arange(prompt)
    ids[begun], streams["rl_weights"][begun] = ids[:prompt], 0
    return Row(0, tuple(map(str, range(segments))), tuple(borders.tolist()), ids, streams)


def measured(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Train rows, one optimizer step each; yield the figures of every step, the first of which compiles."""
    settings = TrainingConfig.model_validate({"gradient_checkpointing": options.recompute})
    torch.use_deterministic_algorithms(options.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False
    chosen = activate_attention(options.attention, device)
    start_world()
    half = device.type == "cuda"
    with device:
        policy = PolicyModel(causal_model(options.shape, torch.float32), 0).train()
    policy.chunk = options.chunk or default_chunk(policy.causal.config.vocab_size, device)
    if options.fp8:
        use_fp8(policy.layers())
    recompute_layers(policy.causal, policy.layers(), settings, device)
    # On the CPU attention goes segment by segment, which is another graph for each row.
    options.compile = options.compile and half
    if options.compile:
        compile_policy(policy, device, one_graph=True)
    shard(policy, policy.layers(), device, half)
    policy.shares_prefixes = options.shared
    optimizer, row = new_optimizer(policy, settings), packed_row(options.tokens, options.segments, options.prompt)
    cost = training_cost(policy)
    setting = vars(options) | {"attention": chosen, "device": _name(device)}
    for step in range(options.steps):
        yield setting | {"step": step, **one_step(policy, optimizer, row, cost, device)}


def one_step(policy: PolicyModel, optimizer: Any, row: Row, cost: Cost | None, device: torch.device) -> dict[str, Any]:
    """Make one optimizer step of one row; return its figures."""
    timer = StepTimer(device)
    denominators = {"rl": len(row.weighted), "ce": 0, "ref_kl": 0}
    train_row(policy, row, denominators, Objective(DppoLoss()), World(0, 1, 0), device)
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


def hand_over(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Time the writing of a policy in bfloat16, its checksum, and the state that is kept, in a directory."""
    from tasks.inference.engine.read_back import sum_files
    from tasks.learner.checkpoint import save_rounded
    from tasks.learner.kept_state import StateKeeper

    world = start_world()
    with device:
        policy = PolicyModel(causal_model(options.shape, torch.float32), 0)
    shard(policy, policy.layers(), device, half=True)
    optimizer, keeper = new_optimizer(policy, TrainingConfig()), StateKeeper(world)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    apply_gradients(optimizer, 0.0)
    with tempfile.TemporaryDirectory(dir=options.hand_over) as directory:
        place, policy_place = Path(directory), Path(directory, "policy")
        parts = {
            "publish": lambda: save_rounded(policy, None, {}, policy_place, world),
            "sum files": lambda: sum_files(policy_place, "bfloat16", own_head=False, device=device),
            "keep state": lambda: keeper.keep("policy", policy, optimizer, place),
            "write state": keeper.wait,
        }
        for name in [*parts] * options.steps:
            began, used = time.perf_counter(), time.process_time()
            parts[name]()
            yield {"part": name, "seconds": time.perf_counter() - began, "of_processors": time.process_time() - used}


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def main() -> None:
    """Command line: print one JSON object a line."""
    os.environ |= client.ENVIRONMENT
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "0.6B" if torch.cuda.is_available() else "tiny"
    parser.add_argument("--shape", choices=SHAPES, default=default)
    parser.add_argument("--tokens", type=int, default=16384, help="in a row")
    parser.add_argument("--segments", type=int, default=8, help="of a row, all of one length")
    parser.add_argument("--prompt", type=int, default=0, help="tokens that all segments begin with, without weight")
    parser.add_argument("--shared", action=argparse.BooleanOptionalAction, default=True, help="compute a prompt once")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--attention", choices=["auto", "fa2", "fa3", "fa4"], default="auto")
    parser.add_argument("--chunk", type=int, help="tokens of logits at a time")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--fp8", action="store_true", help="products of layers in 8 bits")
    parser.add_argument("--recompute", choices=["selective", "true"], default="false", help="activations of layers")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ceilings", action="store_true", help="time the parts by themselves")
    parser.add_argument("--roofline", action="store_true", help="count by tensors that hold nothing")
    parser.add_argument("--hand-over", help="directory: time what follows a step")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.roofline:
        from benchmarks.learner_roofline import roofline

        what = options.shape, options.tokens, options.segments, options.compile
        print(json.dumps(roofline(*what, recompute=options.recompute)))
        return
    program = hand_over if options.hand_over else ceilings if options.ceilings else measured
    for line in program(options, device):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
