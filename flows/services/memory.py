"""memory_plan: whether learner and engine of a run fit into a GPU's memory at the same time, and if not, what else.

On one GPU both stay where they fit, else the engine sleeps while the learner trains. Activations are recomputed only
where they do not fit otherwise, and those of whole layers only where selective recomputation does not fit either. The
state of the learner always stays: between two steps it is smaller than what a training step takes in addition, so an
engine finds room where the learner can train at all.

The learner's formula counts what its code keeps; `tests/tasks/learner/test_memory.py` compares it with torch's own
tracker, which follows every tensor of a training step, over many shapes. The engine's is an estimate in parts.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from configs.errors import ConfigError
from configs.losses import is_elementwise
from configs.run import RunConfig
from configs.services import MEMORY_RATIO
from configs.training import AdamwOptimizer, MuonOptimizer, TrainingConfig
from flows.services.gpus import Gpu, smallest_gpu
from flows.services.model_shape import ModelShape, model_shape

CONTEXT_BYTES = int(0.6 * 2**30)
"""What a process takes of a GPU before it has a tensor: the CUDA context and the libraries' own memory."""
CUDA_CHUNK_BYTES = 2**30
"""As `tasks.learner.head.CHUNK_BYTES` has it for CUDA."""
LARGE_GPU_BYTES, LARGE_CHUNK = 80 * 10**9, 4096
"""On a GPU of so many bytes, tokens whose logits may exist at the same time: for each chunk the gradient of the head,
in float32, is read and written once."""
LONG_ROW = 16_384
"""Tokens of a row that is advised where it fits: for each row weights are cast and gradients added."""
UNCOMPILED_COPIES = 2
"""Bytes of an operand's element, in place of one, beside all else while it is quantised by layers as they are written.
"""
WRITTEN_FILES, FILE_BYTES = 5, 1 << 28
"""Files of a policy in a process's memory, and their size, as `tasks.learner.shards` has them."""
DELTA_BYTES = 120
"""Bytes that a layer of gated DeltaNet keeps of a token for each of its values, by transformers' own operations: 90 as
torch counts what is saved for the backward pass (512 tokens, two widths, bfloat16), and a third for that pass."""
SPARE = 0.08
"""Share on top of all tensors that torch's allocator may hold without using it."""
BATCHED_TOKENS = 8192
"""Tokens of one forward pass of the engine at most, as vLLM takes it on large GPUs; on others it would be fewer."""
SCORED_TOKENS = 1024
"""Tokens of prompts whose logits exist at the same time where log-probs of one are requested: vLLM's CHUNK_SIZE."""
GRAPHS_BYTES = 2**30
"""For CUDA graphs and what compiled kernels keep: an estimate, that was not measured."""
GIB = 1 << 30
MAX_SEQUENCES = 1024
"""Sequences of one forward pass at most, as vLLM takes it on large GPUs."""
RECOMPUTED = {
    False: "",
    "selective": "; activations other than of products and attention are computed again",
    True: "; activations are computed again",
}
MIN_SEQUENCES = 4
"""Sequences of full length that the KV cache has room for at least."""


Recompute = bool | Literal["selective"]
"""As `training.gradient_checkpointing` has it when it is resolved."""


@dataclass(frozen=True)
class MemoryUse:
    """What a process takes of each of its GPUs when it takes the most."""

    parts: Mapping[str, int]
    """Bytes by part."""
    idle: int
    """Bytes that it keeps: the learner between two training steps, the engine asleep."""
    host: int = 0
    """Bytes of the machine's memory that the learner's process takes while it loads weights."""
    pinned: int = 0
    """Bytes of the machine's memory that it pins for copies of a GPU's, and keeps."""

    @property
    def total(self) -> int:
        """All parts, in bytes."""
        return sum(self.parts.values())


