"""Causal attention within the segments of a packed row: torch's variable-length kernel, or one product for each length.

The kernel is FlashAttention: version 2 of torch itself, or version 3 or 4 of a package that torch calls in its place.
It has sliding windows, and neither soft caps of the scores nor sinks: layers that have these attend length by length.
"""

import inspect
import logging
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention._fa4 import register_flash_attention_fa4
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from configs.services import ATTENTION_PACKAGES
from tasks.learner.context_parallel import ContextGroup
from tasks.learner.distributed import to_device
from tasks.learner.prefixes import SharedPrefixes, shared_prefixes
from tasks.learner.protocol import LearnerError
from tasks.runtime.torchvision_operators import declare_torchvision_operators

ATTENTION = "packed_segments"
"""The name under which transformers knows `packed_attention`."""
VARLEN_KERNELS = {(device, dtype) for device in ("cuda", "meta") for dtype in (torch.bfloat16, torch.float16)}
"""Devices and precisions for which torch's variable-length attention has a kernel; meta tensors count what it costs."""
WIDEST_HEAD = 256
"""Numbers of a head that the kernel takes at most."""
HOPPER, BLACKWELL = 9, 10
BEST_OF = {HOPPER: ("fa3", "fa4"), BLACKWELL: ("fa4",)}
"""What is taken for GPUs of a compute capability where it is installed, the first that is; others take version 2."""
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Has `varlen_attn` take fewer heads of keys than of queries; up to torch 2.11 it does so by itself."""

_log = logging.getLogger(__name__)
register_flash_attention_impl("FA4", register_fn=partial(register_flash_attention_fa4, f"{__package__}.flash4"))


class Segments:
    """Borders of a packed row's segments.

    Compiled layers read `cu_seqlens` and two numbers of it. They are compiled once for all values of these; of a tuple
    of borders they would guard every number, and be compiled again for every row.
    """

    def __init__(
        self,
        borders: tuple[int, ...],
        device: torch.device,
        context: ContextGroup | None = None,
        shared: SharedPrefixes | None = None,
    ) -> None:
        """`borders` are 0, then the running sum of the segments' lengths; `context` are ranks that share the row.

        Of a row with `shared` prefixes t of T tokens are computed, of each segment those at its end.
        """
        self._borders = borders
        self._shared = shared
        self.context = context
        self.cu_seqlens = to_device(np.asarray(borders, np.int32), device)
        """The borders, int32 (segments + 1,)."""
        self.tokens = shared.borders[-1] if shared else borders[-1]
        """How many tokens of the row are computed."""
        self.longest = max(end - start for start, end in pairwise(borders))
        """Length of the longest segment."""
        self.places = to_device(shared.places, device) if shared else None
        """Where among the computed tokens is what stands for each token of the row, int64 (T,); None if all are."""
        self.computed = to_device(np.asarray(shared.borders, np.int32), device) if shared else self.cu_seqlens
        """The borders of what is computed of each segment, int32 (segments + 1,)."""

    @cached_property
    def batches(self) -> list[Tensor]:
        """Places of the tokens of segments of about one length, int64 (segments, longest of these).

        After the end of a shorter one stands t, which is no place among t computed tokens. What segments have in common
        stands in each of them.
        """
        return [to_device(places, self.cu_seqlens.device) for places in self._padded]

    @cached_property
    def order(self) -> Tensor:
        """Where each computed token is among `batches`, one after the other and flat; int64 (t,)."""
        places = np.concatenate([places.flatten() for places in self._padded])
        order = np.empty(self.tokens + 1, np.int64)
        # Of a token that stands in several segments the last counts: their states are the same.
        order[places] = np.arange(len(places))
        return to_device(order[:-1], self.cu_seqlens.device)

    @cached_property
    def _padded(self) -> list[npt.NDArray[np.int64]]:
        starts, lengths = np.asarray(self._borders[:-1]), np.diff(self._borders)
        places = np.append(self._shared.places if self._shared else np.arange(self.tokens), self.tokens)
        # By half a power of two: wider would compute more padding, narrower would make many small calls.
        size = np.floor(np.log2(lengths) * 2)
        found = []
        for each in np.unique(size):
            start, length = starts[size == each, None], lengths[size == each, None]
            offset = np.arange(length.max())
            found.append(places[np.where(offset < length, start + offset, -1)])
        return found


class Scoring(NamedTuple):
    """What a layer does to the scores of its attention before and in the softmax."""

    scale: float | None
    """Factor of the scores; None is one over the root of a head's width."""
    window: int | None = None
    """Tokens that a token attends to, itself included; None for all before it."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    sinks: Tensor | None = None
    """One more score of each head, (heads,), which takes its share of the softmax and has no value."""

    @property
    def is_plain(self) -> bool:
        """Whether fused attention computes it, but for a window."""
        return self.softcap is None and self.sinks is None


def register_attention() -> None:
    """Make `packed_attention` known to transformers; calling it again does nothing."""
    declare_torchvision_operators()
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return causal attention within segments, (1, T, heads, D), of a query (1, heads, T, D).

    Where ranks share the row, query and result have this rank's tokens. Keys and values may have fewer heads (grouped
    queries), values another width. The names of a window, a soft cap and sinks are those of transformers' layers; see
    `Scoring`. Raises ValueError when the borders are missing, a mask arrives, or the model wants dropout: the row would
    be computed as one long sample, and its samples would attend to each other without any error.
    """
    if segments is None:
        raise ValueError("packed attention got no segment borders: samples would attend to each other")
    if attention_mask is not None:
        raise ValueError("packed attention got a mask: borders alone say who sees whom")
    context = segments.context
    if query.shape[0] != 1 or query.shape[2] * (context.size if context else 1) != segments.tokens:
        raise ValueError(f"packed attention got {tuple(query.shape)} for one row of {segments.tokens} tokens")
    if dropout:
        raise ValueError("packed attention has no dropout, but the model asks for it")
    if context:
        key, value = context.repeat_keys(key), context.repeat_keys(value)
        query, key, value = (context.exchange_tokens(states) for states in (query, key, value))
        s_aux = None if s_aux is None else context.own_heads(s_aux)
    scoring = Scoring(scaling, sliding_window, softcap, s_aux)
    fused = scoring.is_plain and query.shape[-1] <= WIDEST_HEAD and has_kernel(query.device, query.dtype)
    attended = (_varlen if fused else _by_segment)(query, key, value, segments, scoring)
    return context.exchange_heads(attended) if context else attended, None


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's variable-length attention can be called; others attend segment by segment."""
    return (device.type, dtype) in VARLEN_KERNELS


