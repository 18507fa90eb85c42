"""The plan of a GPU's memory: what learner and engine take, whether both fit at the same time, and if not, what else.

On one GPU both stay where they fit, else the engine sleeps while the learner trains. Activations are computed again
only where they do not fit otherwise. The state of the learner always stays: between two steps it is smaller than what a
training step takes beside it, so that an engine finds room where the learner can train at all.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from configs.errors import ConfigError
from configs.run import RunConfig, needs_reference_scores
from tasks.inference.engine.memory import (
    MOST_SEQUENCES,
    EngineMemory,
    EngineSettings,
    engine_memory,
    kv_token_bytes,
)
from tasks.learner.memory import SPARE, LearnerMemory, learner_memory
from tasks.runtime.model_shape import ModelShape, model_shape

GIB = 1 << 30
MIB = 1 << 20
GPUS = {
    "B200": 183_359,
    "H200": 143_771,
    "GH200": 97_871,
    "H100": 81_559,
    "A100": 81_920,
    "A100-40GB": 40_960,
    "L40S": 46_068,
    "RTX-6000-PRO": 97_887,
    "RTX-5090": 32_607,
    "RTX-4090": 24_564,
    "A10G": 23_028,
    "L4": 23_034,
}
"""Memory of GPUs in MiB, as nvidia-smi says it."""
LEAST_SEQUENCES = 4
"""Sequences of full length that the KV cache has room for at least."""
QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
TENSOR_PARALLEL = ("--tensor-parallel-size", "-tp")


@dataclass(frozen=True)
class Gpu:
    """A GPU by what it can hold."""

    name: str
    total: int
    """Bytes."""


def parse_gpu(text: str) -> Gpu:
    """Return the GPU that a text names: one of GPUS, or its memory such as `80GiB`; raises ValueError for another."""
    known = {name.lower(): name for name in GPUS}
    if name := known.get(text.lower().replace(" ", "-")):
        return Gpu(name, GPUS[name] * MIB)
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gib|gb|g)?", text.lower()):
        return Gpu(f"a GPU of {match[1]} GiB", int(float(match[1]) * GIB))
    raise ValueError(f"{text!r} is no GPU that is known here: give one of {', '.join(GPUS)}, or its memory, as 80GiB")


def smallest_gpu() -> Gpu | None:
    """Return the GPU of this machine with the least memory; None where nvidia-smi names none."""
    return min(gpus(), key=lambda gpu: gpu.total, default=None)


def gpus() -> list[Gpu]:
    """Return the GPUs of this machine that nvidia-smi names."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError):
        return []
    lines = (line.rpartition(",") for line in done.stdout.splitlines() if line.strip())
    return [Gpu(name.strip(), int(total) * MIB) for name, _, total in lines if total.strip().isdigit()]


@dataclass(frozen=True)
class MemoryPlan:
    """What a run takes of each of its GPUs. A part that the run has not is None."""

    gpu: Gpu
    learner: LearnerMemory | None
    engine: EngineMemory | None
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
        training = self.learner.total if self.learner else 0
        engine = self.engine.total if self.engine else 0
        if not self.shared:
            return {"training": training} | ({"sampling, on another GPU": engine} if self.engine else {})
        asleep = self.engine.context + self.engine.graphs if self.engine else 0  # graphs stay, as their addresses do
        state = self.learner.state if self.learner else 0
        return {"sampling": state + engine, "training": training + (asleep if self.sleeps else engine)}

    @property
    def fits(self) -> bool:
        """Tell whether every phase does."""
        return max(self.phases.values()) <= self.gpu.total

    @property
    def settings(self) -> EngineSettings | None:
        """What the engine is started with; None where the run has none."""
        if self.engine is None:
            return None
        share = min(0.98, self.engine.total / self.gpu.total)
        return EngineSettings(self.engine.kv_cache, share, self.sequences, self.sleeps)

    def lines(self) -> Iterator[str]:
        """Yield the plan as people read it."""
        yield f"memory of {self.gpu.name}, {_gib(self.gpu.total)} ({self._residency()})"
        for name, part in (("learner", self.learner), ("engine", self.engine)):
            if part is not None:
                parts = ", ".join(f"{key.replace('_', ' ')} {_gib(value)}" for key, value in vars(part).items())
                yield f"  {name:<8} {_gib(part.total):>9}: {parts}"
        for phase, taken in self.phases.items():
            left = self.gpu.total - taken
            yield f"  {phase}: {_gib(taken)}, " + (f"{_gib(left)} are left" if left >= 0 else f"{_gib(-left)} TOO MUCH")
        if self.learner:
            yield f"  activations are {'computed again in the backward pass' if self.recompute else 'kept'}"
        if self.engine:
            whole = self.kv_tokens // self.max_model_len
            yield f"  KV cache for {self.kv_tokens:,} tokens: {whole} sequences of {self.max_model_len:,} at a time"

    def _residency(self) -> str:
        if not self.shared:
            return "engine and learner do not share one"
        return "the engine sleeps while the learner trains" if self.sleeps else "engine and learner both stay"


