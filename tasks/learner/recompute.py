"""Which activations of the layers are computed again in the backward pass, in place of being kept."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.attention import varlen
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from configs.training import TrainingConfig
from tasks.learner.shards import EXPERTS

assert varlen  # declares the operation `torch_attn._varlen_attn`
KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_mm_v2.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""Operations whose results selective recomputation keeps: matrix products of linear maps, and attention."""


def recompute_layers(causal: Any, layers: nn.ModuleList, settings: TrainingConfig, device: torch.device) -> None:
    """Have every n-th layer recompute activations in its backward pass, as `training.gradient_checkpointing` says.

    With true such a layer keeps its input alone; with "selective" the results of `KEPT`, too. The first kind goes
    around a compiled layer, the second into it, where the compiler decides by the same list. Neither changes a bit of
    the gradients.
    """
    if settings.gradient_checkpointing is True:
        causal.gradient_checkpointing_enable(
            {"use_reentrant": False},
            every_n_layers=settings.checkpoint_every,
            # On the CPU there is nowhere to offload to.
            offload=settings.offload_activations and device.type != "cpu",
        )
    elif settings.gradient_checkpointing == "selective":
        biased = any(EXPERTS in name and name.endswith("_bias") for name, _ in layers.named_parameters())
        # To products of experts transformers adds biases in place, which must not change what is kept.
        kept = [each for each in KEPT if not (biased and each == torch.ops.aten._grouped_mm.default)]
        forward = _recomputing_forward(partial(create_selective_checkpoint_contexts, kept))
        for layer in layers[:: settings.checkpoint_every]:
            layer.forward = MethodType(forward, layer)


def _recomputing_forward(contexts: Callable[[], Any]) -> Callable[..., Any]:
    """Return a layer's forward pass, recomputed but for what `contexts` keeps."""

    def forward(layer: nn.Module, *arguments: Any, **options: Any) -> Any:
        # In the place of the layer's own forward pass, inside of what is compiled and of the shards' hooks.
        own = partial(type(layer).forward, layer, **options)
        return checkpoint(own, *arguments, use_reentrant=False, context_fn=contexts)

    return forward
