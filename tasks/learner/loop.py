"""One optimizer step's gradients: forward, loss and backward over the rank's packed rows."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from tasks.learner.distributed import World
from tasks.learner.loss import LossMetrics, Objective, WeightedTokens, token_loss
from tasks.learner.model import PolicyModel, run_row
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
    metrics, statistics = [], []
    for row in batch.on_rank(world.rank):
        row_metrics, row_statistics = _train_row(policy, row, batch.denominators, objective, world, device)
        metrics.append(row_metrics)
        statistics.append(row_statistics)
        beat()
    # Idle rows of a rank (row -1) have no statistics.
    gathered = world.gather((_add_up(metrics), [entry for entry in statistics if entry.row.row >= 0]))
    totals = [part for part, _ in gathered]
    rows = sorted((entry for _, part in gathered for entry in part), key=lambda entry: entry.row.row)
    return _combine(totals), rows


def _train_row(
    policy: PolicyModel,
    row: Row,
    denominators: dict[str, int],
    objective: Objective,
    world: World,
    device: torch.device,
) -> tuple[LossMetrics, RowStatistics]:
    logprobs, entropies = run_row(policy, row, device)
    loss, metrics = token_loss(logprobs, entropies, _tokens(row, device), denominators, objective)
    # Sharded gradients are averaged over ranks; the denominators already make them a sum.
    (loss * world.size).backward()
    masked = _scatter(row, metrics.masked).astype(bool)
    return metrics, RowStatistics(row, _scatter(row, logprobs), _scatter(row, entropies), masked)


def _tokens(row: Row, device: torch.device) -> WeightedTokens:
    names = ("logprobs", "advantages", "rl_weights", "ce_weights", "ref_kl_weights")
    streams = (torch.from_numpy(row.streams[name][row.weighted]).to(device) for name in names)
    segments = torch.from_numpy(np.searchsorted(row.borders, row.weighted, side="right") - 1).to(device)
    return WeightedTokens(*streams, segments=segments, num_segments=len(row.borders) - 1)


def _scatter(row: Row, values: torch.Tensor) -> Array:
    """Return values of the weighted tokens (N,) at their positions in the row (T,)."""
    scattered = np.zeros(len(row.token_ids), np.float32)
    scattered[row.weighted] = values.detach().float().cpu().numpy()
    return scattered


def _add_up(metrics: list[LossMetrics]) -> Totals:
    sums = {name: float(sum(row.sums[name].item() for row in metrics)) for name in metrics[0].sums}
    maxima = {name: _largest(row.maxima[name].item() for row in metrics) for name in metrics[0].maxima}
    return Totals(sums, maxima)


def _combine(parts: list[Totals]) -> Totals:
    return Totals(
        {name: sum(part.sums[name] for part in parts) for name in parts[0].sums},
        {name: _largest(part.maxima[name] for part in parts) for name in parts[0].maxima},
    )


def _largest(values: Iterable[float]) -> float:
    # NaN wherever there is one: max alone would lose it behind a number.
    return float(np.max(list(values)))
