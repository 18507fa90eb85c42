"""Attention over packed rows: each token sees its own segment up to itself and nothing else.

Registered with transformers under the name `NAME`. It raises rather than guesses: without segment borders, or with a
mask, a row would be computed as one long sample, and samples would attend to each other without any error.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "packed_segments"


@dataclass(frozen=True)
class Segments:
    """Borders of a packed row's segments: as numbers, and as an int32 tensor (segments + 1,) on the device."""

    borders: tuple[int, ...]
    on_device: Tensor

    @property
    def longest(self) -> int:
        """Length of the longest segment."""
        return max(end - start for start, end in zip(self.borders, self.borders[1:], strict=False))


def register() -> None:
    """Make the function known to transformers; calling it again does nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return causal attention within segments, (1, T, heads, D), of a query (1, heads, T, D).

    Keys and values may have fewer heads (grouped queries). Raises ValueError when the borders are missing, a mask
    arrives, or the model wants a window, soft cap, sinks or dropout, none of which is computed here.
    """
    if segments is None:
        raise ValueError("packed attention got no segment borders: samples would attend to each other")
    if attention_mask is not None:
        raise ValueError("packed attention got a mask: borders alone say who sees whom")
    if query.shape[0] != 1 or query.shape[2] != segments.borders[-1]:
        raise ValueError(f"packed attention got {tuple(query.shape)} for one row of {segments.borders[-1]} tokens")
    if sliding_window is not None and sliding_window < segments.longest:
        raise ValueError(f"packed attention has no sliding window, but the model has one of {sliding_window} tokens")
    if dropout or others.get("softcap") is not None or others.get("s_aux") is not None:
        raise ValueError("packed attention has no dropout, soft cap or attention sinks, but the model asks for one")
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query, key, value, segments, scaling), None
    return _by_segment(query, key, value, segments, scaling), None


def _by_segment(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    outputs = [
        scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            is_causal=True,
            scale=scaling,
            enable_gqa=grouped,
        )
        for start, end in zip(segments.borders, segments.borders[1:], strict=False)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _flash(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Torch 2.13 needs the argument for grouped heads; 2.11 does not have it and detects them.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    q, k, v = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
    borders, longest = segments.on_device, segments.longest
    # The window (-1, 0) is what makes the kernel causal.
    out = varlen_attn(q, k, v, borders, borders, longest, longest, scale=scaling, window_size=(-1, 0), **grouped)
    assert isinstance(out, Tensor)
    return out[None]