def layer_bytes(shape: ModelShape, compiled: bool) -> int:
    """Return the bytes that a layer keeps of a token for its backward pass, in bfloat16.

    Uncompiled, each of the norms keeps its input in float32 and two tensors in bfloat16. A compiled layer recomputes
    what is cheap. Norms and attention keep a number in float32 for each head in addition. Each expert of a token keeps
    its states before, after, and weighted: an estimate, that was not measured.
    """
    narrow, wide = (8, 6) if compiled else (16, 8)
    heads = 6 if compiled else 10
    return (
        (narrow + 6 * shape.experts_per_token) * shape.hidden_size
        + wide * shape.intermediate_size + heads * (shape.query + shape.key)
        + 8 * shape.num_attention_heads + 4 * shape.num_key_value_heads + 8 + DELTA_BYTES * shape.linear_value
    )  # fmt: skip


def selective_bytes(shape: ModelShape, compiled: bool) -> int:
    """Return the bytes that a layer with selective recomputation keeps of a token, in bfloat16.

    Its input and the results of `tasks.learner.recompute.KEPT`: of seven products and attention. The compiler leaves
    out the last product's, which nothing needs.
    """
    narrow = (4 if compiled else 6) + 2 * shape.experts_per_token
    products = narrow * shape.hidden_size + 4 * (shape.intermediate_size + shape.query + shape.key)
    return products + 4 * shape.num_attention_heads + DELTA_BYTES * shape.linear_value


