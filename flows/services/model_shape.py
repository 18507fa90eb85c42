"""ModelShape: the widths of a model, from its config.json, for the memory plan (`flows.services.memory`)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from configs.checks.run import layers_with_state
from flows.services.gpus import HARDWARE

UNCOUNTED = ("kv_lora_rank", "attn_logit_softcapping")
"""Keys of configs of latent attention and of soft caps, whose widths and memory are others."""

LINEAR = "linear_attention"
"""As configs name layers of gated DeltaNet."""


class ModelShape(BaseModel, frozen=True):
    """The widths of a causal language model of the common kind, as config.json names them.

    It has layers of attention and a gated feed-forward part, or experts that are such parts.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    num_experts: int = 0
    """Experts of a layer, of which a token uses `experts_per_token`; `intermediate_size` is the width of these."""
    experts_per_token: int = 0
    all_experts_size: int = 0
    """Width of all experts of a layer."""
    expert_parallel: int = 1
    """Processes that these are dealt to, which each get an equal share of the tokens."""
    linear_layers: int = 0
    """Layers of gated DeltaNet, in place of attention."""
    linear_value: int = 0
    """Width of all values of a token in such a layer."""
    linear_parameters: int = 0
    """Parameters of its matrices."""
    state_bytes: int = 0
    """Bytes of a sequence's states in all of them in an engine: of each head in float32, of convolutions in half."""
    tower_parameters: int = 0
    """Parameters of what sees, of models of `hardware.toml` that are trained on text."""

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
        return self._layer(self.all_experts_size or self.intermediate_size)

    @property
    def gathered_parameters(self) -> int:
        """Parameters of a layer that a process gathers: of experts dealt to several its own."""
        experts = self.expert_parameters // self.num_hidden_layers
        return self.layer_parameters - experts * (self.expert_parallel - 1) // self.expert_parallel

    def _layer(self, width: int) -> int:
        attention = self.linear_parameters or 2 * self.hidden_size * (self.query + self.key)
        matrices = attention + self.hidden_size * (3 * width + self.num_experts)
        return matrices + 2 * self.hidden_size + 2 * self.head_dim

    @property
    def active_parameters(self) -> int:
        """Parameters that a token uses."""
        return self.num_hidden_layers * self._layer(self.intermediate_size) + self.edge_parameters

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers, of which no optimizer of matrices and no 8 bits take hold."""
        return 3 * self.num_hidden_layers * self.hidden_size * self.all_experts_size

    @property
    def edge_parameters(self) -> int:
        """Parameters outside the layers: embedding, output head, the last norm, a tower."""
        embeddings = self.vocab_size * (1 if self.tie_word_embeddings else 2) + 1
        return embeddings * self.hidden_size + self.tower_parameters

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.num_hidden_layers * self.layer_parameters + self.edge_parameters


def model_shape(path: str) -> ModelShape | None:
    """Return the widths of a model directory, or of a model of `hardware.toml`; None where they are not to be had.

    A directory's that sees, or a model that has another state than gated DeltaNet's or one of UNCOUNTED, has no widths
    that are counted here. Of a model with experts or with DeltaNet all layers count as such.
    """
    file = Path(path).expanduser() / "config.json"
    try:
        here = path and file.is_file()
        config = json.loads(file.read_text(encoding="utf-8")) if here else HARDWARE["models"][path]
        stateful = layers_with_state(config)
        if stateful not in ("", LINEAR) or any(
            "vision" in name or name in UNCOUNTED for name in config if config[name]
        ):
            return None
        heads = config["num_attention_heads"]
        others = {
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", True)),
        }
        return ModelShape(**config | others | _expert_widths(config) | (_linear_widths(config) if stateful else {}))
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


def _expert_widths(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields of experts, by the names that families have for them; none of a model without."""
    numbers = (config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    number = next(filter(None, numbers), 0)
    if not number:
        return {}
    width, each = config.get("moe_intermediate_size") or config["intermediate_size"], config["num_experts_per_tok"]
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
    widths = {"intermediate_size": each * width + shared, "all_experts_size": number * width + shared}
    return widths | {"num_experts": number, "experts_per_token": each}


def _linear_widths(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields of gated DeltaNet: its maps of queries, keys, values and gates, and back."""
    layers, hidden = config["layer_types"].count(LINEAR), config["hidden_size"]
    width, heads = config["linear_key_head_dim"], config["linear_num_value_heads"]
    key, value = config["linear_num_key_heads"] * width, heads * config["linear_value_head_dim"]
    state = 4 * value * width + 2 * (config["linear_conv_kernel_dim"] - 1) * (2 * key + value)
    parameters = hidden * (2 * key + 3 * value + 2 * heads)
    return {
        "linear_layers": layers,
        "linear_value": value,
        "linear_parameters": parameters,
        "state_bytes": layers * state,
    }
