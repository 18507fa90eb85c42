"""GRPO: a rollout is worth what it earned beyond the mean of its group (Shao et al. 2024, "DeepSeekMath")."""

import numpy as np

from configs.sections import GrpoConfig
from tasks.algorithms.credit import AdvantageBreach, Credit, Kept
from tasks.columns import codes, texts


def grpo(kept: Kept, settings: GrpoConfig) -> Credit:
    """Return A = R - mean(R) over the group's kept rewarded traces, on every sampled token with rl weight 1.

    With `normalise_std`, A is divided by the population standard deviation plus epsilon. Members of a baseline are
    exactly the traces that are trained: errored, cancelled and filtered ones are not among them, so that a group's
    advantages add up to zero. A trace without a reward, which is not a reward of zero, gets no advantage and no weight.
    Raises AdvantageBreach if a group mixes agents: rewards of different seats are not comparable.
    """
    _refuse_several_agents(kept)
    reward = kept.traces["reward"].to_numpy()
    members = np.flatnonzero(~np.isnan(reward))
    code, groups = codes(kept.traces["group_id"].take(members))
    num_groups = len(groups)
    size = np.bincount(code, minlength=num_groups)
    mean = np.bincount(code, reward[members], num_groups) / size
    centred = reward[members] - mean[code]
    # Large rewards leave a remainder of rounding that division by a small deviation would blow up.
    centred -= (np.bincount(code, centred, num_groups) / size)[code]
    if settings.normalise_std:
        deviation = np.sqrt(np.bincount(code, centred**2, num_groups) / size)
        centred = centred / (deviation[code] + settings.epsilon)
    baseline, advantage = np.full(len(reward), np.nan), np.full(len(reward), np.nan)
    baseline[members], advantage[members] = mean[code], centred
    credited = ~np.isnan(advantage)[kept.owner[kept.mask.row_of_value]]
    zero = np.zeros(len(kept.mask.values), np.float32)
    weights = (kept.mask.values & credited).astype(np.float32)
    return Credit(baseline=baseline, advantage=advantage, rl=weights, ce=zero, ref_kl=zero)


def _refuse_several_agents(kept: Kept) -> None:
    seat_of: dict[str, str] = {}
    for group, seat in zip(texts(kept.traces["group_id"]), texts(kept.traces["agent"]), strict=True):
        if seat_of.setdefault(group, seat) != seat:
            raise AdvantageBreach(
                f"table traces, column agent: group {group} holds trainable agents {seat_of[group]!r} and {seat!r}, "
                "whose rewards 'grpo' would average. Nothing was trained; all that was sampled is safe. Choose an "
                "algorithm with a baseline per agent, or make one seat trainable."
            )
