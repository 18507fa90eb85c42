"""REINFORCE++ with a group baseline: rewards less their group's mean, on one scale for the whole batch.

Hu et al. 2025, "REINFORCE++: stabilizing critic-free policy optimization with global advantage normalization"
(arXiv 2501.03262), the variant with baseline.
"""

from dataclasses import replace

import numpy as np

from configs.algorithms import ReinforcePpConfig
from tasks.advantage.algorithms.credit import Credit, GroupedTraces
from tasks.advantage.algorithms.groups import Groups, by_example


def reinforce_pp(kept: GroupedTraces, settings: ReinforcePpConfig) -> Credit:
    """Return A = (A' - mean(A')) / (std(A') + epsilon) with A' = R - m, m the group's mean reward; rl weight 1.

    Mean and population deviation of A' are over all kept rewarded traces of the environment, every group included, or
    with statistics `tokens` over their sampled tokens, as in verl (`masked_whiten` in verl/utils/torch_functional.py,
    there with the sample deviation and an epsilon of 1e-8 under the root). Each group's A' adds up to zero: over
    rollouts their mean is what rounding left, over tokens it is what long rollouts have more of than short ones.
    Members of a group, and traces without a reward, are as in grpo.
    """
    groups = Groups.of(kept, settings, by_example(kept))
    centred = groups.centred_rewards()
    by_token = settings.statistics == "tokens"
    weights = kept.num_sampled[groups.members] if by_token else np.ones(len(centred))
    if weights.sum():  # the mean of nothing is a warning and NaN
        mean = np.average(centred, weights=weights)
        deviation = np.sqrt(np.average((centred - mean) ** 2, weights=weights))
        centred = (centred - mean) / (deviation + settings.epsilon)
    return replace(groups.credit(kept, groups.mean(groups.reward), centred), zero_sum=not by_token)
