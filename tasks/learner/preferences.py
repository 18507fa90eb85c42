"""Preferences: what a sample's log-prob weighs in the DPO and KTO losses, from the log ratios of whole sequences.

Both losses are functions of S, the sum over a sequence's sampled tokens of l - log pi_ref, l the learner's log-prob:

    dpo   -log sigmoid(m) (1 - e) - log sigmoid(-m) e     m = beta (S_chosen - S_rejected), e the label smoothing; the
                                                          mean over pairs (Rafailov et al. 2023, arXiv 2305.18290)
    kto   w (1 - sigmoid(beta (S - z)))  of a chosen sequence, w (1 - sigmoid(beta (z - S))) of a rejected one;
          z = max(0, mean of S), w its desirable_weight or undesirable_weight; the mean over sequences
          (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8; z is a constant for the gradient)

The sequences of a pair may lie in different rows, on different ranks. So a pass without gradient sums S over the whole
update first; then dL/dS is a number for each sequence, and the gradient of the loss is that of sum(dL/dS l), a weight
on log-probs. That is exact, however samples fall on rows and rows on ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from configs.losses import DpoLoss, KtoLoss
from tasks.learner.distributed import World
from tasks.learner.model import PolicyModel, run_row
from tasks.learner.rows import Row, RowPlan

FIGURES = ("preference_accuracy", "preference_margin")
"""What is measured of an update: the share of pairs whose chosen sequence has the greater S, and the mean of m."""
Labels = Mapping[str, tuple[str, float]]
"""By sample the group in which it is compared, and 1 where its trace was chosen, -1 where it was rejected."""


@dataclass(frozen=True)
class WeighedSamples:
    """The derivatives of an update's loss, and what is measured of it."""

    slopes: Mapping[str, float]
    """By sample dL/dS; 0 of one that is compared with nothing."""
    figures: Mapping[str, float]
    """The loss as rl_loss, and FIGURES."""

    def weigh(self, row: Row, num_tokens: int) -> Row:
        """Return the row with -dL/dS times `num_tokens`, by which the loss is divided, in place of its advantages."""
        slopes = [-num_tokens * self.slopes.get(name, 0.0) for name in row.sample_ids] or [0.0]
        advantages = np.repeat(np.array(slopes, np.float32), np.diff(row.borders))
        return replace(row, streams={**row.streams, "advantages": advantages})


def log_ratios(
    policy: PolicyModel,
    rows: Sequence[RowPlan | None],
    load: Callable[[RowPlan | None], Row],
    world: World,
    device: torch.device,
    beat: Callable[[], None],
) -> dict[str, float]:
    """Return S of each sample of all ranks' rows, by sample; the signal of a token is log pi_ref minus its engine's."""
    found: dict[str, float] = {}
    for plan in rows:
        row = load(plan)
        with torch.no_grad():
            logprobs, _ = run_row(policy, row, device)
        reference = row.streams["logprobs"].astype(np.float64) + row.streams["advantages"]
        segments = np.searchsorted(row.borders, row.weighted, side="right") - 1
        ratios = logprobs.double().cpu().numpy() - reference[row.weighted]
        found |= zip(row.sample_ids, np.bincount(segments, ratios, len(row.borders) - 1).tolist(), strict=False)
        beat()
    return {name: ratio for part in world.gather(found) for name, ratio in part.items()}


def weigh_samples(ratios: Mapping[str, float], labels: Labels, settings: DpoLoss | KtoLoss) -> WeighedSamples:
    """Return the derivatives of the loss by sample, from S of each; samples of one trace add up."""
    values = torch.tensor([*ratios.values()], dtype=torch.float64, requires_grad=True)
    sums: dict[tuple[str, float], torch.Tensor] = {}
    for name, value in zip(ratios, values, strict=True):
        sums[labels[name]] = sums.get(labels[name], 0.0) + value
    pairs = [
        (ratio, sums[group, -label]) for (group, label), ratio in sums.items() if label > 0 and (group, -label) in sums
    ]
    margins = settings.beta * torch.stack([chosen - rejected for chosen, rejected in pairs] or [0 * values.sum()])
    loss = _dpo(margins, settings) if isinstance(settings, DpoLoss) else _kto(sums, settings)
    loss.backward()
    figures = {"rl_loss": loss, FIGURES[0]: (margins > 0).double().mean(), FIGURES[1]: margins.mean()}
    slopes = dict(zip(ratios, values.grad.tolist(), strict=True))  # type: ignore[union-attr]
    return WeighedSamples(slopes, {name: figure.item() for name, figure in figures.items()})


def _dpo(margins: torch.Tensor, settings: DpoLoss) -> torch.Tensor:
    smoothing = settings.label_smoothing
    return -((1 - smoothing) * logsigmoid(margins) + smoothing * logsigmoid(-margins)).mean()


def _kto(sums: Mapping[tuple[str, float], torch.Tensor], settings: KtoLoss) -> torch.Tensor:
    ratios = torch.stack([*sums.values()])
    signs = ratios.new_tensor([label for _, label in sums])
    weights = ratios.new_tensor([settings.desirable_weight, settings.undesirable_weight])[(signs < 0).long()]
    baseline = ratios.detach().mean().clamp(min=0)
    return (weights * (1 - torch.sigmoid(signs * settings.beta * (ratios - baseline)))).mean()
