"""Groups of rollouts of one example, compared with each other, and rewards shaped by length before that."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from configs.algorithms import GroupSection, LengthPenalty, Overlong
from configs.evaluation import passes
from tasks.advantage.algorithms.credit import Credit, GroupedTraces
from tasks.arrays.columns import codes

Values = NDArray[np.float64]

LENGTHS = ["num_output_tokens", "num_input_tokens", "num_turns"]
"""Columns of traces that shaping reads."""


def shape_rewards(reward: Values, code: NDArray[np.int64], traces: pa.Table, settings: GroupSection) -> Values:
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
    passed = np.bincount(code, passes(reward, settings.passing)) / np.bincount(code)
    weighted = np.zeros(len(reward))
    for weight, column in zip((settings.output, settings.input, settings.turns), LENGTHS, strict=True):
        length = traces[column].to_numpy().astype(np.float64)
        longest = np.zeros(len(passed))
        np.maximum.at(longest, code, length)
        weighted += weight * length / np.maximum(longest, 1)[code]  # lengths are whole: below 1 all are 0
    penalty: Values = passed[code] * weighted
    return penalty


def overlong(traces: pa.Table, settings: Overlong) -> Values:
    """Return 0 up to max_tokens - buffer_tokens sampled tokens, the penalty from max_tokens on, a line between them.

    This is the soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13), with its sign turned.
    """
    beyond = traces["num_output_tokens"].to_numpy() - (settings.max_tokens - settings.buffer_tokens)
    penalty: Values = settings.penalty * np.clip(beyond / settings.buffer_tokens, 0, 1)
    return penalty


@dataclass(frozen=True)
class Groups:
    """The kept traces that have a reward, each in its group; one without a reward is in no baseline."""

    members: NDArray[np.int64]
    """Rows of the kept traces that have a reward."""
    code: NDArray[np.int64]
    """Each member's group, as a number from 0."""
    reward: Values
    """Each member's reward, shaped where the settings say so."""
    size: NDArray[np.int64]
    """Members of each group."""

    @classmethod
    def of(cls, kept: GroupedTraces, settings: GroupSection, compared: NDArray[np.int64]) -> "Groups":
        """Return the groups of the kept traces: those with the same number in `compared`, which has one for each."""
        reward = kept.traces["reward"].to_numpy()
        members = np.flatnonzero(~np.isnan(reward))
        # Numbered anew among those with a reward: a gap would be a group of size zero to divide by.
        _, code = np.unique(compared[members], return_inverse=True)
        worth = shape_rewards(reward[members], code, kept.traces.select(LENGTHS).take(members), settings)
        return cls(members, code, worth, np.bincount(code))

    def mean(self, values: Values) -> Values:
        """Return the mean of a value of each member over its group, laid along the members."""
        found: Values = (np.bincount(self.code, values, len(self.size)) / self.size)[self.code]
        return found

    def centred_rewards(self) -> Values:
        """Return each member's reward minus the mean of its group; these add up to zero up to rounding."""
        centred = self.reward - self.mean(self.reward)
        # Large rewards leave a remainder of rounding that division by a small deviation would blow up.
        return centred - self.mean(centred)

    def credit(self, kept: GroupedTraces, baseline: Values, advantage: Values) -> Credit:
        """Return the credit of baselines and advantages of members; a trace without a reward has none."""
        baselines, advantages = (np.full(kept.traces.num_rows, np.nan) for _ in range(2))
        baselines[self.members], advantages[self.members] = baseline, advantage
        return Credit.of_advantages(kept, baselines, advantages)


def by_example(kept: GroupedTraces) -> NDArray[np.int64]:
    """Return the number of each trace's group, all of which is compared; shape [traces]."""
    return codes(kept.traces["group_id"])[0]
