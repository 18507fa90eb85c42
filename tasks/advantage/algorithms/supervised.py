"""Supervised: raise the likelihood of the tokens that the mask names, whatever reward they brought."""

from dataclasses import replace

import numpy as np

from configs.algorithms import SupervisedConfig
from tasks.advantage.algorithms.credit import Credit, GroupedTraces


def supervised(kept: GroupedTraces, settings: SupervisedConfig) -> Credit:
    """Return weight 1 in the cross-entropy component on masked tokens; there is no advantage and no baseline."""
    return weighted_on_mask(kept)


def weighted_on_mask(kept: GroupedTraces) -> Credit:
    """Return what every algorithm does that imitates the tokens which the mask names."""
    return replace(Credit.none(kept), ce=kept.mask.values.astype(np.float32))
