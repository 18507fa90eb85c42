"""On-policy self-distillation: draw the policy to itself, shown a demonstration that it did not see when it sampled.

Source: self-distillation from demonstrations (SDFT), arXiv 2601.19897. What is shown is a system message before the
conversation; the policy's own tokens follow verbatim, and are scored by the policy that sampled them.
"""

from configs.algorithms import OpsdConfig
from tasks.advantage.algorithms.credit import Credit, GroupedTraces
from tasks.advantage.algorithms.opd import drawn_to_reference


def opsd(kept: GroupedTraces, settings: OpsdConfig) -> Credit:
    """Return log pi(.|demonstration) - log pi_engine on sampled tokens, as the reference-KL signal with weight 1.

    Rewards are not looked at. Raises AdvantageBreach if a sampled token was not scored.
    """
    return drawn_to_reference(kept, settings.type)
