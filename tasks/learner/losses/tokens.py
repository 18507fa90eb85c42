"""The input and output of a loss of the rl component: the rl tokens of a packed row, and a term for each."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from configs.losses import TruncatedImportance
from tasks.learner.losses.sequences import sequence_sums


@dataclass(frozen=True)
class RlTokens:
    """The weighted tokens of a packed row as the rl component sees them; all tensors are (N,).

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

    @cached_property
    def log_ratio(self) -> Tensor:
        """Detached l - q; zero where a token is no member, so that no exp of it can be infinite there."""
        return torch.where(self.member, self.logprobs.detach() - self.engine_logprobs, 0.0)

    @cached_property
    def probability_change(self) -> Tensor:
        """Detached exp(l) - exp(q): by how much the learner gives the token more probability than the engine did."""
        return self.logprobs.detach().exp() - self.engine_logprobs.exp()

    @cached_property
    def sequence_log_ratio(self) -> Tensor:
        """Detached sum of the log ratios of a token's sequence, over its rl tokens: the log of their product."""
        sums = sequence_sums(self.log_ratio, self.segments, self.num_segments)
        return sums[self.segments].to(self.log_ratio.dtype)

    @cached_property
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
