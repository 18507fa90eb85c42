"""On-policy distillation: draw the policy to a reference, on the tokens that the policy sampled itself.

With `opd` that is a frozen teacher: R. Agarwal et al., On-Policy Distillation of Language Models, arXiv 2306.13649,
with the reverse KL. With `opsd` it is the policy itself, shown a demonstration that it did not see when it sampled:
self-distillation from demonstrations (SDFT), arXiv 2601.19897. What is shown is a system message before the
conversation; the policy's own tokens follow verbatim, and are scored by the policy that sampled them.
"""

from dataclasses import replace

import numpy as np

from configs.algorithms import OpdConfig, OpsdConfig
from tasks.advantage.algorithms.credit import AdvantageBreach, Credit, GroupedTraces, Weights
from tasks.arrays.ragged import Ragged


def opd(kept: GroupedTraces, settings: OpdConfig | OpsdConfig) -> Credit:
    """Return reference-KL weight 1 on sampled tokens, with the signal log pi_ref - log pi_engine of each, in nats.

    There is no advantage and no baseline: rewards are not looked at. The mean of the signal over what the policy
    samples is minus the reverse KL of the policy from the reference. Raises AdvantageBreach if a sampled token was not
    scored.
    """
    weights = kept.mask.values.astype(np.float32)
    return replace(Credit.none(kept), ref_kl=weights, signal=reference_signal(kept, settings.type))


def reference_signal(kept: GroupedTraces, algorithm: str) -> Weights:
    """Return log pi_ref - log pi_engine of each sampled token, 0 of others; raise AdvantageBreach if one is missing."""
    mask = kept.mask.values
    scored = np.full(len(mask), np.nan, np.float32) if kept.references is None else kept.references.values
    unscored = np.flatnonzero(mask & np.isnan(scored))
    if len(unscored):
        message = int(kept.mask.row_of_value[unscored[0]])
        raise AdvantageBreach(
            f"table references, column logprobs: {len(unscored)} sampled tokens have no log-prob under the reference, "
            f"first of message {kept.messages['message'][message]} of trace {kept.messages['trace_id'][message]}; "
            f"algorithm {algorithm} needs all of them. Nothing was trained; all that was sampled is safe. Run the "
            "stage reference again."
        )
    engine = Ragged.of(kept.messages["logprobs"]).values
    return np.where(mask, scored - engine, np.float32(0)).astype(np.float32)
