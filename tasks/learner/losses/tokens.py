"""The input and output of a loss of the rl component: the rl tokens of a packed row, and a term for each."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.losses import SequenceMask, TruncatedImportance


def sequence_sums(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """Return the sum of `values` (N,) over each sequence, float64 (num_segments,): thousands of small log ratios."""
    return values.new_zeros(num_segments, dtype=torch.float64).index_add_(0, segments, values.double())


def sequences_within_bounds(
    log_ratio: Tensor, member: Tensor, segments: Tensor, num_segments: int, settings: SequenceMask
) -> Tensor:
    """Return which tokens (N,) belong to a sequence whose mismatch is within bounds.

    `log_ratio` is zero where a token is no `member`. Source: rejection of sequences by the geometric mean of their
    ratios, or by their worst token (Liu et al. 2025, "When Speed Kills Stability"; Li et al. 2025, arXiv 2512.23075).
    """
    if settings.ratio == "geometric":
        counts = sequence_sums(member, segments, num_segments).clamp(min=1)
        smallest = largest = sequence_sums(log_ratio, segments, num_segments) / counts
    else:
        smallest = _extreme(log_ratio, member, segments, num_segments, "amin")
        largest = _extreme(log_ratio, member, segments, num_segments, "amax")
    within = torch.ones_like(smallest, dtype=torch.bool)
    if settings.low is not None:
        within &= smallest >= math.log(settings.low)
    if settings.high is not None:
        within &= largest <= math.log(settings.high)
    return within[segments]


def _extreme(log_ratio: Tensor, member: Tensor, segments: Tensor, num_segments: int, reduction: str) -> Tensor:
    # A sequence without members keeps the start value, which is within all bounds: none of its tokens counts.
    start = math.inf if reduction == "amin" else -math.inf
    values = torch.where(member, log_ratio, start)
    return values.new_full((num_segments,), start).scatter_reduce(0, segments, values, reduction)


@dataclass(frozen=True)
class RlTokens:
    """The weighted tokens of a packed row as the rl component sees them; all tensors are (N,).

    Properties are computed where they are read, which compiled losses can do and a cached property's lock forbids.
    Tokens of other components are among them: they are no `member`, and their values are ignored.
    """

    logprobs: Tensor
    """The learner's log-probs l, with gradient where a token is a member."""
    engine_logprobs: Tensor
    """The engine's log-probs q; those of the learner, detached, where a token is no member."""
    advantages: Tensor
    """Zero where a token is no member."""
    member: Tensor
    """Which tokens have rl weight."""
    segments: Tensor
    """The number of the sequence that a token belongs to: a packed segment, that is one sample; 0-based."""
    num_segments: int
    tis: TruncatedImportance | None = None
    """The cap on importance weights, see `importance_weights`."""

    @property
    def log_ratio(self) -> Tensor:
        """Detached l - q; zero where a token is no member, so that no exp of it can be infinite there."""
        return torch.where(self.member, self.logprobs.detach() - self.engine_logprobs, 0.0)

    @property
    def probability_change(self) -> Tensor:
        """Detached exp(l) - exp(q): by how much the learner gives the token more probability than the engine did."""
        return self.logprobs.detach().exp() - self.engine_logprobs.exp()

    @property
    def sequence_log_ratio(self) -> Tensor:
        """Detached sum of the log ratios of a token's sequence, over its rl tokens: the log of their product."""
        sums = sequence_sums(self.log_ratio, self.segments, self.num_segments)
        return sums[self.segments].to(self.log_ratio.dtype)

    @property
    def mean_log_ratio(self) -> Tensor:
        """Detached mean of the log ratios of a token's sequence: the log of their geometric mean; zero without any."""
        sums = sequence_sums(self.log_ratio, self.segments, self.num_segments)
        counts = sequence_sums(self.member, self.segments, self.num_segments)
        return (sums / counts.clamp(min=1))[self.segments].to(self.log_ratio.dtype)


@dataclass(frozen=True)
class Term:
    """A loss on every token, before weights and denominator; (N,)."""

    values: Tensor
    """The term to be minimised, with gradient."""
    masked: Tensor
    """Members whose surrogate has no gradient: outside the trust region, or clipped."""
    truncated: Tensor
    """Members whose importance weight was cut down."""
