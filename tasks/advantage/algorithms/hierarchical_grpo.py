"""Hierarchical GRPO: in environments where one agent proposes and others solve, each is compared with its peers.

Solvers are compared with the solvers of the same proposed problem, proposers with the other proposals of the group.
"""

from collections.abc import Collection

import numpy as np

from configs.algorithms import HierarchicalGrpoConfig
from tasks.advantage.algorithms.credit import Credit, GroupedTraces
from tasks.advantage.algorithms.groups import Groups
from tasks.arrays.columns import texts
from tasks.arrays.ragged import Integers


def hierarchical_grpo(kept: GroupedTraces, settings: HierarchicalGrpoConfig) -> Credit:
    """Return A = R - mean(R) over the traces of the same agent in the same group, and for `episode_agents` in the same
    episode, with rl weight 1.

    Advantages add up to zero over each comparison group, and so over the whole group too. Only kept rewarded traces are
    in a mean; one that is alone in its comparison group has advantage 0.
    """
    groups = Groups.of(kept, settings, by_seat(kept, settings.episode_agents))
    return groups.credit(kept, groups.mean(groups.reward), groups.centred_rewards())


def by_seat(kept: GroupedTraces, episode_agents: Collection[str]) -> Integers:
    """Return the number of each trace's comparison group; shape [traces]."""
    numbers: dict[tuple[str, str, str], int] = {}
    columns = (texts(kept.traces[name]) for name in ("group_id", "agent", "episode_id"))
    compared = [
        numbers.setdefault((group, agent, episode if agent in episode_agents else ""), len(numbers))
        for group, agent, episode in zip(*columns, strict=True)
    ]
    return np.array(compared, np.int64)