def _by_segment(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scoring: Scoring) -> Tensor:
    # (T + 1, heads, D), the last one zero. What pads a segment comes after it, where causal attention never looks.
    padded = [nn.functional.pad(states[0].transpose(0, 1), (0, 0, 0, 0, 0, 1)) for states in (query, key, value)]
    outputs = []
    for places in segments.batches:
        # `index_select`, whose gradient is cheaper than that of an index in brackets.
        flat = [states.index_select(0, places.flatten()) for states in padded]
        q, k, v = (states.unflatten(0, places.shape).transpose(1, 2) for states in flat)
        outputs.append(_attend(q, k, v, scoring).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, segments.order)[None]


def _attend(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Return causal attention, (segments, heads, L, D), of segments of one length L."""
    length, grouped = query.shape[2], query.shape[1] != key.shape[1]
    window = scoring.window if scoring.window is not None and scoring.window < length else None
    if scoring.is_plain and window is None:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scoring.scale, enable_gqa=grouped)
    place = torch.arange(length, device=query.device)
    before = place[:, None] - place
    seen = (before >= 0) & (before < (length if window is None else window))
    if scoring.is_plain:
        return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scoring.scale, enable_gqa=grouped)
    wide, group = torch.promote_types(query.dtype, torch.float32), query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(group, 1) for states in (key, value))
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = query.to(wide) @ key.to(wide).transpose(2, 3) * scale
    if scoring.softcap is not None:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    scores = scores.masked_fill(~seen, float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    return scores.softmax(-1)[..., :length].to(value.dtype) @ value


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scoring: Scoring) -> Tensor:
    # No copy where heads lie beside each other in a token, as they do in front of the transpose of a layer.
    q, k, v = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
    narrow = v.shape[-1]
    if narrow < q.shape[-1]:  # latent attention (MLA); the kernel knows one width
        v = nn.functional.pad(v, (0, q.shape[-1] - narrow))
    if segments.places is not None:
        # Gathered from float32, so that gradients of what segments have in common are added up in it.
        wide = torch.promote_types(k.dtype, torch.float32)
        k, v = (each.to(wide).index_select(0, segments.places).to(each.dtype) for each in (k, v))
    borders, longest = (segments.computed, segments.cu_seqlens), segments.longest
    # The window (-1, 0) is what makes the kernel causal: the last query of a segment sees all its keys.
    window = (-1 if scoring.window is None else scoring.window - 1, 0)
    out = varlen_attn(q, k, v, *borders, longest, longest, scale=scoring.scale, window_size=window, **GROUPED)
    assert isinstance(out, Tensor)
    return out[None, ..., :narrow]


def activate_attention(asked: str, device: torch.device) -> str:
    """Have torch call the version of FlashAttention that `learner.attention` asks for; return its name.

    "auto" takes the best that is installed for this GPU and that computes what it should: the hook of torch and version
    4 are young. Raises LearnerError when another one is asked for that is not to be had.
    """
    restore_flash_attention_impl(_raise_warn=False)
    if device.type != "cuda":
        if asked != "auto":
            raise LearnerError(f"learner.attention is {asked}, which needs CUDA: on the CPU leave it at auto")
        return "segments"
    if asked == "auto":
        fit = BEST_OF.get(torch.cuda.get_device_capability(device)[0], ())
        return next((name for name in fit if _works(name, device)), "fa2")
    if asked != "fa2" and not _works(asked, device):
        raise LearnerError(
            f"learner.attention is {asked}, but {ATTENTION_PACKAGES[asked]} is not installed or does not work "
            "here (the log says more); nothing was loaded. Install it, or leave learner.attention at auto"
        )
    return asked


def _works(name: str, device: torch.device) -> bool:
    """Activate a version of FlashAttention and compare it with attention segment by segment; if it fails, undo that."""
    package = ATTENTION_PACKAGES[name]
    # Of a part of a package that is not there at all it cannot be asked whether it is.
    if find_spec(package.partition(".")[0]) is None or find_spec(package) is None:
        return False
    try:
        activate_flash_attention_impl(name.upper())
        difference = largest_difference(device, torch.bfloat16)
    # Any: a package that compiles itself for this GPU when it is first called raises all kinds.
    except Exception as error:
        difference, problem = float("inf"), f"fails ({type(error).__name__}: {error})"
    else:
        problem = f"differs by {difference:.3g} from attention segment by segment"
    if difference < 0.05:
        return True
    restore_flash_attention_impl(_raise_warn=False)
    _log.warning("%s is installed, but not used for attention: it %s", package, problem)
    return False


def largest_difference(device: torch.device, dtype: torch.dtype) -> float:
    """Return by how much the kernel in `dtype` differs at most from attention in float32, in values and gradients.

    That is computed segment by segment, by plain products: a version of FlashAttention also stands in for torch's other
    fused kernels. On random states of the heads of Qwen3 and segments around the sizes of a kernel's tiles, of which
    two begin alike, without and with sharing that. A share of the largest value; NaN counts as infinite.
    """
    borders = (0, 65, 66, 300, 500)
    token_ids = np.arange(500)
    token_ids[300:430] = token_ids[66:196]
    generator, differences = torch.Generator().manual_seed(0), []
    for shared in (None, shared_prefixes(token_ids, borders)):
        segments = Segments(borders, device, shared=shared)
        size = 1, 16, segments.tokens, 128
        states = [torch.randn(1, heads, *size[2:], generator=generator).to(device, dtype) for heads in (16, 8, 8)]
        weights = torch.randn(size, generator=generator).to(device, dtype).transpose(1, 2)
        found = []
        for attention, precision in ((_varlen, dtype), (_by_segment, torch.float32)):
            q, k, v = leaves = [each.detach().to(precision).requires_grad_() for each in states]
            with sdpa_kernel(SDPBackend.MATH):
                out = attention(q, k, v, segments, Scoring(None))
            found.append([out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)])
        differences += [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True)]
    return float("inf") if any(np.isnan(differences)) else max(differences)
