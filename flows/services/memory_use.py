"""learner_memory, engine_memory: what each takes of a GPU, by part, from the widths of a model (ModelShape).

The learner's formula counts what its code keeps; `tests/tasks/learner/test_memory.py` compares it with torch's own
tracker, which follows every tensor of a training step, over many shapes. The engine's is an estimate in parts.
"""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from configs.losses import is_elementwise
from configs.training import AdamwOptimizer, MuonOptimizer, TrainingConfig

CONTEXT_BYTES = int(0.6 * 2**30)
"""What a process takes of a GPU before it has a tensor: the CUDA context and the libraries' own memory."""
CUDA_CHUNK_BYTES = 2**30
"""As `tasks.learner.head.CHUNK_BYTES` has it for CUDA."""
SPARE = 0.08
"""Share on top of all tensors that torch's allocator may hold without using it."""
BATCHED_TOKENS = 8192
"""Tokens of one forward pass of the engine at most, as vLLM takes it on large GPUs; on others it would be fewer."""
PROBE_TOKENS = 160
"""Tokens of a prompt whose log-probs are requested at least: the probe's."""
GRAPHS_BYTES = 2**30
"""For CUDA graphs and what compiled kernels keep: an estimate, that was not measured."""
HARDWARE: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("hardware.toml").read_text("utf-8"))
"""GPUs by their memory, and models of the hub by their widths."""


