"""How much memory of a GPU the learner takes, by part, from the widths of a model. Importing this imports no torch.

The formulas count what the code of the learner keeps: they are compared with torch's own tracker, which follows every
tensor of a training step, over many shapes in `tests/tasks/learner/test_memory.py`.
"""

import math
from dataclasses import dataclass

from configs.losses import is_elementwise
from configs.training import AdamwOptimizer, MuonOptimizer, TrainingConfig
from tasks.runtime.model_shape import CONTEXT_BYTES, ModelShape

CUDA_CHUNK_BYTES = 2**30
"""As `tasks.learner.head.CHUNK_BYTES` has it for CUDA."""
SPARE = 0.08
"""Share on top of all tensors that torch's allocator may hold without using it."""


@dataclass(frozen=True)
class LearnerMemory:
    """What one rank of the learner takes of its GPU, in bytes, when it takes the most."""

    weights: int
    """Master weights in float32."""
    gradients: int
    """In float32."""
    optimizer: int
    """The optimizer's moments in float32."""
    gathered: int
    """Weights in bfloat16 of embedding and head, and of the layers that are computed, as all ranks have them."""
    activations: int
    """What the backward pass needs of all layers, and the last norm."""
    logits: int
    """A chunk of logits with what is computed from it, and the gradient of the output head."""
    working: int
    """What a layer's backward pass takes beside, where that is more than the output head takes."""
    spare: int
    """What the allocator holds without using it, and the CUDA context."""

    @property
    def state(self) -> int:
        """What stays between two training steps: weights and moments, and the CUDA context."""
        return self.weights + self.optimizer + CONTEXT_BYTES

    @property
    def tensors(self) -> int:
        """The most that tensors take in a training step."""
        return self.total - self.spare

    @property
    def total(self) -> int:
        """The most that a training step takes."""
        return sum(vars(self).values())


def layer_bytes(shape: ModelShape, compiled: bool) -> int:
    """Return the bytes that a layer keeps of a token for its backward pass, in bfloat16.

    Uncompiled, each of the norms keeps its input in float32 and two tensors in bfloat16. A compiled layer computes what
    is cheap again. Norms and attention keep a number in float32 for each head beside.
    """
    narrow, wide = (8, 6) if compiled else (16, 8)
    heads = 6 if compiled else 10
    return (
        narrow * shape.hidden + wide * shape.inner + heads * (shape.query + shape.key)
        + 8 * shape.heads + 4 * shape.kv_heads + 8
    )  # fmt: skip


def learner_memory(
    shape: ModelShape, training: TrainingConfig, *, tokens: int, ranks: int, recompute: bool, compiled: bool
) -> LearnerMemory:
    """Return what a rank takes that trains rows of `tokens` in bfloat16 with weights in float32, sharded over `ranks`.

    The most is taken where the output head's gradient is formed, in the last layer's backward pass after it, or at the
    end, when gradients of embedding and head are brought to float32. Gradients of earlier rows are there by then.
    """
    trained, moments = _optimizer_state(shape, training)
    tower = shape.vision.parameters if shape.vision else 0
    if tower and training.vision == "trained":
        trained, moments = trained + tower, moments + tower * (moments // max(1, trained))
    layer, edge = 2 * shape.layer_parameters, 2 * shape.edge_parameters
    # Several ranks gather a layer ahead of the one that is computed, and hold what they reduce.
    ahead = layer if ranks > 1 else 0
    activations = tokens * (_kept_bytes(shape, training, recompute, compiled) + 8 * shape.hidden)
    activations += tokens * (4 * shape.head_width + 40) + _tower_bytes(shape, training, tokens, recompute)
    head_weight, chunk = 4 * shape.vocab * shape.hidden, 4 * shape.vocab * _chunk(shape, training, tokens)
    # In one pass the gradient of the states is there beside them.
    selected = (2 if is_elementwise(training.loss) else 1) * 2 * shape.hidden * tokens
    logits = selected + head_weight + 5 * chunk // 2
    # By then the last norm's are free, and in a layer one tensor of three that its feed-forward part needs.
    again = tokens * layer_bytes(shape, compiled) if recompute else 0
    layers_peak = head_weight // 2 + again + tokens * (4 * shape.inner - 6 * shape.hidden) + 5 * layer // 4 + 2 * ahead
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
    return LearnerMemory(**parts, spare=int(SPARE * sum(parts.values())) + CONTEXT_BYTES)


def _tower_bytes(shape: ModelShape, training: TrainingConfig, tokens: int, recompute: bool) -> int:
    """Return the bytes that a vision tower keeps of a row whose tokens all stand for pictures: the most there can be.

    An estimate for the tower's layers, of what each keeps in bfloat16 of a patch; a frozen one keeps features alone.
    """
    tower = shape.vision
    if tower is None:
        return 0
    patches = tokens * tower.merged
    features = 2 * tokens * tower.out * (1 + tower.deep) + 4 * patches * tower.patch_values
    if training.vision == "frozen":
        return features
    layer = 2 * (9 * tower.hidden + 2 * tower.inner)
    return features + patches * (layer + 2 * tower.hidden * tower.layers if recompute else layer * tower.layers)


def _kept_bytes(shape: ModelShape, training: TrainingConfig, recompute: bool, compiled: bool) -> int:
    """Return the bytes that all layers together keep of a token."""
    again = math.ceil(shape.layers / training.checkpoint_every) if recompute else 0
    inputs = 0 if training.offload_activations else 2 * shape.hidden * again
    return inputs + (shape.layers - again) * layer_bytes(shape, compiled)


def _optimizer_state(shape: ModelShape, training: TrainingConfig) -> tuple[int, int]:
    """Return how many parameters are trained, and the bytes of the optimizer's moments, of all ranks together."""
    if training.lora:
        # Of every matrix of a layer a row of A and a column of B for each rank: no more than this.
        widths = 4 * shape.hidden + 2 * shape.query + 2 * shape.key + 3 * (shape.hidden + shape.inner)
        trained = training.lora.rank * shape.layers * widths
        return trained, 8 * trained
    if isinstance(training.optimizer, AdamwOptimizer):
        return shape.parameters, 8 * shape.parameters
    if isinstance(training.optimizer, MuonOptimizer):
        return shape.parameters, 4 * shape.layers * shape.layer_parameters + 8 * shape.edge_parameters
    return shape.parameters, 4 * shape.parameters if training.optimizer.state_kind else 0


def _chunk(shape: ModelShape, training: TrainingConfig, tokens: int) -> int:
    """Return how many tokens' logits exist at the same time, as `tasks.learner.head.default_chunk` takes them."""
    fits = CUDA_CHUNK_BYTES // (4 * shape.vocab)
    return min(tokens, training.logprob_chunk or max(64, min(1024, 1 << fits.bit_length() >> 1)))