def memory_plan(config: RunConfig, gpu: Gpu) -> MemoryPlan | None:
    """Return the first plan that fits of those that the config allows, or the smallest where none does.

    In order: both stay, the engine sleeps; then the same with activations that are computed again, which costs a third
    more time. None where the model's widths are not known.
    """
    shape = model_shape(config.model.path)
    if shape is None:
        return None
    asked = config.training.gradient_checkpointing
    recomputes = (False, True) if asked == "auto" else (asked,)
    sleeps = (False, True) if config.engine.sleep == "auto" else (config.engine.sleep,)
    if not shares_gpu(config):
        sleeps = (False,)
    plans = [_plan(config, gpu, shape, recompute, each) for recompute in recomputes for each in sleeps]
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
    """Tell whether the engine stops while the learner trains; on the CPU only where that is asked for."""
    if plan is None:
        return config.engine.sleep is True and shares_gpu(config)
    return plan.sleeps


def shares_gpu(config: RunConfig) -> bool:
    """Tell whether engine and learner of a run have a GPU in common."""
    if config.kind != "train" or config.engine.url or config.placement.services == "pools":
        return False
    engine, learner = ({each for each in text.split(",") if each} for text in (config.engine.gpus, config.learner.gpus))
    return not engine or not learner or bool(engine & learner)


def _plan(config: RunConfig, gpu: Gpu, shape: ModelShape, recompute: bool, sleeps: bool) -> MemoryPlan:
    trains = config.kind in ("train", "sft", "replay")
    learner = _learner(config, shape, recompute) if trains else None
    sequences = min(MOST_SEQUENCES, config.rollout.max_in_flight)
    shared, parallel = shares_gpu(config), tensor_parallel(config.engine.extra_arguments)
    length = config.engine.max_model_len
    engine, kv_tokens = None, 0
    if config.kind != "sft" and not config.engine.url:
        scored = length if needs_reference_scores(config) else 0
        bare = engine_memory(shape, kv_tokens=0, sequences=sequences, scored_tokens=scored, parallel=parallel)
        beside = 0 if not shared or learner is None else learner.state if sleeps else learner.total
        room = int((gpu.total - beside - bare.total) * (1 - SPARE)) // kv_token_bytes(shape, parallel)
        kv_tokens = max(min(room, sequences * length), LEAST_SEQUENCES * length)
        engine = engine_memory(shape, kv_tokens=kv_tokens, sequences=sequences, scored_tokens=scored, parallel=parallel)
    return MemoryPlan(gpu, learner, engine, recompute, shared, sleeps, sequences, kv_tokens, length)


def _learner(config: RunConfig, shape: ModelShape, recompute: bool) -> LearnerMemory:
    training = config.training
    return learner_memory(
        shape,
        training,
        tokens=-(-config.packing.tokens_per_row // config.learner.context_parallel),
        ranks=config.learner.num_ranks // config.learner.replicas,
        recompute=recompute,
        compiled=training.compile is not False,
    )


def tensor_parallel(arguments: tuple[str, ...]) -> int:
    """Return on how many GPUs an engine with these arguments computes."""
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name in TENSOR_PARALLEL:
            value = value or "".join(arguments[index + 1 : index + 2])
            return int(value) if value.isdigit() and int(value) else 1
    return 1


def _advice(plan: MemoryPlan) -> str:
    phase, taken = max(plan.phases.items(), key=lambda item: item[1])
    missing = f"{phase} lacks {_gib(taken - plan.gpu.total)}"
    if plan.learner and plan.learner.weights + plan.learner.gradients + plan.learner.optimizer > 0.8 * plan.gpu.total:
        return (
            f"{missing}, and the learner's state alone takes most of the GPU. Train adapters (training.lora.rank=16), "
            "take more GPUs (learner.processes), or a smaller model"
        )
    return (
        f"{missing}. Lower packing.tokens_per_row or engine.max_model_len, set training.gradient_checkpointing=true or "
        "engine.sleep=true, or give engine and learner GPUs of their own (engine.gpus, learner.gpus)"
    )


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
