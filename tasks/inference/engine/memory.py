"""How much memory of a GPU the inference engine takes, by part, from the widths of a model."""

from dataclasses import dataclass

from tasks.runtime.model_shape import CONTEXT_BYTES, ModelShape

BATCHED_TOKENS = 8192
"""Tokens of one forward pass at most, as vLLM takes it on large GPUs; on others it would be fewer."""
MOST_SEQUENCES = 1024
"""Sequences of one forward pass at most, as vLLM takes it on large GPUs."""
PROBE_TOKENS = 160
"""Tokens of a prompt whose log-probs are asked for at least: the probe's."""
GRAPHS_BYTES = 2**30
"""For CUDA graphs and what compiled kernels keep: an estimate, that was not measured."""


@dataclass(frozen=True)
class EngineMemory:
    """What one process of the engine takes of its GPU, in bytes."""

    weights: int
    """In bfloat16, and the output head in float32 beside."""
    kv_cache: int
    working: int
    """Of a forward pass, with the logits that are sampled from. An estimate."""
    graphs: int
    context: int

    @property
    def fixed(self) -> int:
        """All but the KV cache."""
        return self.total - self.kv_cache

    @property
    def total(self) -> int:
        """All parts."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class EngineSettings:
    """What the memory plan says to an engine on CUDA."""

    kv_cache_bytes: int
    share: float
    """Of the GPU's memory, that must be free when the engine starts: what it takes by the plan."""
    sequences: int
    """Most sequences of a forward pass."""
    sleeps: bool
    """Whether it gives its memory back while the learner trains."""

    def arguments(self) -> list[str]:
        """Return the arguments for the engine's command line.

        The size of the KV cache is named, so that neither a start nor a restart depends on what a neighbour holds.
        """
        arguments = ["--kv-cache-memory-bytes", str(self.kv_cache_bytes), "--gpu-memory-utilization"]
        arguments += [f"{self.share:.3f}", "--max-num-seqs", str(self.sequences)]
        arguments += ["--max-num-batched-tokens", str(BATCHED_TOKENS)]
        return [*arguments, *(["--enable-sleep-mode"] if self.sleeps else [])]


def kv_token_bytes(shape: ModelShape, parallel: int = 1) -> int:
    """Return the bytes of a token in the KV cache in half precision, on each of `parallel` GPUs."""
    return 2 * 2 * shape.layers * shape.key // parallel


def engine_memory(
    shape: ModelShape, *, kv_tokens: int, sequences: int, scored_tokens: int = 0, parallel: int = 1
) -> EngineMemory:
    """Return what an engine takes in bfloat16 with room for `kv_tokens` tokens, on each of `parallel` GPUs.

    `scored_tokens` is the longest prompt whose log-probs are asked for, beside the probe's.
    """
    rows = max(sequences, PROBE_TOKENS, min(scored_tokens, BATCHED_TOKENS))
    # Logits in float32, sorted for nucleus sampling, as probabilities and as log-probs.
    logits = 4 * 4 * rows * shape.vocab
    token = 2 * (4 * shape.hidden + 3 * shape.inner + 2 * (shape.query + 2 * shape.key))
    tower, seen = shape.vision, 0
    if tower:
        # The features of as many tokens as a pass has, and a layer of the tower over their patches.
        patch = tower.merged * 2 * (5 * tower.hidden + 2 * tower.inner)
        seen = BATCHED_TOKENS * (2 * tower.out * (1 + tower.deep) + patch)
    return EngineMemory(
        weights=(2 * (shape.parameters + (tower.parameters if tower else 0)) + 4 * shape.vocab * shape.hidden)
        // parallel,
        kv_cache=kv_tokens * kv_token_bytes(shape, parallel),
        working=(logits + BATCHED_TOKENS * token + seen) // parallel,
        graphs=GRAPHS_BYTES,
        context=CONTEXT_BYTES,
    )
