"""The loss of packed rows: three components, each over its own weight stream and its own global token count.

For a token with learner log-prob l, engine log-prob q, ratio r = exp(l - q), weight u and column `advantages` A:

    rl      k u_rl  * ( T + kl_tau * (l - q)^2 ) / N_rl
    ce        u_ce  * ( -l )                     / N_ce
    ref_kl    u_ref * ( -m_s s r )               / N_ref

N is the number of weighted tokens in the whole update, over all rows and ranks. T is one of the losses of
tasks/learner/losses, by `training.loss.type`, each in its file with its source; m is a mask of 0 and 1:

    dppo    -m A r   m = 0 where A > 0 and exp(l) - exp(q) > mask_high, or A < 0 and exp(q) - exp(l) > mask_low
    ipo     -m A r   m = 0 where |exp(l) - exp(q)| > threshold
    ppo     -min(A r, A clip(r, 1 - clip_low, 1 + clip_high)), at most -A dual_clip where A < 0
    cispo   -A sg(clip(r, 1 - clip_low, 1 + clip_high)) l
    gspo    -min(A s_t, A clip(s_t, 1 - clip_low, 1 + clip_high)),  s_t = sg(S) exp(l - sg(l)),
            S = exp(mean of l - q over the sequence's rl tokens)
    custom  what the function gives

sg stops the gradient; masks and signals have none, r and l do. With `tis` the weight of the gradient is another one:
r, or s_t, is min(R, cap) exp(l - sg(l)) wherever it multiplies A, R the token's ratio or the product of the ratios of
the sequence's rl tokens; trust regions and clips are judged on the loss' own ratio as before (in cispo the weight that
is clipped is min(R, cap)). k is 0 on the tokens of sequences outside `sequence_mask`, else 1: it takes the squared log
ratio too. Masked tokens and sequences stay in N, which is known before the forward pass. A sequence is a packed
segment, one sample; tokens that two branches of a trace share have weight in one of them only.

ref_kl is the reverse KL to a reference by its policy gradient. A is log pi_ref - q, from sampling time; the signal is
the live one, s = A - sg(l - q) = log pi_ref - l. m_s is a one-sided trust region: 0 where s > 0 and
exp(l) - exp(q) > mask_high, or s < 0 and exp(q) - exp(l) > mask_low. A token cannot have both rl and ref_kl weight.
Source: on-policy distillation (Agarwal et al. 2024, arXiv 2306.13649; Lu et al. 2025, "On-Policy Distillation"), with
the trust region of dppo.
On a ce token the gradient with respect to l is -u_ce / N_ce: never zero, whatever the engine's log-prob says.

An infinite r on a token that is neither masked nor truncated gives an infinite gradient, at which the step stops.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from configs.losses import LossConfig, RefKlConfig, is_elementwise
from tasks.learner.losses import LOSSES
from tasks.learner.losses.importance import surrogate
from tasks.learner.losses.tokens import RlTokens, Term, sequences_within_bounds

GROUPS = ("", "masked_", "unmasked_")
"""Prefixes of the mismatch over all rl tokens, over the masked ones and over the others."""


@dataclass(frozen=True)
class WeightedTokens:
    """The streams of a row at its weighted tokens; all (N,), on the device of the log-probs."""

    engine_logprobs: Tensor
    advantages: Tensor
    rl: Tensor
    ce: Tensor
    ref_kl: Tensor
    segments: Tensor
    """The number of the packed segment that a token belongs to, int64; 0-based."""
    num_segments: int

    def at(self, part: slice) -> "WeightedTokens":
        """Return some of the tokens."""
        return WeightedTokens(
            self.engine_logprobs[part],
            self.advantages[part],
            self.rl[part],
            self.ce[part],
            self.ref_kl[part],
            segments=self.segments[part],
            num_segments=self.num_segments,
        )


@dataclass(frozen=True)
class Objective:
    """What is minimised: the loss of the rl component, and the trust region of ref_kl."""

    rl: LossConfig
    ref_kl: RefKlConfig = field(default_factory=RefKlConfig)

    @property
    def is_elementwise(self) -> bool:
        """Whether the loss of a token depends on no other token."""
        return is_elementwise(self.rl)


@dataclass(frozen=True)
class LossMetrics:
    """Detached float64 scalars: `sums` are added up over rows and ranks, of `maxima` the largest is taken."""

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]
    masked: Tensor
    """Rl tokens outside the trust region, clipped or in a masked sequence; (N,)."""


def token_loss(
    logprobs: Tensor, entropies: Tensor, tokens: WeightedTokens, denominators: dict[str, int], objective: Objective
) -> tuple[Tensor, LossMetrics]:
    """Return the row's share of the batch loss, a scalar with gradient in `logprobs` (N,), and its metrics.

    `denominators` are the token counts of the whole batch for rl, ce and ref_kl; a component without tokens is zero.
    """
    rl, term = rl_term(logprobs, tokens, objective.rl)
    signal, pulled = ref_kl_term(logprobs, tokens, objective.ref_kl)
    shares = _shares(logprobs, tokens, term, pulled, denominators)
    loss = sum((share.sum() for share in shares.values()), start=logprobs.new_zeros(()))
    with torch.no_grad():
        losses = {f"{name}_loss": share.double().sum() for name, share in shares.items()}
        metrics = measure_loss(rl, term, entropies, torch.where(tokens.ce != 0, logprobs, 0.0), signal, pulled)
        metrics.sums.update(losses)
    return loss, metrics


def loss_alone(
    logprobs: Tensor, tokens: WeightedTokens, denominators: dict[str, int], objective: Objective, factor: int
) -> Tensor:
    """Return `factor` times the loss of `token_loss`, without metrics; of a part of a row, where it is elementwise."""
    (_, term), (_, pulled) = rl_term(logprobs, tokens, objective.rl), ref_kl_term(logprobs, tokens, objective.ref_kl)
    shares = _shares(logprobs, tokens, term, pulled, denominators)
    return sum((share.sum() for share in shares.values()), start=logprobs.new_zeros(())) * factor


def _shares(
    logprobs: Tensor, tokens: WeightedTokens, term: Term, pulled: Term, denominators: dict[str, int]
) -> dict[str, Tensor]:
    """Return each token's share of the loss by component, (N,)."""
    terms = {
        "rl": tokens.rl * term.values,
        "ce": tokens.ce * -torch.where(tokens.ce != 0, logprobs, 0.0),
        "ref_kl": tokens.ref_kl * pulled.values,
    }
    # A component without tokens has no weights, too: its share is zero over one.
    return {name: values / max(denominators[name], 1) for name, values in terms.items()}


