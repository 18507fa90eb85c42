"""memory_plan: whether learner and engine of a run fit into a GPU's memory at the same time, and if not, what else.

On one GPU both stay where they fit, else the engine sleeps while the learner trains. Activations are recomputed only
where they do not fit otherwise. The state of the learner always stays: between two steps it is smaller than what a
training step takes in addition, so an engine finds room where the learner can train at all.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from configs.errors import ConfigError
from configs.run import RunConfig, needs_reference_scores
from flows.services.memory_use import (
    BATCHED_TOKENS,
    HARDWARE,
    SPARE,
    MemoryUse,
    ModelShape,
    engine_memory,
    kv_token_bytes,
    learner_memory,
    model_shape,
)

GIB, MIB = 1 << 30, 1 << 20
GPUS: dict[str, int] = HARDWARE["gpus"]
"""Memory of GPUs in MiB."""
QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
MAX_SEQUENCES = 1024
"""Sequences of one forward pass at most, as vLLM takes it on large GPUs."""
MIN_SEQUENCES = 4
"""Sequences of full length that the KV cache has room for at least."""


@dataclass(frozen=True)
class Gpu:
    """A GPU by what it can hold."""

    name: str
    total: int
    """Bytes."""


def parse_gpu(text: str) -> Gpu:
    """Return the GPU that a text names: one of GPUS, or its memory such as `80GiB`; raises ConfigError for another."""
    by_name = {name.lower(): name for name in GPUS}
    if name := by_name.get(text.lower().replace(" ", "-")):
        return Gpu(name, GPUS[name] * MIB)
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gib|gb|g)?", text.lower()):
        return Gpu(f"a GPU of {match[1]} GiB", int(float(match[1]) * GIB))
    raise ConfigError(
        f"--gpu: {text!r} is no GPU that is known here: give one of {', '.join(GPUS)}, or its memory, as 80GiB"
    )


def gpus() -> list[Gpu]:
    """Return the GPUs of this machine that nvidia-smi names."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError):
        return []
    lines = (line.rpartition(",") for line in done.stdout.splitlines() if line.strip())
    return [Gpu(name.strip(), int(total) * MIB) for name, _, total in lines if total.strip().isdigit()]


def smallest_gpu() -> Gpu | None:
    """Return the GPU of this machine with the least memory; None where nvidia-smi names none."""
    return min(gpus(), key=lambda gpu: gpu.total, default=None)


@dataclass(frozen=True)
class MemoryPlan:
    """What a run takes of each of its GPUs. A part that the run has not is None."""

    gpu: Gpu
    learner: MemoryUse | None
    engine: MemoryUse | None
    recompute: bool
    shared: bool
    """Whether engine and learner have a GPU in common."""
    sleeps: bool
    """Whether the engine gives its memory back while the learner trains."""
    sequences: int
    kv_tokens: int
    max_model_len: int

    @property
    def phases(self) -> dict[str, int]:
        """The most that is taken of a GPU, in bytes, by what the run does."""
        learner, engine = (use or MemoryUse({}, 0) for use in (self.learner, self.engine))
        if self.shared:
            beside = engine.idle if self.sleeps else engine.total
            return {"sampling": learner.idle + engine.total, "training": learner.total + beside}
        return {"training": learner.total} | ({"sampling, on another GPU": engine.total} if self.engine else {})

    @property
    def fits(self) -> bool:
        """Whether every phase fits."""
        return max(self.phases.values()) <= self.gpu.total

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
        recompute = "; activations are computed again" if self.recompute else ""
        residency = asleep if self.shared else "engine and learner do not share one"
        yield f"memory of {self.gpu.name}, {_gib(self.gpu.total)} ({residency}{recompute})"
        for name, use in (("learner", self.learner), ("engine", self.engine)):
            if use is not None:
                parts = ", ".join(f"{part} {_gib(size)}" for part, size in use.parts.items())
                yield f"  {name:<8} {_gib(use.total):>9}: {parts}"
        for phase, taken in self.phases.items():
            left = self.gpu.total - taken
            yield f"  {phase}: {_gib(taken)}, " + (f"{_gib(left)} are left" if left >= 0 else f"{_gib(-left)} TOO MUCH")
        if self.engine:
            whole = self.kv_tokens // self.max_model_len
            yield f"  KV cache for {self.kv_tokens:,} tokens: {whole} sequences of {self.max_model_len:,} at a time"


