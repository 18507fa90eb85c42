"""Preferences: the best and the worst rollout of a group are a pair, for the losses dpo and kto."""

from dataclasses import replace

import numpy as np

from configs.algorithms import PreferencesConfig
from tasks.advantage.algorithms.credit import Credit, GroupedTraces
from tasks.advantage.algorithms.opd import reference_signal
from tasks.arrays.columns import codes


def preferences(kept: GroupedTraces, settings: PreferencesConfig) -> Credit:
    """Return advantage 1 for the first of a group's best rollouts, -1 for the first of its worst, and none for others.

    The signal of their tokens is log pi_ref - log pi_engine. A group of equal rewards has no pair. Raises
    AdvantageBreach if a sampled token was not scored.
    """
    reward, (groups, names) = kept.traces["reward"].to_numpy(), codes(kept.traces["group_id"])
    advantage = np.full(len(reward), np.nan)
    for group in range(len(names)):
        members = np.flatnonzero((groups == group) & ~np.isnan(reward))
        if len(members) and np.ptp(reward[members]):
            advantage[members[[reward[members].argmax(), reward[members].argmin()]]] = 1, -1
    credit = Credit.of_advantages(kept, np.full_like(advantage, np.nan), advantage)
    return replace(credit, signal=credit.rl * reference_signal(kept, settings.type))
