"""Supervised: raise the likelihood of the tokens that the mask names, whatever reward they brought.

With `sft` these are what a frozen teacher sampled in the environment. It shares the policy's tokenizer, so its tokens
are trained on as they are. Which of its rollouts are kept (the best, say) is the filters' affair.
"""

from dataclasses import replace

import numpy as np

from configs.algorithms import SftConfig, SupervisedConfig
from tasks.advantage.algorithms.credit import Credit, GroupedTraces


def supervised(kept: GroupedTraces, settings: SupervisedConfig | SftConfig) -> Credit:
    """Return weight 1 in the cross-entropy component on masked tokens; there is no advantage and no baseline."""
    return replace(Credit.none(kept), ce=kept.mask.values.astype(np.float32))
