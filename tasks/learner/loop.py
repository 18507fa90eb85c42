"""One optimizer step's gradients: forward, loss and backward over the rank's packed rows."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tasks.learner.distributed import World, to_device
from tasks.learner.loss import LossMetrics, Objective, WeightedTokens, loss_alone, token_loss
from tasks.learner.model import PolicyModel, own_tokens, row_loss, run_row
from tasks.learner.rows import Array, PackedBatch, Row


@dataclass(frozen=True)
class Totals:
    """Measured sums and maxima of the whole batch, the same on every rank."""

    sums: dict[str, float]
    maxima: dict[str, float]


@dataclass(frozen=True)
class RowStatistics:
    """Learner log-probs and entropies of a row's tokens, float32 (T,), 0 where a token has no weight, and which rl
    tokens were masked, bool (T,).
    """

    row: Row
    logprobs: Array
    entropies: Array
    masked: Array


def accumulate_gradients(
    policy: PolicyModel,
    batch: PackedBatch,
    objective: Objective,
    world: World,
    device: torch.device,
    beat: Callable[[], None] = lambda: None,
) -> tuple[Totals, list[RowStatistics]]:
    """Add the batch's gradient to the policy's parameters; return the measured totals and every row's statistics.

    The denominators are those of the whole batch, so the gradient does not depend on how samples fall on rows, rows on
    micro-steps, or micro-steps on ranks. `beat` is called after each row.
    """
    rows = batch.on_rank(world.rank // world.ranks_per_row, world.size // world.ranks_per_row)
    measured: list[MeasuredRow] = []
    for row in rows:
        measured.append(train_row(policy, row, batch.denominators, objective, world, device))
        # The device is given the next row while it is busy with this one, and no more: a beat says that it goes on.
        if len(measured) > 1 and (done := measured[-2].done):
            done.synchronize()
        beat()
    # Idle rows of a rank (row -1) have no statistics.
    statistics = [entry for entry in _statistics(rows, measured) if entry.row.row >= 0]
    # Ranks that share a row measure the same of it: one of them counts.
    gathered = world.gather((_add_up([each.metrics for each in measured]), statistics))[:: world.ranks_per_row]
    totals = [part for part, _ in gathered]
    return _combine(totals), sorted((entry for _, part in gathered for entry in part), key=lambda entry: entry.row.row)


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
            return row_share(logprobs, own.at(part), denominators, objective, world.size)

        loss, logprobs, entropies = row_loss(policy, row, device, loss_of)
        _, metrics = compiled(token_loss)(logprobs, entropies, tokens, denominators, objective)
    else:
        logprobs, entropies = run_row(policy, row, device)
        share, metrics = token_loss(logprobs, entropies, tokens, denominators, objective)
        loss = share * world.size
    # Sharded gradients are averaged over ranks; the denominators already make them a sum.
    loss.backward()
    measured = torch.stack([each.detach().float() for each in (logprobs, entropies, metrics.masked)])
    done = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
    return MeasuredRow(metrics, measured, done)


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _tokens(row: Row, device: torch.device) -> WeightedTokens:
    names = ("logprobs", "advantages", "rl_weights", "ce_weights", "ref_kl_weights")
    streams = (to_device(row.streams[name][row.weighted], device) for name in names)
    segments = to_device(np.searchsorted(row.borders, row.weighted, side="right") - 1, device)
    return WeightedTokens(*streams, segments=segments, num_segments=len(row.borders) - 1)


def _statistics(rows: list[Row], measured: list[MeasuredRow]) -> list[RowStatistics]:
    """Return the statistics of each row, which are copied from the device all at once."""
    found = torch.cat([each.tokens for each in measured], 1).cpu().numpy()
    ends = np.cumsum([len(row.weighted) for row in rows])
    statistics = []
    for row, of_row in zip(rows, np.split(found, ends[:-1], axis=1), strict=True):
        scattered = np.zeros((3, len(row.token_ids)), np.float32)
        scattered[:, row.weighted] = of_row
        statistics.append(RowStatistics(row, scattered[0], scattered[1], scattered[2].astype(bool)))
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
