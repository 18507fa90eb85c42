"""MaxRL: a group's gradient is that of the log of its pass rate, so that hard examples count for more.

Tajwar et al. 2026, "Maximum likelihood reinforcement learning" (arXiv 2602.02710).
"""

import numpy as np

from configs.algorithms import MaxRlConfig
from tasks.advantage.algorithms.credit import Credit, GroupedTraces
from tasks.advantage.algorithms.groups import Groups, by_example


def max_rl(kept: GroupedTraces, settings: MaxRlConfig) -> Credit:
    """Return A = (R - m) / m, with m the group's mean reward, and 0 where m is not above zero; rl weight 1.

    A mean that is no larger than what rounding leaves of rewards that cancel out, each other or with what shaping takes
    off them, counts as zero: dividing by it would give advantages of 1e16. Members of a group, and traces without a
    reward, are as in grpo.
    """
    groups = Groups.of(kept, settings, by_example(kept))
    mean = groups.mean(groups.reward)
    scale = np.abs(groups.reward) + np.abs(kept.traces["reward"].to_numpy()[groups.members])
    # A sum of n rewards is rounded n times, and shaping and the mean a few times more.
    rounding = (groups.size[groups.code] + 8) * np.finfo(np.float64).eps * groups.mean(scale)
    advantage = np.divide(groups.centred_rewards(), mean, out=np.zeros(len(mean)), where=mean > rounding)
    return groups.credit(kept, mean, advantage)