class VisionShape(BaseModel, frozen=True):
    """The widths of a vision tower of the Qwen3-VL family, as config.json names them."""

    hidden_size: int
    intermediate_size: int
    depth: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
    out_hidden_size: int
    in_channels: int
    temporal_patch_size: int
    patch_size: int
    spatial_merge_size: int

    @property
    def deep(self) -> int:
        """Layers whose features are passed on to layers of the decoder (DeepStack)."""
        return len(self.deepstack_visual_indexes)

    @property
    def patch_values(self) -> int:
        """Numbers of a patch: pixels of its sides and times, in three colours."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged(self) -> int:
        """Patches of a token."""
        return self.spatial_merge_size**2

    @property
    def parameters(self) -> int:
        """All parameters, those of the maps from merged patches to tokens among them."""
        hidden, inner, wide = self.hidden_size, self.intermediate_size, self.hidden_size * self.merged
        # Attention and feed-forward part with their biases, and two norms.
        layer = 4 * hidden * hidden + 2 * hidden * inner + 9 * hidden + inner
        mergers = (1 + self.deep) * (wide * wide + wide + wide * self.out_hidden_size + self.out_hidden_size)
        norms = 2 * hidden + 2 * self.deep * wide
        return self.depth * layer + mergers + norms + (self.patch_values + 1 + self.num_position_embeddings) * hidden


class ModelShape(BaseModel, frozen=True):
    """The widths of a causal language model of the common kind, as config.json names them.

    It has layers of attention and a gated feed-forward part.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    vision: VisionShape | None = Field(None, alias="vision_config")
    """Of a model that sees; its parameters are in none of the sums below."""

    @property
    def query(self) -> int:
        """Width of all queries of a token."""
        return self.num_attention_heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all keys of a token, and of its values."""
        return self.num_key_value_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer: matrices of attention and of the feed-forward part, and four norms."""
        attention = 2 * self.hidden_size * (self.query + self.key)
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size + 2 * self.head_dim

    @property
    def edge_parameters(self) -> int:
        """Parameters outside the layers: embedding, output head, the last norm."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2) + self.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.num_hidden_layers * self.layer_parameters + self.edge_parameters


def model_shape(path: str) -> ModelShape | None:
    """Return the widths of a model directory, or of a model of `hardware.toml`; None where they are not to be had.

    A model whose layers have experts, of which a token uses some, is none that is counted here.
    """
    file = Path(path).expanduser() / "config.json"
    try:
        here = path and file.is_file()
        config = json.loads(file.read_text(encoding="utf-8")) if here else HARDWARE["models"][path]
        text = config.get("text_config", config)
        if any("expert" in name for name in text):
            return None
        heads = text["num_attention_heads"]
        others = {
            "num_key_value_heads": text.get("num_key_value_heads") or heads,
            "head_dim": text.get("head_dim") or text["hidden_size"] // heads,
            # Of a model that sees, these lie outside of `text_config`.
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))),
            "vision_config": config.get("vision_config") or None,
        }
        return ModelShape(**text | others)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ZeroDivisionError):
        return None


@dataclass(frozen=True)
class MemoryUse:
    """What a process takes of each of its GPUs when it takes the most."""

    parts: Mapping[str, int]
    """Bytes by part."""
    idle: int
    """Bytes that it keeps: the learner between two training steps, the engine asleep."""

    @property
    def total(self) -> int:
        """All parts, in bytes."""
        return sum(self.parts.values())


def layer_bytes(shape: ModelShape, compiled: bool) -> int:
    """Return the bytes that a layer keeps of a token for its backward pass, in bfloat16.

    Uncompiled, each of the norms keeps its input in float32 and two tensors in bfloat16. A compiled layer recomputes
    what is cheap. Norms and attention keep a number in float32 for each head in addition.
    """
    narrow, wide = (8, 6) if compiled else (16, 8)
    heads = 6 if compiled else 10
    return (
        narrow * shape.hidden_size + wide * shape.intermediate_size + heads * (shape.query + shape.key)
        + 8 * shape.num_attention_heads + 4 * shape.num_key_value_heads + 8
    )  # fmt: skip


def learner_memory(
    shape: ModelShape, training: TrainingConfig, *, tokens: int, ranks: int, recompute: bool, compiled: bool
) -> MemoryUse:
    """Return what a rank takes that trains rows of `tokens` in bfloat16 with weights in float32, sharded over `ranks`.

    The most is taken where the output head's gradient is formed, in the last layer's backward pass after it, or at the
    end, when gradients of embedding and head become float32. Gradients of earlier rows exist by then.

    Parts: `weights` and `gradients` in float32; `optimizer`, its moments in float32; `gathered`, weights in bfloat16 of
    embedding, head and the layers that are computed, as all ranks have them; `activations` of all layers and the last
    norm; `logits`, a chunk with what is computed from it, and the gradient of the output head; `working`, what a
    layer's backward pass takes beyond the output head; `spare`, what the allocator holds unused, and the CUDA context.
    """
    hidden, inner, vocab = shape.hidden_size, shape.intermediate_size, shape.vocab_size
    trained, moments = _optimizer_state(shape, training)
    tower = shape.vision.parameters if shape.vision else 0
    if tower and training.vision == "trained":
        trained, moments = trained + tower, moments + tower * (moments // max(1, trained))
    layer, edge = 2 * shape.layer_parameters, 2 * shape.edge_parameters
    # Several ranks gather a layer ahead of the one that is computed, and hold what they reduce.
    ahead = layer if ranks > 1 else 0
    activations = tokens * (_kept_bytes(shape, training, recompute, compiled) + 8 * hidden)
    activations += tokens * (4 * shape.head_dim + 40) + _tower_bytes(shape.vision, training, tokens, recompute)
    # As `tasks.learner.head.default_chunk` takes them: tokens whose logits exist at the same time.
    fits = CUDA_CHUNK_BYTES // (4 * vocab)
    chunk = min(tokens, training.logprob_chunk or max(64, min(1024, 1 << fits.bit_length() >> 1)))
    head_weight = 4 * vocab * hidden
    # In one pass the gradient of the states exists at the same time.
    selected = (2 if is_elementwise(training.loss) else 1) * 2 * hidden * tokens
    logits = selected + head_weight + 10 * vocab * chunk
    # By then the last norm's are free, and in a layer one tensor of three that its feed-forward part needs.
    again = tokens * layer_bytes(shape, compiled) if recompute else 0
    layers_peak = head_weight // 2 + again + tokens * (4 * inner - 6 * hidden) + 5 * layer // 4 + 2 * ahead
    # What is exchanged is in float32, and so is the shard that comes of it.
    edges_peak = max(3 * edge, 2 * edge + head_weight // 2 + 2 * edge // ranks)
    parts = {
        "weights": 4 * (shape.parameters + tower) // ranks,
        "gradients": 4 * trained // ranks,
        "optimizer": moments // ranks,
        "gathered": edge + ahead + 2 * tower,  # the tower is not cut into layers
        "activations": activations,
        "logits": logits,
        "working": max(0, layers_peak - logits - ahead, edges_peak - edge - ahead - activations - logits),
    }
    spare = int(SPARE * sum(parts.values())) + CONTEXT_BYTES
    return MemoryUse(parts | {"spare": spare}, parts["weights"] + parts["optimizer"] + CONTEXT_BYTES)


def _tower_bytes(tower: VisionShape | None, training: TrainingConfig, tokens: int, recompute: bool) -> int:
    """Return the bytes that a vision tower keeps of a row whose tokens all represent pictures: the most possible.

    An estimate for the tower's layers, of what each keeps in bfloat16 of a patch; a frozen one keeps features alone.
    """
    if tower is None:
        return 0
    patches = tokens * tower.merged
    features = 2 * tokens * tower.out_hidden_size * (1 + tower.deep) + 4 * patches * tower.patch_values
    if training.vision == "frozen":
        return features
    layer = 2 * (9 * tower.hidden_size + 2 * tower.intermediate_size)
    return features + patches * (layer + 2 * tower.hidden_size * tower.depth if recompute else layer * tower.depth)


def _kept_bytes(shape: ModelShape, training: TrainingConfig, recompute: bool, compiled: bool) -> int:
    """Return the bytes that all layers together keep of a token."""
    again = math.ceil(shape.num_hidden_layers / training.checkpoint_every) if recompute else 0
    inputs = 0 if training.offload_activations else 2 * shape.hidden_size * again
    return inputs + (shape.num_hidden_layers - again) * layer_bytes(shape, compiled)


def _optimizer_state(shape: ModelShape, training: TrainingConfig) -> tuple[int, int]:
    """Return how many parameters are trained, and the bytes of the optimizer's moments, of all ranks together."""
    if training.lora:
        # Of every matrix of a layer a row of A and a column of B for each rank: no more than this.
        widths = 7 * shape.hidden_size + 2 * shape.query + 2 * shape.key + 3 * shape.intermediate_size
        trained = training.lora.rank * shape.num_hidden_layers * widths
        return trained, 8 * trained
    if isinstance(training.optimizer, MuonOptimizer):
        return shape.parameters, 4 * shape.num_hidden_layers * shape.layer_parameters + 8 * shape.edge_parameters
    moments = 2 if isinstance(training.optimizer, AdamwOptimizer) else bool(training.optimizer.state_kind)
    return shape.parameters, 4 * moments * shape.parameters


