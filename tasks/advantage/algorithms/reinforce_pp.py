"""REINFORCE++ with a group baseline: rewards less their group's mean, on one scale for the whole batch.

Hu et al. 2025, "REINFORCE++: stabilizing critic-free policy optimization with global advantage normalization"
(arXiv 2501.03262), the variant with baseline.
"""

from configs.algorithms import ReinforcePpConfig
from tasks.advantage.algorithms.credit import Credit, GroupedTraces
from tasks.advantage.algorithms.groups import Groups, by_example


def reinforce_pp(kept: GroupedTraces, settings: ReinforcePpConfig) -> Credit:
    """Return A = (A' - mean(A')) / (std(A') + epsilon) with A' = R - m, m the group's mean reward; rl weight 1.

    Mean and population deviation of A' are over all kept rewarded traces of the environment, every group included.
    Each group's A' adds up to zero, so that their mean is what rounding left. Members of a group, and traces without a
    reward, are as in grpo.
    """
    groups = Groups.of(kept, settings, by_example(kept))
    centred = groups.centred_rewards()
    if len(centred):  # the mean of nothing is a warning and NaN
        centred = (centred - centred.mean()) / (centred.std() + settings.epsilon)
    return groups.credit(kept, groups.mean(groups.reward), centred)
