"""Measures the loss on the tokens of a packed row: sums and maxima that can be combined over rows and ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.learner.losses.tokens import RlTokens, Term

GROUPS = ("", "masked_", "unmasked_")
"""Prefixes of the mismatch over all rl tokens, over the masked ones and over the others."""


@dataclass(frozen=True)
class LossMetrics:
    """Detached float64 scalars: `sums` are added up over rows and ranks, of `maxima` the largest is taken."""

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]
    masked: Tensor
    """Rl tokens outside the trust region, clipped or in a masked sequence; (N,)."""


def measure_loss(
    rl: RlTokens, term: Term, entropies: Tensor, ce_logprobs: Tensor, ref_signal: Tensor, pulled: Term
) -> LossMetrics:
    """Return sums and maxima over a row; `ce_logprobs` and `ref_signal` are zero on tokens of other components.

    Mismatch is r - 1 - log r, an unbiased, non-negative estimate of the KL divergence of engine and learner
    (Schulman 2020, "Approximating KL Divergence", k3).
    """
    exact = rl.log_ratio.double()
    mismatch = torch.expm1(exact) - exact
    nll = -ce_logprobs.double()
    positive, negative = rl.member & (rl.advantages > 0), rl.member & (rl.advantages < 0)
    sums = {
        "entropy": torch.where(rl.member, entropies.double(), 0.0).sum(),
        "positive": _count(positive),
        "negative": _count(negative),
        "masked": _count(term.masked),
        "masked_positive": _count(term.masked & positive),
        "masked_negative": _count(term.masked & negative),
        "truncated": _count(term.truncated),
        "ce_nll": nll.sum(),
        "ref_kl": -ref_signal.double().sum(),
        "ref_kl_masked": _count(pulled.masked),
    }
    maxima = {"ce_nll": _largest(nll)}
    for group, member in zip(GROUPS, (rl.member, term.masked, rl.member & ~term.masked), strict=True):
        values = torch.where(member, mismatch, 0.0)
        sums |= {f"{group}mismatch_kl": values.sum(), f"{group}mismatch_kl_squared": (values**2).sum()}
        maxima[f"{group}mismatch_kl"] = _largest(values)
    return LossMetrics(sums, maxima, term.masked)


def _count(flags: Tensor) -> Tensor:
    return flags.double().sum()


def _largest(values: Tensor) -> Tensor:
    # All values here are at least 0, so a row without such tokens does not change the maximum.
    return torch.cat([values.new_zeros(1), values]).max()
