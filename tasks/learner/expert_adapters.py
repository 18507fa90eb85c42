"""Adapters of fused experts: every expert has factors of its own, laid out and named in files as peft's are.

peft's own wrapper gives parameters other names, under which transformers does not find matrices of a checkpoint that it
fuses while it reads. Here the module of experts keeps its names, and computes with W + alpha / rank * B A.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

ADAPTERS = ".expert_adapters."
"""Part of the names of these parameters in memory, before that of the matrix."""
NESTED = {"gate_up_proj": ".base_layer", "down_proj": ""}
"""By matrix, what peft's names have before the factors: it wraps one around the other, in the order of the module."""


class ExpertAdapter(nn.Module):
    """The factors of one matrix of all experts: A (experts * rank, inputs) and B (outputs, rank * experts)."""

    def __init__(self, weight: Tensor, rank: int, scale: float, is_transposed: bool) -> None:
        """`weight` is (experts, outputs, inputs), or (experts, inputs, outputs) where it is transposed."""
        super().__init__()
        self.num_experts, *sides = weight.shape
        inputs, outputs = sides if is_transposed else reversed(sides)
        self.lora_A = nn.Linear(inputs, rank * self.num_experts, bias=False)
        self.lora_B = nn.Linear(rank * self.num_experts, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self._scale, self._product = scale, "ore,eri->eio" if is_transposed else "ore,eri->eoi"

    def forward(self, weight: Tensor) -> Tensor:
        """Return the matrix of all experts with their adapters, in its own precision."""
        first = self.lora_A.weight.unflatten(0, (self.num_experts, -1))
        second = self.lora_B.weight.unflatten(1, (-1, self.num_experts))
        return weight + (self._scale * torch.einsum(self._product, second, first)).to(weight.dtype)


class _Plain(nn.Module):
    """Calls experts as they compute without adapters."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *arguments: Any) -> Any:
        return type(self.experts).forward(self.experts, *arguments)


def adapt_experts(experts: nn.Module, rank: int, scale: float) -> None:
    """Put an adapter on each matrix of a module of experts, with zeros for B, and compute with it from now on."""
    is_transposed = bool(getattr(experts, "is_transposed", False))
    matrices = [name for name, weight in experts.named_parameters(recurse=False) if weight.ndim == 3]
    adapters = {name: ExpertAdapter(experts.get_parameter(name), rank, scale, is_transposed) for name in matrices}
    experts.add_module(ADAPTERS.strip("."), nn.ModuleDict(adapters))
    # What is called by name, as experts themselves call this.
    plain = _Plain(experts)
    experts.forward = torch.compiler.disable(partial(_forward, experts, adapters, (plain,)))


def _forward(experts: nn.Module, adapters: dict[str, ExpertAdapter], plain: tuple[_Plain], *arguments: Any) -> Any:
    weights = {f"experts.{name}": adapter(getattr(experts, name)) for name, adapter in adapters.items()}
    return torch.func.functional_call(plain[0], weights, arguments)


def stored_name(name: str) -> str:
    """Return peft's name of a parameter of an adapter."""
    module, _, rest = name.partition(ADAPTERS)
    matrix, _, factor = rest.partition(".")
    return f"{module}{NESTED[matrix]}.{factor}" if rest else name
