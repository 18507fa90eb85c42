"""Dr. GRPO: GRPO without its two biases, the division by the deviation and the one by a rollout's own length.

Liu et al. 2025, "Understanding R1-Zero-like training: a critical perspective" (arXiv 2503.20783), section 3.2.
"""

from configs.algorithms import DrGrpoConfig
from tasks.advantage.algorithms.credit import Credit, GroupedTraces
from tasks.advantage.algorithms.groups import Groups, by_example


def dr_grpo(kept: GroupedTraces, settings: DrGrpoConfig) -> Credit:
    """Return A = R - mean(R) over the group, with rl weight 1; what grpo gives without `normalise_std`.

    `length_normaliser` is the loss's share of it: packing counts every rollout as that many tokens of the rl
    denominator. Members of a group, and traces without a reward, are as in grpo.
    """
    groups = Groups.of(kept, settings, by_example(kept))
    return groups.credit(kept, groups.mean(groups.reward), groups.centred_rewards())
