"""On-policy distillation: draw the policy to a frozen teacher, on the tokens that the policy sampled itself.

Source: R. Agarwal et al., On-Policy Distillation of Language Models, arXiv 2306.13649, with the reverse KL.
"""

from configs.algorithms import OpdConfig
from tasks.advantage.algorithms.credit import Credit, GroupedTraces
from tasks.advantage.algorithms.references import drawn_to_reference


def opd(kept: GroupedTraces, settings: OpdConfig) -> Credit:
    """Return log pi_teacher - log pi_engine on sampled tokens, as the reference-KL signal with weight 1.

    Rewards are not looked at. Raises AdvantageBreach if a sampled token was not scored by the teacher.
    """
    return drawn_to_reference(kept, settings.type)
