"""Shaping: what is subtracted from a reward for length, before rollouts are compared."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from configs.algorithms import GroupSection, LengthPenalty, Overlong

Values = NDArray[np.float64]

LENGTHS = ["num_output_tokens", "num_input_tokens", "num_turns"]
"""Columns of traces that shaping reads."""


def shaped(reward: Values, code: NDArray[np.int64], traces: pa.Table, settings: GroupSection) -> Values:
    """Return the rewards that baselines and advantages are of; without shaping these are `reward` itself.

    `traces` has a row for each reward, and `code` says which are compared with each other, as numbers from 0 without a
    gap. Both penalties go by the raw reward, so that neither changes what the other subtracts.
    """
    found = reward
    if settings.length_penalty is not None:
        found = found - length_penalty(reward, code, traces, settings.length_penalty)
    if settings.overlong is not None:
        found = found - overlong(traces, settings.overlong)
    return found


def length_penalty(reward: Values, code: NDArray[np.int64], traces: pa.Table, settings: LengthPenalty) -> Values:
    """Return pass rate * sum of weight * length / longest of the group, over sampled tokens, tokens fed in and turns.

    The pass rate is the share of the group with at least the passing reward: where few pass, length is no matter yet.
    A length that is zero in the whole group adds nothing.
    """
    passed = np.bincount(code, reward >= settings.passing) / np.bincount(code)
    weighted = np.zeros(len(reward))
    for weight, column in zip((settings.output, settings.input, settings.turns), LENGTHS, strict=True):
        length = traces[column].to_numpy().astype(np.float64)
        longest = np.zeros(len(passed))
        np.maximum.at(longest, code, length)
        weighted += weight * length / np.maximum(longest, 1)[code]
    penalty: Values = passed[code] * weighted
    return penalty


def overlong(traces: pa.Table, settings: Overlong) -> Values:
    """Return 0 up to max_tokens - buffer_tokens sampled tokens, the penalty from max_tokens on, a line between them.

    This is the soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13), with its sign turned.
    """
    beyond = traces["num_output_tokens"].to_numpy() - (settings.max_tokens - settings.buffer_tokens)
    penalty: Values = settings.penalty * np.clip(beyond / settings.buffer_tokens, 0, 1)
    return penalty