def rl_term(logprobs: Tensor, tokens: WeightedTokens, settings: LossConfig) -> tuple[RlTokens, Term]:
    """Return the rl tokens, and their loss before weights and denominator, sequences masked."""
    rl = _members(logprobs, tokens, tokens.rl != 0, settings)
    term = LOSSES[settings.type](rl, settings)
    drift = rl.logprobs - rl.engine_logprobs
    values, masked = term.values + settings.kl_tau * drift**2, term.masked
    if settings.sequence_mask is not None:
        kept = sequences_within_bounds(rl.log_ratio, rl.member, rl.segments, rl.num_segments, settings.sequence_mask)
        values, masked = torch.where(kept, values, 0.0), masked | (rl.member & ~kept)
    return rl, Term(values, masked, term.truncated)


def ref_kl_term(logprobs: Tensor, tokens: WeightedTokens, settings: RefKlConfig) -> tuple[Tensor, Term]:
    """Return the detached signal log pi_ref - l, zero on other tokens, and the loss before weights and denominator."""
    pulled = _members(logprobs, tokens, tokens.ref_kl != 0)
    signal = torch.where(pulled.member, pulled.advantages - pulled.log_ratio, 0.0)
    too_high = (signal > 0) & (pulled.probability_change > settings.mask_high)
    too_low = (signal < 0) & (-pulled.probability_change > settings.mask_low)
    return signal, surrogate(replace(pulled, advantages=signal), too_high | too_low)


def _members(logprobs: Tensor, tokens: WeightedTokens, member: Tensor, settings: LossConfig | None = None) -> RlTokens:
    return RlTokens(
        # Where a token is no member both log-probs are the same constant: ratio one, no gradient, never NaN.
        torch.where(member, logprobs, logprobs.detach()),
        torch.where(member, tokens.engine_logprobs, logprobs.detach()),
        torch.where(member, tokens.advantages, 0.0),
        member,
        tokens.segments,
        tokens.num_segments,
        settings.tis if settings is not None else None,
    )


def measure_loss(
    rl: RlTokens, term: Term, entropies: Tensor, ce_logprobs: Tensor, ref_signal: Tensor, pulled: Term
) -> LossMetrics:
    """Return sums and maxima over a row; `ce_logprobs` and `ref_signal` are zero on tokens of other components.

    Mismatch is r - 1 - log r, an unbiased, non-negative estimate of the KL divergence of engine and learner
    (Schulman 2020, "Approximating KL Divergence", k3).
    """
    # In float64: for ratios near one the terms cancel to a number far below the rounding of float32.
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
