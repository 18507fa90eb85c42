"""SFT from a teacher: raise the likelihood of what a frozen model sampled in the environment, whatever it earned.

Tokens in, tokens out: the teacher shares the policy's tokenizer, so its tokens are trained on as they are. Which of its
rollouts are kept (the best, say) is the filters' affair.
"""

from configs.algorithms import SftConfig
from tasks.advantage.algorithms.credit import Credit, GroupedTraces
from tasks.advantage.algorithms.supervised import weighted_on_mask


def sft(kept: GroupedTraces, settings: SftConfig) -> Credit:
    """Return weight 1 in the cross-entropy component on the teacher's tokens; no advantage and no baseline."""
    return weighted_on_mask(kept)
