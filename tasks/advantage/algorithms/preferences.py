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
    reward, (group, names) = kept.traces["reward"].to_numpy(), codes(kept.traces["group_id"])
    advantage = np.full(len(reward), np.nan)
    for number in range(len(names)):
        members = np.flatnonzero((group == number) & ~np.isnan(reward))
        if len(members) and np.ptp(reward[members]):
            advantage[members[reward[members].argmax()]] = 1.0
            advantage[members[reward[members].argmin()]] = -1.0
    credit = Credit.of_advantages(kept, np.full(len(reward), np.nan), advantage)
    signal = np.where(credit.rl != 0, reference_signal(kept, settings.type), np.float32(0))
    return replace(credit, signal=signal)
