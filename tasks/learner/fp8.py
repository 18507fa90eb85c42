"""Linear maps of layers in 8 bits: float8 e4m3, with a scale for each row of both operands of every product.

The forward pass and both products of the backward pass are `torch.nn.functional.scaled_mm`, which has no gradient.
Operands are quantised from bfloat16 along what a product sums over. The recipe is `rowwise` of torchao's float8
training (https://github.com/pytorch/ao/tree/main/torchao/float8): scales are powers of two, so that a value is rounded
once, to four significant bits.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import ScalingType, pad, scaled_mm

from configs.training import FP8_MULTIPLE
from tasks.learner.protocol import LearnerError

E4M3 = torch.float8_e4m3fn
ROUTERS = ("gate", "router")
"""Names of linear maps that choose experts."""


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix [rows, width] in e4m3, and float32 factors [rows, 1] by which its rows are the values again.

    A factor is the smallest power of two with which no value is beyond 448, the largest of e4m3.
    """
    # Numbers are written out: the compiler makes inputs of a module's own, which an autograd function cannot have.
    largest = values.abs().amax(1, keepdim=True).float().clamp(min=1e-12)
    scale = ((448.0 / largest).view(torch.int32) & 0x7F800000).view(torch.float32)  # its exponent: the power below it
    return (values * scale.to(values.dtype)).to(E4M3).contiguous(), 1 / scale


def product(left: Tensor, right: Tensor, fast: bool = False) -> Tensor:
    """Return left [rows, width] @ right [columns, width].T in their precision; `fast` adds in fewer bits on Hopper."""
    (a, a_factors), (b, b_factors) = quantise(left), quantise(right)
    rowwise = ScalingType.RowWise
    operands = a, b.t(), a_factors, rowwise, b_factors.t(), rowwise
    return scaled_mm(*operands, output_dtype=left.dtype, use_fast_accum=fast)


class RowwiseLinear(torch.autograd.Function):
    """A product, and the two of its gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        """Return states [tokens, width] @ weight [outputs, width].T."""
        ctx.save_for_backward(states, weight)
        return product(states, weight, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of states and weight from that of the product."""
        (gradient,), (states, weight) = gradients, ctx.saved_tensors
        filling = (0, 0, 0, -len(states) % 16)  # tokens of zeros, up to FP8_MULTIPLE: the sum over tokens is the same
        by_output, by_input = (pad(values, filling).t() for values in (gradient, states))
        return product(gradient, weight.t()), product(by_output, by_input)


def linear(states: Tensor, weight: Tensor) -> Tensor:
    """Return states [tokens, width] @ weight [outputs, width].T in 8 bits, with gradients in 8 bits."""
    outputs: Tensor = RowwiseLinear.apply(states, weight)
    return outputs


def use_fp8(layers: nn.ModuleList) -> None:
    """Have linear maps of layers, but ROUTERS, compute in 8 bits where both widths are multiples of FP8_MULTIPLE.

    Raises LearnerError where there is none.
    """
    maps: list[nn.Module] = [
        module
        for name, module in layers.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in ROUTERS
        if not (module.in_features % FP8_MULTIPLE or module.out_features % FP8_MULTIPLE)
    ]
    if not maps:
        raise LearnerError(
            f"training.fp8: the layers have no linear map of widths that are multiples of {FP8_MULTIPLE}; nothing was "
            "loaded. Leave it false"
        )
    for module in maps:
        module.forward = MethodType(_forward, module)


def _forward(module: nn.Linear, states: Tensor) -> Tensor:
    outputs: Tensor = linear(states.flatten(0, -2), module.weight).unflatten(0, states.shape[:-1])
    return outputs if module.bias is None else outputs + module.bias
