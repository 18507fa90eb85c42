"""How fast an optimizer step was: seconds by part, floating-point operations, their share of the peak, memory."""

import re
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasks.learner.model import PolicyModel
from tasks.learner.rows import Row, RowPlan
from tasks.learner.shards import EXPERTS

PEAKS: dict[str, float] = tomllib.loads(Path(__file__).with_name("peaks.toml").read_text("utf-8"))
"""Dense bfloat16 operations a second in 10^12, by words of a device's name."""
NAMES = (
    *("seconds_gradients", "seconds_optimizer", "tokens_per_second", "tflops", "tflops_per_second", "mfu"),
    *("peak_allocated_gib", "peak_reserved_gib", "seconds_writing"),
    *("proof_logprobs", "proof_gradient", "seconds_proof"),
)
"""What is measured of an optimizer step. It is another number each time, where all else follows from the batch.

Of writing the policy, and the optimizer's state where that is saved, has only the last step on a batch; the last three
(`tasks.learner.proof`) has the first step after a policy was loaded."""


@dataclass(frozen=True)
class Cost:
    """Floating-point operations of training, without those that are done again to save memory.

    A product of a matrix costs two for each number in it going forward, as much for the gradient of its input and,
    where it is trained, as much again for its own. Causal attention computes half of two products of n x n scores a
    segment. Element-wise work is left out, as in every share of a peak.
    """

    token: float
    """For each token: the matrices of the layers."""
    pair: float
    """For each segment of n tokens, times n squared: attention of all layers."""
    weighted: float
    """For each token with weight: the output head, which no other has."""
    shares: bool
    """Whether what segments have in common is computed once."""

    def of(self, rows: Iterable[Row | RowPlan]) -> float:
        """Return the operations of packed rows."""
        found = 0.0
        for row in rows:
            lengths = np.diff(row.borders).astype(np.float64)
            shared = lengths - np.diff(row.once) if self.shares else 0 * lengths
            found += self.token * float((lengths - shared).sum()) + self.weighted * row.num_weighted
            found += self.pair * float((lengths**2 - shared**2).sum())
        return found


def training_cost(policy: PolicyModel) -> Cost | None:
    """Return what a policy costs, of experts those that a token uses; None for layers with other than matrices.

    None too where attention is not that of the formula: layers with a window, or with keys of another width.
    """
    layers, config = policy.layers(), policy.causal.config.get_text_config()
    # Biases of experts have two dimensions.
    parameters = [parameter for name, parameter in layers.named_parameters() if not name.endswith("bias")]
    experts = [parameter for name, parameter in layers.named_parameters() if EXPERTS in name and parameter.ndim == 3]
    others = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "kv_lora_rank"))
    if any(others) or sum(parameter.ndim > 2 for parameter in parameters) > len(experts):
        return None
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    head = policy.causal.get_output_embeddings().weight
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    of_tokens = sum(_each(matrix) for matrix in matrices)
    of_tokens += sum(_each(matrix) * config.num_experts_per_tok / matrix.shape[0] for matrix in experts)
    return Cost(of_tokens, 6.0 * len(layers) * width, _each(head), policy.shares_prefixes)


def _each(matrix: torch.Tensor) -> float:
    return (6.0 if matrix.requires_grad else 4.0) * matrix.numel()


@dataclass
class StepTimer:
    """Takes the time of the parts of an optimizer step on one device."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each part that has ended, as `seconds_PART`."""

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._last = time.perf_counter()

    def end(self, part: str) -> None:
        """End a part: what passed since the one before is its time. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[f"seconds_{part}"], self._last = now - self._last, now

    def figures(self, rows: Iterable[Row | RowPlan], cost: Cost | None, processes: int) -> dict[str, float | None]:
        """Return the figures by NAMES but the last four, of all rows of the step; null is what cannot be known here."""
        rows = list(rows)
        seconds = sum(self.seconds.values())
        flops = cost.of(rows) if cost else None
        rate = flops / seconds / processes if flops is not None else None
        peak = device_peak(self.device)
        return {
            **self.seconds,
            "tokens_per_second": sum(row.num_tokens for row in rows) / seconds,
            "tflops": flops / 1e12 if flops is not None else None,
            "tflops_per_second": rate / 1e12 if rate is not None else None,
            "mfu": rate / peak if rate is not None and peak else None,
            **_peak_memory(self.device),
        }


def device_peak(device: torch.device) -> float | None:
    """Return the bfloat16 operations that a device can do in a second; None where they are not known."""
    if device.type != "cuda":
        return None
    words = _words(torch.cuda.get_device_name(device))
    name = max((name for name in PEAKS if _words(name) <= words), key=lambda name: len(_words(name)), default="")
    return PEAKS[name] * 1e12 or None if name else None


def _words(name: str) -> set[str]:
    return set(re.findall(r"\w+", name))


def _peak_memory(device: torch.device) -> dict[str, float | None]:
    measured: dict[str, Any] = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    peaks = {kind: measured.get(f"{kind}_bytes.all.peak") for kind in ("allocated", "reserved")}
    return {f"peak_{kind}_gib": peak / 2**30 if peak is not None else None for kind, peak in peaks.items()}
