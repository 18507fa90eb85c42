"""The widths of a causal language model, from which the memory plan of learner and engine follows."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

CONTEXT_BYTES = int(0.6 * 2**30)
"""What a process takes of a GPU before it has a tensor: the CUDA context and the libraries' own memory."""


@dataclass(frozen=True)
class VisionShape:
    """The widths of a vision tower of the Qwen3-VL family."""

    hidden: int
    inner: int
    layers: int
    positions: int
    """Learnt positions of patches."""
    deep: int
    """Layers whose features are passed on to layers of the decoder (DeepStack)."""
    out: int
    """Width of the features of a token."""
    patch_values: int
    """Numbers of a patch: pixels of its sides and times, in three colours."""
    merged: int = 4
    """Patches of a token."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer: attention and feed-forward part with their biases, and two norms."""
        return 4 * self.hidden * self.hidden + 2 * self.hidden * self.inner + 9 * self.hidden + self.inner

    @property
    def parameters(self) -> int:
        """All parameters, those of the maps from merged patches to tokens among them."""
        wide = self.hidden * self.merged
        mergers = (1 + self.deep) * (wide * wide + wide + wide * self.out + self.out)
        norms = 2 * self.hidden + 2 * self.deep * wide
        edges = (self.patch_values + 1) * self.hidden + self.positions * self.hidden
        return self.layers * self.layer_parameters + mergers + norms + edges


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
    vision: VisionShape | None = None
    """Of a model that sees; its parameters are in none of the sums below."""

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


def _qwen3(
    hidden: int, inner: int, layers: int, heads: int, tied: bool, vision: VisionShape | None = None
) -> ModelShape:
    return ModelShape(hidden, inner, layers, heads, 8, 128, 151_936, tied, vision)


SMALL_TOWER = VisionShape(1024, 4096, 24, 2304, 3, 2560, 1536)


KNOWN_SHAPES = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, tied=False),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, tied=False),
    "Qwen/Qwen3-VL-2B-Instruct": _qwen3(2048, 6144, 28, 16, True, replace(SMALL_TOWER, out=2048)),
    "Qwen/Qwen3-VL-4B-Instruct": _qwen3(2560, 9728, 36, 32, True, SMALL_TOWER),
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
        tower, whole = config.get("vision_config"), config
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
            bool(whole.get("tie_word_embeddings", config.get("tie_word_embeddings", True))),
            _vision_shape(tower) if tower else None,
        )
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def _vision_shape(config: Mapping[str, Any]) -> VisionShape:
    """Return the widths of a vision tower by its part of a config.json; raises KeyError for one of another family."""
    patch = config["in_channels"] * config["temporal_patch_size"] * config["patch_size"] ** 2
    return VisionShape(
        hidden=config["hidden_size"],
        inner=config["intermediate_size"],
        layers=config["depth"],
        positions=config["num_position_embeddings"],
        deep=len(config["deepstack_visual_indexes"]),
        out=config["out_hidden_size"],
        patch_values=patch,
        merged=config["spatial_merge_size"] ** 2,
    )
