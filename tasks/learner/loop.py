"""One optimizer step's gradients: forward, loss and backward over the rank's packed rows."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from configs.losses import DpoLoss, KtoLoss
from tasks.learner.distributed import World, to_device
from tasks.learner.loss import LossMetrics, Objective, WeightedTokens, loss_alone, token_loss
from tasks.learner.model import PolicyModel, own_tokens, row_loss, run_row
from tasks.learner.preferences import Labels, log_ratios, weigh_samples
from tasks.learner.prefixes import Array
from tasks.learner.rows import PackedBatch, Row, RowPlan, idle_row


@dataclass(frozen=True)
class Totals:
    """Measured sums and maxima of the whole batch, the same on every rank."""

    sums: dict[str, float]
    maxima: dict[str, float]


@dataclass(frozen=True)
class RowStatistics:
    """What was measured on the tokens of a row."""

    row: RowPlan
    logprobs: Array
    """The learner's, float32 (T,); 0 where a token has no weight."""
    entropies: Array
    """The same of entropies, in nats."""
    masked: Array
    """Which rl tokens were masked, bool (T,)."""


MOST_HELD = 1 << 22
"""Tokens, over all ranks, whose statistics are held before they are handed on."""


def accumulate_gradients(
    policy: PolicyModel,
    batch: PackedBatch,
    objective: Objective,
    world: World,
    device: torch.device,
    beat: Callable[[], None] = lambda: None,
    take: Callable[[list[RowStatistics]], None] = lambda statistics: None,
    labels: Labels | None = None,
) -> Totals:
    """Add the batch's gradient to the policy's parameters; return the measured totals.

    The denominators are those of the whole batch, so the gradient does not depend on how samples fall on rows, rows on
    micro-steps, or micro-steps on ranks. `beat` is called after each row. On rank 0 `take` is called with the
    statistics of consecutive rows, those of all ranks, in the order of the batch. With `labels` the loss is one of
    preferences.
    """
    num_ranks = world.size // world.ranks_per_row
    own = batch.on_rank(world.rank // world.ranks_per_row, num_ranks)

    def load(plan: RowPlan | None) -> Row:
        return idle_row() if plan is None else batch.load(plan)

    metrics: list[LossMetrics] = []
    held: list[HeldRow] = []
    weighed = None
    if labels and isinstance(objective.rl, DpoLoss | KtoLoss):
        weighed = weigh_samples(log_ratios(policy, own, load, world, device, beat), labels, objective.rl)
    if policy.router_losses:
        policy.router_losses.total = sum(plan.num_weighted for plan in batch.plan)
    for step, plan in enumerate(own):
        row = weighed.weigh(load(plan), batch.denominators["rl"]) if weighed else load(plan)
        measured = train_row(policy, row, batch.denominators, objective, world, device)
        metrics.append(measured.metrics)
        held.append(HeldRow(plan, row.weighted, measured))
        # The device is given the next row while it is busy with this one, and no more: a beat says that it goes on.
        if len(held) > 1 and (done := held[-2].measured.done):
            done.synchronize()
        beat()
        # After the same step on every rank: all of them know the plan.
        since = batch.plan[num_ranks * (step + 1 - len(held)) : num_ranks * (step + 1)]
        if step + 1 == len(own) or sum(each.num_tokens for each in since) >= MOST_HELD:
            _hand_on(held, world, take)
            held = []
    # Ranks that share a row measure the same of it: one of them counts.
    totals = _combine(world.gather(_add_up(metrics))[:: world.ranks_per_row])
    return replace(totals, sums=totals.sums | dict(weighed.figures)) if weighed else totals


@dataclass(frozen=True)
class HeldRow:
    """A row that was trained, as far as its statistics need it."""

    plan: RowPlan | None
    """None for an idle row, which has no statistics."""
    weighted: Array
    """See `Row.weighted`."""
    measured: "MeasuredRow"


def _hand_on(held: list[HeldRow], world: World, take: Callable[[list[RowStatistics]], None]) -> None:
    """Gather the statistics of the rows that all ranks hold on rank 0, and have them taken there."""
    parts = world.gather_to_first(_statistics(held))
    if parts is not None:
        found = [entry for part in parts[:: world.ranks_per_row] for entry in part]
        take(sorted(found, key=lambda entry: entry.row.row))


@dataclass(frozen=True)
class MeasuredRow:
    """What a row's forward pass measured, on the device."""

    metrics: LossMetrics
    tokens: torch.Tensor
    """Log-probs, entropies and masks of the weighted tokens, float32 (3, N)."""
    done: torch.cuda.Event | None
    """When the row's backward pass is over; None on the CPU."""


def train_row(
    policy: PolicyModel,
    row: Row,
    denominators: dict[str, int],
    objective: Objective,
    world: World,
    device: torch.device,
) -> MeasuredRow:
    """Add a row's gradient to the policy's parameters; return what was measured on the way.

    The loss is computed in the output head's one pass, if it is elementwise; else from log-probs of all tokens.
    """
    tokens = _tokens(row, device)
    if objective.is_elementwise:
        compiled = policy.compiled or _as_it_is
        row_share, own = compiled(loss_alone), tokens.at(own_tokens(policy, row))

        def loss_of(logprobs: torch.Tensor, part: slice) -> torch.Tensor:
            share: torch.Tensor = row_share(logprobs, own.at(part), denominators, objective, world.size)
            return share

        loss, logprobs, entropies = row_loss(policy, row, device, loss_of)
        _, metrics = compiled(token_loss)(logprobs, entropies, tokens, denominators, objective)
    else:
        logprobs, entropies = run_row(policy, row, device)
        share, metrics = token_loss(logprobs, entropies, tokens, denominators, objective)
        loss = share * world.size
    if policy.router_losses:
        of_routers, sums = policy.router_losses.share(len(row.weighted), policy.context)
        loss = loss + of_routers * world.size
        metrics.sums.update(sums)
    # Sharded gradients are averaged over ranks; the denominators already make them a sum.
    loss.backward()
    measured = torch.stack([each.detach().float() for each in (logprobs, entropies, metrics.masked)])
    done = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
    return MeasuredRow(metrics, measured, done)


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _tokens(row: Row, device: torch.device) -> WeightedTokens:
    names = ("logprobs", "advantages", "rl_weights", "ce_weights", "ref_kl_weights")
    logprobs, advantages, rl, ce, ref_kl = (to_device(row.streams[name][row.weighted], device) for name in names)
    segments = to_device(np.searchsorted(row.borders, row.weighted, side="right") - 1, device)
    return WeightedTokens(logprobs, advantages, rl, ce, ref_kl, segments, len(row.borders) - 1)


def _statistics(held: list[HeldRow]) -> list[RowStatistics]:
    """Return the statistics of each row, which are copied from the device all at once."""
    found = torch.cat([each.measured.tokens for each in held], 1).cpu().numpy()
    ends = np.cumsum([len(each.weighted) for each in held])
    statistics = []
    for each, of_row in zip(held, np.split(found, ends[:-1], axis=1), strict=True):
        if each.plan is not None:
            scattered = np.zeros((3, each.plan.num_tokens), np.float32)
            scattered[:, each.weighted] = of_row
            statistics.append(RowStatistics(each.plan, scattered[0], scattered[1], scattered[2].astype(bool)))
    return statistics


def _add_up(metrics: list[LossMetrics]) -> Totals:
    sums, maxima = (_columns([getattr(row, kind) for row in metrics]) for kind in ("sums", "maxima"))
    return Totals(
        {name: float(sum(values)) for name, values in sums.items()},
        {name: _largest(values) for name, values in maxima.items()},
    )


def _columns(rows: list[dict[str, torch.Tensor]]) -> dict[str, list[float]]:
    """Return the values of all rows by name, copied from the device all at once."""
    found = torch.stack([torch.stack(list(row.values())) for row in rows], 1).tolist()
    return dict(zip(rows[0], found, strict=True))


def _combine(parts: list[Totals]) -> Totals:
    return Totals(
        {name: sum(part.sums[name] for part in parts) for name in parts[0].sums},
        {name: _largest(part.maxima[name] for part in parts) for name in parts[0].maxima},
    )


def _largest(values: Iterable[float]) -> float:
    # NaN wherever there is one: max alone would lose it behind a number.
    return float(np.max(list(values)))