def learner_memory(
    shape: ModelShape, training: TrainingConfig, *, tokens: int, ranks: int, recompute: Recompute, compiled: bool
) -> MemoryUse:
    """Return what a rank takes that trains rows of `tokens` in bfloat16 with weights in float32, sharded over `ranks`.

    The most is taken where the output head's gradient is formed, in the last layer's backward pass after it, or at the
    end, when gradients of embedding and head become float32. Gradients of earlier rows exist by then.

    Parts: `weights` and `gradients` in float32; `optimizer`, its moments in float32; `gathered`, weights in bfloat16 of
    embedding, head and the layers that are computed, as all ranks have them; `activations` of all layers and the last
    norm; `logits`, a chunk with what is computed from it, and the gradient of the output head; `working`, what a
    layer's backward pass takes beyond the output head; `spare`, what the allocator holds unused, and the CUDA context.
    Of a GPU loading takes less: a rank reads its own shards into the machine's memory, in float32, moves them one by
    one, and gathers embedding, head and two layers for the proof of the model.
    """
    hidden, inner, vocab = shape.hidden_size, shape.intermediate_size, shape.vocab_size
    trained, moments = _optimizer_state(shape, training)
    layer, edge = 2 * shape.gathered_parameters, 2 * shape.edge_parameters
    # Several ranks gather a layer ahead of the one that is computed, and hold what they reduce.
    ahead = layer if ranks > 1 else 0
    again = math.ceil(shape.num_hidden_layers / training.checkpoint_every) if recompute else 0
    whole, selective = layer_bytes(shape, compiled), selective_bytes(shape, compiled)
    inputs = selective if recompute == "selective" else 0 if training.offload_activations else 2 * hidden
    kept = again * inputs + (shape.num_hidden_layers - again) * whole
    activations = tokens * (kept + 8 * hidden + 4 * shape.head_dim + 40)
    # As `tasks.learner.head.default_chunk` takes them: tokens whose logits exist at the same time.
    fits = CUDA_CHUNK_BYTES // (4 * vocab)
    chunk = min(tokens, int(training.logprob_chunk or max(64, min(1024, 1 << fits.bit_length() >> 1))))
    head_weight = 4 * vocab * hidden
    # In one pass the gradient of the states exists at the same time.
    selected = (2 if is_elementwise(training.loss) else 1) * 2 * hidden * tokens
    logits = selected + head_weight + 10 * vocab * chunk
    # By then the last norm's are free, and in a layer one tensor of three that its feed-forward part needs.
    recomputed = tokens * (whole - (selective if recompute == "selective" else 0)) if recompute else 0
    layers_peak = head_weight // 2 + recomputed + tokens * (4 * inner - 6 * hidden) + 5 * layer // 4 + 2 * ahead
    if training.fp8:  # both operands in 8 bits; uncompiled also what they are made of
        layers_peak += (tokens * (inner + hidden) + inner * hidden) * (1 if compiled else UNCOMPILED_COPIES)
    if shape.expert_parallel > 1:  # states of the tokens of all ranks, and the sums of experts
        layers_peak += 4 * hidden * tokens * shape.expert_parallel
    # What is exchanged is in float32, and so is the shard that comes of it.
    edges_peak = max(3 * edge, 2 * edge + head_weight // 2 + 2 * edge // ranks)
    parts = {
        "weights": 4 * shape.parameters // ranks,
        "gradients": 4 * trained // ranks,
        "optimizer": moments // ranks,
        "gathered": edge + ahead,
        "activations": activations,
        "logits": logits,
        "working": max(0, layers_peak - logits - ahead, edges_peak - edge - ahead - activations - logits),
    }
    spare = int(SPARE * sum(parts.values())) + CONTEXT_BYTES
    idle = parts["weights"] + parts["optimizer"] + CONTEXT_BYTES
    return MemoryUse(parts | {"spare": spare}, idle, host=parts["weights"])


def _optimizer_state(shape: ModelShape, training: TrainingConfig) -> tuple[int, int]:
    """Return how many parameters are trained, and the bytes of the optimizer's moments, of all ranks together."""
    if training.lora:
        # Of every matrix of a layer a row of A and a column of B for each rank: no more than this.
        widths = 7 * shape.hidden_size + 2 * shape.query + 2 * shape.key + 3 * shape.intermediate_size
        if "experts" in str(training.lora.target_modules):  # fused: two matrices of each expert
            widths += 2 * shape.num_experts * shape.hidden_size + 3 * shape.all_experts_size
        trained = training.lora.rank * shape.num_hidden_layers * widths
        return trained, 8 * trained
    if isinstance(training.optimizer, MuonOptimizer):
        # Experts are fused, and no matrices: AdamW has them.
        return shape.parameters, 4 * (shape.parameters + shape.edge_parameters + shape.expert_parameters)
    moments = 2 if isinstance(training.optimizer, AdamwOptimizer) else bool(training.optimizer.state_kind)
    return shape.parameters, 4 * moments * shape.parameters


def directory_bytes(config: RunConfig) -> int | None:
    """Return the room that a run wants of `learner.memory_directory`, in bytes; None where widths are not known.

    That is the kept state of two policies, weights in float32 and moments, and a policy on its way, which is written
    there where eight times its weights are free (`RunContext.scratch`).
    """
    shape, training = model_shape(config.model.path), config.training
    if shape is None:
        return None
    trained, moments = _optimizer_state(shape, training)
    kept = 2 * config.learner.replicas * (4 * trained + moments) if config.learner.keep_state else 0
    weights = (2 if training.policy_dtype == "bfloat16" else 4) * shape.parameters
    return kept + (0 if training.lora else MEMORY_RATIO * weights)


def pinned_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Return the machine's memory that a process of the learner pins for kept state and for a policy on its way.

    Of whole weights: adapters take little. torch's allocator takes a power of two for each tensor and keeps it.
    """
    training, ranks = config.training, config.learner.num_ranks // config.learner.replicas
    if training.lora:
        return 0
    hidden, edges = shape.hidden_size, 1 if shape.tie_word_embeddings else 2
    inner = shape.all_experts_size or shape.intermediate_size
    of_layer = [hidden * width for width in (*[shape.query] * 2, *[shape.key] * 2, *[inner] * 3)]
    matrices = [shape.vocab_size * hidden] * edges + of_layer * shape.num_hidden_layers

    def total_size(width: int, parts: int) -> int:
        return sum(1 << (width * size // parts - 1).bit_length() for size in matrices)

    trained, moments = _optimizer_state(shape, training)
    kept = total_size(4, ranks) * (4 * trained + moments) // (4 * trained) if config.learner.keep_state else 0
    written = 2 if training.policy_dtype == "bfloat16" else 4
    largest = 1 << (written * matrices[0] - 1).bit_length()
    return kept + min(total_size(written, 1), largest + 2 * WRITTEN_FILES * FILE_BYTES)


def kv_token_bytes(shape: ModelShape, parallel: int) -> int:
    """Return the bytes of a token in the KV cache in half precision, on each of `parallel` GPUs."""
    return 2 * 2 * (shape.num_hidden_layers - shape.linear_layers) * shape.key // parallel


def engine_memory(shape: ModelShape, *, sequences: int, parallel: int, layer_width: int = 2) -> MemoryUse:
    """Return what an engine takes in bfloat16 beside its KV cache, on each of `parallel` GPUs.

    A weight of the layers has `layer_width` bytes: two, or one where they are quantised, as experts never are.

    Parts: `weights`, of which CUDA computes logits in float32 without a copy of the output head; `kv cache`; `working`,
    of a forward pass that samples beside prompts whose log-probs are requested, an estimate, and states of DeltaNet;
    `graphs`, which stay while it sleeps, as their addresses do; `context`.
    """
    # Sampled from: in float32, sorted for nucleus sampling, as probabilities and as log-probs. Of prompts: of one chunk
    # until those of the next are computed.
    logits = 4 * shape.vocab_size * (4 * sequences + 2 * SCORED_TOKENS)
    unquantised = shape.edge_parameters + shape.expert_parameters
    token = 2 * (4 * shape.hidden_size + 3 * shape.intermediate_size + 2 * (shape.query + 2 * shape.key))
    parts = {
        "weights": (layer_width * (shape.parameters - unquantised) + 2 * unquantised) // parallel,
        "kv cache": 0,
        "working": (logits + BATCHED_TOKENS * token + sequences * shape.state_bytes) // parallel,
        "graphs": GRAPHS_BYTES,
        "context": CONTEXT_BYTES,
    }
    return MemoryUse(parts, GRAPHS_BYTES + CONTEXT_BYTES)


@dataclass(frozen=True)
class MemoryPlan:
    """What a run takes of each of its GPUs. A part that the run has not is None."""

    gpu: Gpu
    learner: MemoryUse | None
    engine: MemoryUse | None
    recompute: Recompute
    shared: bool
    """Whether engine and learner have a GPU in common."""
    sleeps: bool
    """Whether the engine gives its memory back while the learner trains."""
    sequences: int
    kv_tokens: int
    max_model_len: int
    chunk: int | None
    """As `training.logprob_chunk`."""
    engines: int = 1
    """Engines on each GPU; `engine`, `sequences` and `kv_tokens` are of one."""
    active: tuple[int, int] | None = None
    """Of a model with experts the parameters that a token uses, and all."""
    expert_parallel: int = 1
    """As `learner.expert_parallel`."""
    longer_rows: bool = False
    """Whether rows of LONG_ROW tokens would fit as well, with all else as it is."""

    @property
    def settings(self) -> dict[str, Any]:
        """What the plan says of `training`."""
        return {"gradient_checkpointing": self.recompute, "logprob_chunk": self.chunk}

    @property
    def phases(self) -> dict[str, int]:
        """The most that is taken of a GPU, in bytes, by what the run does."""
        learner, engine = (use or MemoryUse({}, 0) for use in (self.learner, self.engine))
        sampling, idle = self.engines * engine.total, self.engines * engine.idle
        if self.shared:
            beside = idle if self.sleeps else sampling
            return {"sampling": learner.idle + sampling, "training": learner.total + beside}
        return {"training": learner.total} | ({"sampling, on another GPU": sampling} if self.engine else {})

    @property
    def fits(self) -> bool:
        """Whether every phase fits."""
        return max(self.phases.values()) <= self.gpu.usable

    @property
    def engine_arguments(self) -> list[str]:
        """The arguments of the engine's command line; none where the run has no engine.

        The size of the KV cache is named, so that neither a start nor a restart depends on what a neighbour holds.
        """
        if self.engine is None:
            return []
        share = min(0.98, self.engine.total / self.gpu.total)
        return [
            *("--kv-cache-memory-bytes", str(self.engine.parts["kv cache"])),
            *("--gpu-memory-utilization", f"{share:.3f}", "--max-num-seqs", str(self.sequences)),
            *("--max-num-batched-tokens", str(BATCHED_TOKENS)),
            *(["--enable-sleep-mode"] if self.sleeps else []),
        ]

    def lines(self) -> Iterator[str]:
        """Yield the plan as people read it."""
        asleep = "the engine sleeps while the learner trains" if self.sleeps else "engine and learner both stay"
        recompute = RECOMPUTED[self.recompute]
        recompute += f"; logits of {self.chunk:,} tokens at a time" if self.chunk else ""
        residency = asleep if self.shared else "engine and learner do not share one"
        yield f"memory of {self.gpu.name}, {_gib(self.gpu.total)} ({residency}{recompute})"
        if self.active:
            used, total = (f"{number / 1e9:.1f} billion" for number in self.active)
            dealt = f" and dealt to {self.expert_parallel} processes" if self.expert_parallel > 1 else " alone"
            yield f"  parameters: {total}, of which a token uses {used}; experts are sharded by FSDP2{dealt}"
        for name, use in (("learner", self.learner), ("engine", self.engine)):
            if use is not None:
                parts = ", ".join(f"{part} {_gib(size)}" for part, size in use.parts.items())
                yield f"  {name:<8} {_gib(use.total):>9}: {parts}"
        if self.learner:
            yield f"  loading: {_gib(self.learner.host)} of the machine's memory for each process of the learner"
            yield f"  pinned while it trains: {_gib(self.learner.pinned)} of the machine's memory for each process"
        for phase, taken in self.phases.items():
            left = self.gpu.usable - taken
            yield f"  {phase}: {_gib(taken)}, " + (f"{_gib(left)} are left" if left >= 0 else f"{_gib(-left)} TOO MUCH")
        yield f"  kept free for what is not planned: {_gib(self.gpu.total - self.gpu.usable)}"
        if self.longer_rows:
            yield f"  longer rows would fit as well and cost less: packing.tokens_per_row={LONG_ROW}"
        if self.engines > 1:
            yield f"  {self.engines} engines on a GPU, each as above"
        if self.engine:
            whole = self.kv_tokens // self.max_model_len
            yield f"  KV cache for {self.kv_tokens:,} tokens: {whole} sequences of {self.max_model_len:,} at a time"


def memory_plan(config: RunConfig, gpu: Gpu) -> MemoryPlan | None:
    """Return the first plan that fits of those that the config allows, or the smallest where none does.

    In order: both stay, the engine sleeps; then the same with selective recomputation, which costs a few percent, and
    with that of whole layers, which costs a third more time; each with large chunks of logits and with small ones. None
    where the model's widths are not known.
    """
    shape = model_shape(config.model.path)
    if shape is None:
        return None
    training, sleep = config.training, config.engine.sleep if config.shares_gpu else False
    checkpointing, chunk = training.gradient_checkpointing, training.logprob_chunk
    recompute: tuple[Recompute, ...] = (False, "selective", True) if checkpointing == "auto" else (checkpointing,)
    sleeps = (False, True) if sleep == "auto" else (sleep,)
    large = (LARGE_CHUNK, None) if gpu.total >= LARGE_GPU_BYTES else (None,)
    for options in product(recompute, sleeps, large if chunk == "auto" else (chunk,)):
        plan = _plan(config, gpu, shape, *options)
        if plan.fits:
            break
    packing = config.packing.model_copy(update={"tokens_per_row": LONG_ROW})
    longer = plan.fits and plan.learner is not None and config.packing.tokens_per_row < LONG_ROW
    with_longer = config.model_copy(update={"packing": packing})
    return replace(plan, longer_rows=longer and _plan(with_longer, gpu, shape, *options).fits)


def require_memory(plan: MemoryPlan) -> MemoryPlan:
    """Return a plan that fits; raises ConfigError with what could be changed for one that does not."""
    if plan.fits:
        return plan
    room = f"{_gib(plan.gpu.usable)} of {_gib(plan.gpu.total)}"
    raise ConfigError([f"memory of {plan.gpu.name}: the run does not fit into {room}; {_advice(plan)}"])


def plan_here(config: RunConfig) -> MemoryPlan | None:
    """Return the plan of a resolved run on this machine; None where it uses no GPU, or too little is known."""
    gpu = smallest_used_gpu(config) if config.training.device == "cuda" else None
    return memory_plan(config, gpu) if gpu else None


def smallest_used_gpu(config: RunConfig) -> Gpu | None:
    """Return the GPU with the least memory of those that learner and engine of a run see; None where there is none."""
    trains, samples = _parts(config)
    return smallest_gpu(*[config.learner.gpus] * trains, *[config.engine.gpus] * samples)


def _parts(config: RunConfig) -> tuple[bool, bool]:
    """Return whether a run trains, and whether it samples, on GPUs of this machine."""
    samples = not config.from_data or config.evaluation.evaluates_training
    return config.kind != "evaluate", samples and not config.engine.url


def _plan(
    config: RunConfig, gpu: Gpu, shape: ModelShape, recompute: Recompute, sleeps: bool, chunk: int | None
) -> MemoryPlan:
    trains, samples = _parts(config)
    training = config.training.model_copy(update={"logprob_chunk": chunk})
    learner = None
    if trains:
        tokens, ranks = -(-config.packing.tokens_per_row // config.learner.context_parallel), config.learner.num_ranks
        sizes = {"tokens": tokens, "ranks": ranks // config.learner.replicas}
        shape = shape.model_copy(update={"expert_parallel": config.learner.expert_parallel})
        compiled = training.compile is not False and shape.expert_parallel == 1
        learner = learner_memory(shape, training, **sizes, recompute=recompute, compiled=compiled)
        learner = replace(learner, pinned=pinned_bytes(shape, config))
    engines, length, shared = config.engine.per_gpu, config.engine.max_model_len, config.shares_gpu
    sequences = -(-min(MAX_SEQUENCES, config.rollout.max_in_flight) // engines)
    engine, kv_tokens = None, 0
    if samples:
        parallel = tensor_parallel(config.engine.extra_arguments)
        beside = 0 if not shared or learner is None else learner.idle if sleeps else learner.total
        layer_width = 1 if config.engine.quantization else 2
        engine = engine_memory(shape, sequences=sequences, parallel=parallel, layer_width=layer_width)
        kv_token = kv_token_bytes(shape, parallel)
        room = int((gpu.usable - beside - engines * engine.total) * (1 - SPARE)) // (kv_token * engines)
        kv_tokens = max(min(room, sequences * length), MIN_SEQUENCES * length)
        engine = MemoryUse({**engine.parts, "kv cache": kv_tokens * kv_token}, engine.idle)
    active = (shape.active_parameters, shape.parameters) if shape.num_experts else None
    numbers = sequences, kv_tokens, length, chunk, engines, active, config.learner.expert_parallel
    return MemoryPlan(gpu, learner, engine, recompute, shared, sleeps, *numbers)


def tensor_parallel(arguments: tuple[str, ...]) -> int:
    """Return on how many GPUs an engine with these arguments computes."""
    sizes = re.findall(r"(?<!\S)(?:--tensor-parallel-size|-tp)[ =]([1-9]\d*)(?!\S)", " ".join(arguments))
    return int(sizes[0]) if sizes else 1


def _advice(plan: MemoryPlan) -> str:
    phase, taken = max(plan.phases.items(), key=lambda item: item[1])
    return (
        f"{phase} lacks {_gib(taken - plan.gpu.usable)}. Lower packing.tokens_per_row or engine.max_model_len, set "
        "training.gradient_checkpointing=true or engine.sleep=true, train adapters (training.lora.rank=16), take more "
        "GPUs (learner.processes), give engine and learner GPUs of their own (engine.gpus, learner.gpus), or take a "
        "smaller model"
    )


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
