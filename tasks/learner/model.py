"""The policy: a causal language model that returns log-probs and entropies of selected tokens of a packed row."""

import inspect
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from configs.training import TrainingConfig
from tasks.learner import adapters
from tasks.learner.adapters import Adapter
from tasks.learner.distributed import shard
from tasks.learner.head import default_chunk, token_logprobs
from tasks.learner.protocol import LearnerError
from tasks.learner.rows import Row

ATTENTION = "packed_segments"
"""The name under which transformers knows `packed_attention`."""
HEAD_TOLERANCE = 1e-3
"""Largest difference of log-probs between the head applied here and the model's own."""


@dataclass(frozen=True)
class Segments:
    """Borders of a packed row's segments: as numbers, and as an int32 tensor (segments + 1,) on the device."""

    borders: tuple[int, ...]
    on_device: Tensor

    @property
    def longest(self) -> int:
        """Length of the longest segment."""
        return max(end - start for start, end in zip(self.borders, self.borders[1:], strict=False))

    @cached_property
    def batches(self) -> list[Tensor]:
        """Places in the row of the tokens of segments of about one length, int64 (segments, longest of these).

        After the end of a shorter one stands T, which is no place in a row of T tokens.
        """
        starts, lengths = np.asarray(self.borders[:-1]), np.diff(self.borders)
        # By half a power of two: wider would compute more padding, narrower would make many small calls.
        size = np.floor(np.log2(lengths) * 2)
        found = []
        for each in np.unique(size):
            start, length = starts[size == each, None], lengths[size == each, None]
            offset = np.arange(length.max())
            found.append(torch.from_numpy(np.where(offset < length, start + offset, self.borders[-1])))
        return [places.to(self.on_device.device) for places in found]

    @cached_property
    def order(self) -> Tensor:
        """Where each token of the row is among `batches`, one after the other and flat; int64 (T,)."""
        places = torch.cat([places.flatten() for places in self.batches])
        order = torch.empty(self.borders[-1] + 1, dtype=torch.int64, device=places.device)
        order[places] = torch.arange(len(places), device=places.device)
        return order[:-1]