def kv_token_bytes(shape: ModelShape, parallel: int) -> int:
    """Return the bytes of a token in the KV cache in half precision, on each of `parallel` GPUs."""
    return 2 * 2 * shape.num_hidden_layers * shape.key // parallel


def engine_memory(shape: ModelShape, *, kv_tokens: int, sequences: int, scored_tokens: int, parallel: int) -> MemoryUse:
    """Return what an engine takes in bfloat16 with room for `kv_tokens` tokens, on each of `parallel` GPUs.

    `scored_tokens` is the longest prompt whose log-probs are requested, beside the probe's. Parts: `weights`, with the
    output head in float32 in addition; `kv cache`; `working`, of a forward pass with the logits that are sampled from,
    an estimate; `graphs`, which stay while it sleeps, as their addresses do; `context`.
    """
    rows = max(sequences, PROBE_TOKENS, min(scored_tokens, BATCHED_TOKENS))
    # Logits in float32, sorted for nucleus sampling, as probabilities and as log-probs.
    logits = 4 * 4 * rows * shape.vocab_size
    token = 2 * (4 * shape.hidden_size + 3 * shape.intermediate_size + 2 * (shape.query + 2 * shape.key))
    weights = 2 * shape.parameters + 4 * shape.vocab_size * shape.hidden_size
    if tower := shape.vision:
        weights += 2 * tower.parameters
        # The features of as many tokens as a pass has, and a layer of the tower over their patches.
        layer = 2 * (5 * tower.hidden_size + 2 * tower.intermediate_size)
        token += 2 * tower.out_hidden_size * (1 + tower.deep) + tower.merged * layer
    parts = {
        "weights": weights // parallel,
        "kv cache": kv_tokens * kv_token_bytes(shape, parallel),
        "working": (logits + BATCHED_TOKENS * token) // parallel,
        "graphs": GRAPHS_BYTES,
        "context": CONTEXT_BYTES,
    }
    return MemoryUse(parts, GRAPHS_BYTES + CONTEXT_BYTES)
