"""Zero advantage: all members of a group earned the same, so comparing them teaches nothing."""

import numpy as np

from configs.sections import ZeroAdvantageFilter
from tasks.columns import codes
from tasks.filters.finding import Finding, Material, hits_from


def zero_advantage(material: Material, settings: ZeroAdvantageFilter) -> Finding:
    """Hit the rewarded standing members of every group whose rewards spread by no more than the tolerance.

    Traces that another filter excludes are no members here, as they are in no baseline; neither are those without a
    reward. A member that stands alone has nothing to be compared with and is hit.
    """
    rewards = material.traces["reward"].to_numpy()
    members = np.flatnonzero(material.standing & ~np.isnan(rewards))
    code, groups = codes(material.traces["group_id"].take(members))
    num_groups = len(groups)
    lowest, highest = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(lowest, code, rewards[members])
    np.maximum.at(highest, code, rewards[members])
    spread, size = highest - lowest, np.bincount(code, minlength=num_groups)
    evidence = {
        int(row): {"spread": float(spread[group]), "reward": float(rewards[row]), "members": int(size[group])}
        for row, group in zip(members, code, strict=True)
        if spread[group] <= settings.tolerance
    }
    return hits_from(evidence, len(rewards))