class PolicyModel(nn.Module):
    """A causal model whose output head is applied to selected tokens only.

    The head is used inside `forward`, where a sharded weight is gathered; tied and untied heads are alike here.
    """

    def __init__(self, causal: Any, chunk: int, adapter: Adapter | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.chunk = chunk
        self.adapter = adapter
        """Trained in place of the weights, if not None."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, segments: Segments, selected: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies (N,) of the tokens at `selected` (N,), given those before them.

        `token_ids` and `positions` are one packed row (T,); `temperatures` (N,) belong to the selected tokens. No
        selected token may be the first of its segment.
        """
        hidden = self.causal.get_decoder()(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, segments=segments
        ).last_hidden_state[0]
        weight = self.causal.get_output_embeddings().weight
        return token_logprobs(hidden[selected - 1], weight, token_ids[selected], temperatures, self.chunk)


def load_policy(
    directory: Path, settings: TrainingConfig, device: torch.device, adapter: Adapter | None = None
) -> PolicyModel:
    """Return the policy in `directory`, or `adapter` over its base; float32 master weights, sharded over the ranks.

    Raises LearnerError when the directory is no complete model or the model's head is more than a linear map.
    """
    causal = _load_causal(adapter.base_directory if adapter else directory)
    if adapter:
        adapters.attach(causal, adapter)
    chunk = settings.logprob_chunk or default_chunk(causal.config.get_text_config().vocab_size)
    policy = PolicyModel(causal.to(device), chunk, adapter)
    # Before the model is sharded: it is called from within here, past the hooks that gather sharded weights.
    _check_head(policy, device)
    if settings.gradient_checkpointing:
        _enable_checkpointing(causal, settings, device)
    _switch_off_dropout(policy)
    # Layers recompute their activations in training mode alone; dropout is off by now.
    policy.train()
    shard(policy, _layers(causal), device, half=computes_in_half(settings, device))
    return policy


def computes_in_half(settings: TrainingConfig, device: torch.device) -> bool:
    """Whether forward and backward run in bfloat16; "auto" does on CUDA only."""
    return settings.dtype == "bfloat16" or (settings.dtype == "auto" and device.type == "cuda")


def run_row(policy: PolicyModel, row: Row, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (N,) of the row's weighted tokens at the row's temperatures."""
    segments = Segments(row.borders, torch.tensor(row.borders, dtype=torch.int32, device=device))
    token_ids, positions, selected, temperatures = (
        torch.from_numpy(array).to(device)
        for array in (row.token_ids, row.positions(), row.weighted, row.streams["temperatures"][row.weighted])
    )
    logprobs, entropies = policy(token_ids, positions, segments, selected, temperatures)
    return logprobs, entropies


def _load_causal(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    register_attention()
    if not (directory / "config.json").is_file() or not any(directory.glob("*.safetensors")):
        raise LearnerError(
            f"{directory} is not a model directory: it needs config.json and *.safetensors; nothing was loaded"
        )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=False,  # no code that lies beside weights is run
            use_safetensors=True,  # and nothing is unpickled
            output_loading_info=True,
        )
    # Any: transformers, safetensors and the json parser raise all kinds for a damaged or unknown model.
    except Exception as error:
        raise LearnerError(
            f"{directory} cannot be loaded ({type(error).__name__}: {error}); nothing was loaded"
        ) from error
    causal, report = loaded
    wrong = {name: sorted(map(str, report[name])) for name in ("missing_keys", "unexpected_keys") if report.get(name)}
    if wrong:
        raise LearnerError(f"{directory} does not hold the model that its config.json describes: {wrong}")
    causal.config.use_cache = False
    return causal


@torch.no_grad()
def _check_head(policy: PolicyModel, device: torch.device) -> None:
    """Compare with the model's own logits: some families scale or cap them, or add a bias, after the head."""
    # A short text is enough: what a family does to its logits, it does to all of them.
    size = min(8, policy.causal.config.get_text_config().vocab_size)
    token_ids = torch.arange(size, device=device)
    segments = Segments((0, size), torch.tensor((0, size), dtype=torch.int32, device=device))
    selected = torch.arange(1, size, device=device)
    ours, _ = policy(token_ids, token_ids, segments, selected, torch.ones(size - 1, device=device))
    logits = policy.causal(
        input_ids=token_ids[None], position_ids=token_ids[None], use_cache=False, segments=segments
    ).logits[0, :-1]
    theirs = logits.float().log_softmax(-1).gather(1, selected[:, None]).squeeze(1)
    difference = float((ours - theirs).abs().max())
    if not difference < HEAD_TOLERANCE:
        raise LearnerError(
            f"{type(policy.causal).__name__} changes its logits after the output head (log-probs differ by "
            f"{difference:.3g}): this family cannot be trained here"
        )


def _enable_checkpointing(causal: Any, settings: TrainingConfig, device: torch.device) -> None:
    """Let every n-th layer store its input only, and recompute its activations in the backward pass."""
    causal.gradient_checkpointing_enable(
        {"use_reentrant": False},
        every_n_layers=settings.checkpoint_every,
        # On the CPU there is nowhere to offload to.
        offload=settings.offload_activations and device.type != "cpu",
    )


def _layers(causal: Any) -> nn.ModuleList:
    """Return the decoder's stack of layers: the longest list of modules in it."""
    stacks = [child for child in causal.get_decoder().children() if isinstance(child, nn.ModuleList)]
    assert stacks, f"{type(causal).__name__} has no stack of layers"
    return max(stacks, key=len)


def _switch_off_dropout(policy: nn.Module) -> None:
    """Set dropout to zero: the log-probs of the update must be those of the published policy."""
    for module in policy.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def register_attention() -> None:
    """Make the function known to transformers; calling it again does nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)


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
    arrives, or the model wants a window, soft cap, sinks or dropout, none of which is computed here: the row would be
    computed as one long sample, and its samples would attend to each other without any error.
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
    # (T + 1, heads, D), the last one zero. What pads a segment comes after it, where causal attention never looks.
    padded = [nn.functional.pad(states[0].transpose(0, 1), (0, 0, 0, 0, 0, 1)) for states in (query, key, value)]
    outputs = []
    for places in segments.batches:
        # `index_select`, whose gradient is cheaper than that of an index in brackets.
        flat = [states.index_select(0, places.flatten()) for states in padded]
        q, k, v = (states.unflatten(0, places.shape).transpose(1, 2) for states in flat)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, segments.order)[None]


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
