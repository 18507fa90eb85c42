"""The loss of packed rows: three components, each over its own weight stream and its own global token count.

For a token with learner log-prob l, engine log-prob q, ratio r = exp(l - q) and advantage A:

    rl      u_rl  * ( -m A r + kl_tau * (l - q)^2 ) / N_rl
    ce      u_ce  * ( -l )                          / N_ce
    ref_kl  u_ref * ( -A r )                        / N_ref

u are the weights, N the number of weighted tokens in the whole batch, over all rows and ranks. m is the DPPO trust
region on the difference of probabilities: 0 where A > 0 and exp(l) - exp(q) > mask_high, 0 where A < 0 and
exp(q) - exp(l) > mask_low, else 1; m carries no gradient, r and l do. In ref_kl the advantage is the
reverse-KL signal that the advantage stage wrote, log pi_ref - log pi at sampling time: the term is its policy gradient,
without a trust region, so a token cannot have both rl and ref_kl weight.
On a ce token the gradient with respect to l is -u_ce / N_ce: never zero, whatever the engine's log-prob says.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.losses import DppoLoss


@dataclass(frozen=True)
class Tokens:
    """What came with the weighted tokens of a row; all (N,), on the device of the log-probs."""

    engine_logprobs: Tensor
    advantages: Tensor
    rl: Tensor
    ce: Tensor
    ref_kl: Tensor


@dataclass(frozen=True)
class Measured:
    """Detached float64 scalars: `sums` add up over rows and ranks, of `maxima` the largest counts."""

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def token_loss(
    logprobs: Tensor, entropies: Tensor, tokens: Tokens, denominators: dict[str, int], settings: DppoLoss
) -> tuple[Tensor, Measured]:
    """Return the row's share of the batch loss, a scalar with gradient in `logprobs` (N,), and what was measured.

    `denominators` are the token counts of the whole batch for rl, ce and ref_kl; a component without tokens is zero.
    """
    log_ratio = _log_ratio(logprobs, tokens.engine_logprobs, tokens.rl)
    too_high, too_low = outside_trust_region(logprobs, tokens, settings)
    outside = too_high | too_low
    terms = {
        "rl": tokens.rl * (_surrogate(log_ratio, tokens.advantages, ~outside) + settings.kl_tau * log_ratio**2),
        "ce": tokens.ce * -torch.where(tokens.ce != 0, logprobs, 0.0),
        "ref_kl": tokens.ref_kl
        * _surrogate(
            _log_ratio(logprobs, tokens.engine_logprobs, tokens.ref_kl), tokens.advantages, tokens.ref_kl != 0
        ),
    }
    shares = {name: term / max(denominators[name], 1) for name, term in terms.items()}
    loss = sum((share.sum() for share in shares.values()), start=logprobs.new_zeros(()))
    with torch.no_grad():
        measured = _measure(logprobs, entropies, tokens, log_ratio, too_high, too_low)
        measured.sums.update({f"{name}_loss": share.double().sum() for name, share in shares.items()})
    return loss, measured


@torch.no_grad()
def outside_trust_region(logprobs: Tensor, tokens: Tokens, settings: DppoLoss) -> tuple[Tensor, Tensor]:
    """Return which rl tokens rose too far for a positive advantage and which fell too far for a negative one."""
    member = tokens.rl != 0
    difference = logprobs.exp() - torch.where(member, tokens.engine_logprobs, 0.0).exp()
    too_high = member & (tokens.advantages > 0) & (difference > settings.mask_high)
    too_low = member & (tokens.advantages < 0) & (-difference > settings.mask_low)
    return too_high, too_low


def _log_ratio(logprobs: Tensor, engine_logprobs: Tensor, weights: Tensor) -> Tensor:
    """Zero where there is no weight, before any exp: zero times the infinity of a masked token would be NaN."""
    return torch.where(weights != 0, logprobs - engine_logprobs, 0.0)


def _surrogate(log_ratio: Tensor, advantages: Tensor, inside: Tensor) -> Tensor:
    return -torch.where(inside, advantages, 0.0) * torch.where(inside, log_ratio, 0.0).exp()


def _measure(
    logprobs: Tensor, entropies: Tensor, tokens: Tokens, log_ratio: Tensor, too_high: Tensor, too_low: Tensor
) -> Measured:
    rl, ce = tokens.rl != 0, tokens.ce != 0
    exact = log_ratio.double()
    mismatch = torch.expm1(exact) - exact
    nll = torch.where(ce, -logprobs.double(), 0.0)
    sums = {
        "entropy": torch.where(rl, entropies.double(), 0.0).sum(),
        "mismatch_kl": mismatch.sum(),
        "masked_positive": too_high.double().sum(),
        "masked_negative": too_low.double().sum(),
        "positive": (rl & (tokens.advantages > 0)).double().sum(),
        "negative": (rl & (tokens.advantages < 0)).double().sum(),
        "ce_nll": nll.sum(),
    }
    # Zero is a floor of both maxima, so that a row without such tokens changes nothing.
    zero = exact.new_zeros(1)
    return Measured(sums, {"mismatch_kl": torch.cat([zero, mismatch]).max(), "ce_nll": torch.cat([zero, nll]).max()})
