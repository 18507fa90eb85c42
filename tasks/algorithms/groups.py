"""Groups: the rewarded rollouts that are compared with each other; what baselines of groups have in common."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.algorithms import GroupSection
from tasks.algorithms.credit import Credit, Kept
from tasks.algorithms.shaping import LENGTHS, Values, shaped
from tasks.columns import codes


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
    def of(cls, kept: Kept, settings: GroupSection, compared: NDArray[np.int64]) -> "Groups":
        """Return the groups of the kept traces: those with the same number in `compared`, which has one for each."""
        reward = kept.traces["reward"].to_numpy()
        members = np.flatnonzero(~np.isnan(reward))
        _, code = np.unique(compared[members], return_inverse=True)
        worth = shaped(reward[members], code, kept.traces.select(LENGTHS).take(members), settings)
        return cls(members, code, worth, np.bincount(code))

    def mean(self, values: Values) -> Values:
        """Return the mean of a value of each member over its group, laid along the members."""
        found: Values = (np.bincount(self.code, values, len(self.size)) / self.size)[self.code]
        return found

    def centred(self) -> Values:
        """Return each member's reward minus the mean of its group; these add up to zero up to rounding."""
        centred = self.reward - self.mean(self.reward)
        # Large rewards leave a remainder of rounding that division by a small deviation would blow up.
        return centred - self.mean(centred)

    def credit(self, kept: Kept, baseline: Values, advantage: Values) -> Credit:
        """Return the credit of baselines and advantages of members: rl weight 1 on every sampled token of a trace that
        has an advantage; NaN, and a trace without a reward, is none and gets no weight."""
        baselines, advantages = (np.full(kept.traces.num_rows, np.nan) for _ in range(2))
        baselines[self.members], advantages[self.members] = baseline, advantage
        credited = ~np.isnan(advantages)[kept.owner[kept.mask.row_of_value]]
        zero = np.zeros(len(kept.mask.values), np.float32)
        weights = (kept.mask.values & credited).astype(np.float32)
        return Credit(baselines, advantages, rl=weights, ce=zero, ref_kl=zero)


def by_example(kept: Kept) -> NDArray[np.int64]:
    """Return the number of each trace's group, all of which is compared; shape [traces]."""
    return codes(kept.traces["group_id"])[0]