def memory_plan(config: RunConfig, gpu: Gpu) -> MemoryPlan | None:
    """Return the first plan that fits of those that the config allows, or the smallest where none does.

    In order: both stay, the engine sleeps; then the same with activations that are recomputed, which costs a third more
    time. None where the model's widths are not known.
    """
    shape = model_shape(config.model.path)
    if shape is None:
        return None
    checkpointing, sleep = config.training.gradient_checkpointing, config.engine.sleep if shares_gpu(config) else False
    recompute, sleeps = ((False, True) if setting == "auto" else (setting,) for setting in (checkpointing, sleep))
    plans = [_plan(config, gpu, shape, *options) for options in product(recompute, sleeps)]
    return next((plan for plan in plans if plan.fits), plans[-1])


def require_memory(plan: MemoryPlan) -> MemoryPlan:
    """Return a plan that fits; raises ConfigError with what could be changed for one that does not."""
    if plan.fits:
        return plan
    raise ConfigError([f"memory of {plan.gpu.name}: the run does not fit into {_gib(plan.gpu.total)}; {_advice(plan)}"])


def plan_here(config: RunConfig) -> MemoryPlan | None:
    """Return the plan of a resolved run on this machine; None where it uses no GPU, or too little is known."""
    gpu = smallest_gpu() if config.training.device == "cuda" else None
    return memory_plan(config, gpu) if gpu else None


def engine_sleeps(config: RunConfig, plan: MemoryPlan | None) -> bool:
    """Return whether the engine stops while the learner trains; on the CPU only if the config says so."""
    return plan.sleeps if plan else config.engine.sleep is True and shares_gpu(config)


def shares_gpu(config: RunConfig) -> bool:
    """Return whether engine and learner of a run have a GPU in common."""
    if config.kind != "train" or config.engine.url or config.placement.services == "pools":
        return False
    engine, learner = ({*text.split(",")} - {""} for text in (config.engine.gpus, config.learner.gpus))
    return not engine or not learner or bool(engine & learner)


def _plan(config: RunConfig, gpu: Gpu, shape: ModelShape, recompute: bool, sleeps: bool) -> MemoryPlan:
    trains, samples = config.kind in ("train", "sft", "replay"), config.kind != "sft" and not config.engine.url
    learner = _learner(config, shape, recompute) if trains else None
    sequences, length, shared = (
        min(MAX_SEQUENCES, config.rollout.max_in_flight),
        config.engine.max_model_len,
        shares_gpu(config),
    )
    engine, kv_tokens = None, 0
    if samples:
        parallel = tensor_parallel(config.engine.extra_arguments)
        sizes = {"sequences": sequences, "scored_tokens": length if needs_reference_scores(config) else 0}
        beside = 0 if not shared or learner is None else learner.idle if sleeps else learner.total
        left = gpu.total - beside - engine_memory(shape, kv_tokens=0, parallel=parallel, **sizes).total
        room = int(left * (1 - SPARE)) // kv_token_bytes(shape, parallel)
        kv_tokens = max(min(room, sequences * length), MIN_SEQUENCES * length)
        engine = engine_memory(shape, kv_tokens=kv_tokens, parallel=parallel, **sizes)
    return MemoryPlan(gpu, learner, engine, recompute, shared, sleeps, sequences, kv_tokens, length)


def _learner(config: RunConfig, shape: ModelShape, recompute: bool) -> MemoryUse:
    return learner_memory(
        shape,
        config.training,
        tokens=-(-config.packing.tokens_per_row // config.learner.context_parallel),
        ranks=config.learner.num_ranks // config.learner.replicas,
        recompute=recompute,
        compiled=config.training.compile is not False,
    )


def tensor_parallel(arguments: tuple[str, ...]) -> int:
    """Return on how many GPUs an engine with these arguments computes."""
    sizes = re.findall(r"(?<!\S)(?:--tensor-parallel-size|-tp)[ =]([1-9]\d*)(?!\S)", " ".join(arguments))
    return int(sizes[0]) if sizes else 1


def _advice(plan: MemoryPlan) -> str:
    phase, taken = max(plan.phases.items(), key=lambda item: item[1])
    return (
        f"{phase} lacks {_gib(taken - plan.gpu.total)}. Lower packing.tokens_per_row or engine.max_model_len, set "
        "training.gradient_checkpointing=true or engine.sleep=true, train adapters (training.lora.rank=16), take more "
        "GPUs (learner.processes), give engine and learner GPUs of their own (engine.gpus, learner.gpus), or take a "
        "smaller model"
    )


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
