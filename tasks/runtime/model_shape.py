"""The widths of a causal language model, from which the memory plan of learner and engine follows."""

import json
from dataclasses import dataclass
from pathlib import Path

CONTEXT_BYTES = int(0.6 * 2**30)
"""What a process takes of a GPU before it has a tensor: the CUDA context and the libraries' own memory."""


@dataclass(frozen=True)
class ModelShape:
    """The widths of a causal language model of the common kind: layers of attention and a gated feed-forward part."""

    hidden: int
    inner: int
    """Width of the feed-forward part."""
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    vocab: int
    tied: bool
    """Whether the output head is the embedding."""

    @property
    def query(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_width

    @property
    def key(self) -> int:
        """Width of all keys of a token, and of its values."""
        return self.kv_heads * self.head_width

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer: matrices of attention and of the feed-forward part, and four norms."""
        attention = 2 * self.hidden * (self.query + self.key)
        return attention + 3 * self.hidden * self.inner + 2 * self.hidden + 2 * self.head_width

    @property
    def edge_parameters(self) -> int:
        """Parameters outside the layers: embedding, output head, the last norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer_parameters + self.edge_parameters


def _qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> ModelShape:
    return ModelShape(hidden, inner, layers, heads, 8, 128, 151_936, tied)


KNOWN_SHAPES = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, tied=False),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, tied=False),
}
"""Models of the hub whose plan can be made before they were downloaded, by their config.json."""


def model_shape(path: str) -> ModelShape | None:
    """Return the widths of a model directory, or of a known model of the hub; None where they are not to be had.

    A model whose layers have experts, of which a token uses some, is none that is counted here.
    """
    file = Path(path).expanduser() / "config.json"
    if not path or not file.is_file():
        return KNOWN_SHAPES.get(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        if any("expert" in name for name in config):
            return None
        heads = config["num_attention_heads"]
        return ModelShape(
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
            bool(config.get("tie_word_embeddings", True)),
        )
    except (OSError, ValueError, KeyError, AttributeError):
        return None
