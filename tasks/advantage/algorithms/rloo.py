"""RLOO: a rollout is worth what it earned beyond the mean of the others of its group.

Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; for language models Ahmadian et al. 2024,
"Back to basics", equation 8.
"""

import numpy as np

from configs.algorithms import RlooConfig
from tasks.advantage.algorithms.credit import Credit, GroupedTraces
from tasks.advantage.algorithms.groups import Groups, by_example


def rloo(kept: GroupedTraces, settings: RlooConfig) -> Credit:
    """Return A_i = R_i - mean of R_j over j != i, which is n / (n - 1) times what grpo gives, with rl weight 1.

    Members of a group, and traces without a reward, are as in grpo. A rollout that is alone in its group has nothing to
    be compared with: it gets no advantage and no weight.
    """
    groups = Groups.of(kept, settings, by_example(kept))
    size = groups.size[groups.code].astype(np.float64)
    # NaN in place of a division by zero: it makes the advantage none.
    others = np.where(size > 1, size - 1, np.nan)
    advantage = groups.centred_rewards() * size / others
    return groups.credit(kept, groups.reward - advantage, advantage)
