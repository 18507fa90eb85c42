"""GRPO: a rollout is worth what it earned beyond the mean of its group (Shao et al. 2024, "DeepSeekMath")."""

import numpy as np

from configs.algorithms import GrpoConfig
from tasks.advantage.algorithms.credit import Credit, GroupedTraces
from tasks.advantage.algorithms.groups import Groups, by_example


def grpo(kept: GroupedTraces, settings: GrpoConfig) -> Credit:
    """Return A = R - mean(R) over the group's kept rewarded traces, on every sampled token with rl weight 1.

    With `normalise_std`, A is divided by the population standard deviation plus epsilon. Members of a baseline are
    exactly the traces that are trained: errored, cancelled and filtered ones are not among them, so that a group's
    advantages add up to zero. A trace without a reward, which is not a reward of zero, gets no advantage and no weight.
    """
    groups = Groups.of(kept, settings, by_example(kept))
    advantage = groups.centred_rewards()
    if settings.normalise_std:
        advantage = advantage / (np.sqrt(groups.mean(advantage**2)) + settings.epsilon)
    return groups.credit(kept, groups.mean(groups.reward), advantage)
