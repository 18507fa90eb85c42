"""Zero advantage: all that are compared with each other earned the same, so comparing them teaches nothing."""

import numpy as np
import pyarrow as pa

from configs.filters import ZeroAdvantageFilter
from configs.run import for_environment
from tasks.arrays.columns import codes, texts
from tasks.arrays.finding import FilterInput, Finding, hits_from


def zero_advantage(material: FilterInput, settings: ZeroAdvantageFilter) -> Finding:
    """Hit the rewarded standing members of every comparison whose rewards spread by no more than the tolerance.

    Compared are the rollouts of one agent in one group, or in one episode where the environment's algorithm says so.
    Environments whose algorithm learns from equal rewards are left alone. Traces that another filter excludes are no
    members here, as they are in no baseline; neither are those without a reward. A member that stands alone has nothing
    to be compared with and is hit.
    """
    rewards = material.traces["reward"].to_numpy()
    environments = texts(material.traces["environment"])
    compares = np.array([not for_environment(material.learns_from_equals, name) for name in environments], np.bool_)
    members = np.flatnonzero(material.standing & ~np.isnan(rewards) & compares)
    code, groups = codes(_comparison_names(material).take(members))
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


def _comparison_names(material: FilterInput) -> "pa.ChunkedArray[pa.StringScalar]":
    """Return, per trace, the name of what it is compared within: group and agent, and maybe episode."""
    columns = (texts(material.traces[name]) for name in ("environment", "group_id", "agent", "episode_id"))
    names = [
        # The unit separator is in no id, so that no two comparisons share a name.
        "\x1f".join(
            (group, agent, episode if agent in (for_environment(material.episode_agents, environment) or ()) else "")
        )
        for environment, group, agent, episode in zip(*columns, strict=True)
    ]
    return pa.chunked_array([pa.array(names, pa.string())])
