"""Sums, and smallest and largest values, over the sequences of a packed row, without a loop over them."""

import math

import torch
from torch import Tensor

from configs.losses import SequenceMask


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
