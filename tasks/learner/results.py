"""Builds what optimizer steps report: rows of `updates`, and `token_statistics` and `token_masks` as one table."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from storage.schemas.stage_tables import TOKEN_MASKS, TOKEN_STATISTICS
from tasks.learner.loop import RowStatistics, Totals
from tasks.learner.loss_metrics import GROUPS
from tasks.learner.rows import COMPONENTS, PackedBatch

QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
"""The quantiles of the importance ratio that are reported."""


@dataclass(frozen=True)
class Measurements:
    """The measurements of one optimizer step; `grad_norm` is before clipping."""

    learning_rate: float
    grad_norm: float
    clipped: bool
    totals: Totals
    statistics: list[RowStatistics]
    threads: int
    processes: int


def update_rows(
    common: dict[str, Any],
    batches: list[PackedBatch],
    measurements: list[Measurements],
    digests: list[str],
    save_optimizer: bool,
) -> list[dict[str, Any]]:
    """Return the rows of `updates`, one for each optimizer step, with `metrics` as a dictionary and `common` columns.

    `digests` are those of the weights before each step and after the last. Optimizer state belongs to the last only.
    """
    last = len(batches) - 1
    return [
        {
            **common,
            "update": number,
            "weights_sha256_in": digests[number],
            "weights_sha256": digests[number + 1],
            "has_optimizer": save_optimizer and number == last,
            **_update_row(batches[number], measurements[number]),
        }
        for number in range(len(batches))
    ]


def _update_row(batch: PackedBatch, measurements: Measurements) -> dict[str, Any]:
    """Means are over rl tokens, and null when there are none."""
    totals, counts = measurements.totals, batch.denominators
    losses = {f"{name}_loss": totals.sums[f"{name}_loss"] for name in COMPONENTS}
    samples = [row for row in batch.rows if row.sample_ids]
    return {
        "learning_rate": measurements.learning_rate,
        "loss": sum(losses.values()),
        **losses,
        "grad_norm": measurements.grad_norm,
        "entropy": _share(totals.sums["entropy"], counts["rl"]),
        "mismatch_kl": _share(totals.sums["mismatch_kl"], counts["rl"]),
        "mismatch_kl_max": totals.maxima["mismatch_kl"] if counts["rl"] else None,
        "masked_fraction": _share(totals.sums["masked"], counts["rl"]),
        "num_rows": len(samples),
        "num_tokens": sum(len(row.token_ids) for row in samples),
        **{f"{name}_tokens": counts[name] for name in COMPONENTS},
        "metrics": _other_metrics(measurements, counts),
    }


def statistics_table(statistics: list[RowStatistics]) -> pa.Table:
    """Return `token_statistics` with a column `masked` beside them, which is the table `token_masks`.

    One row for each sample, in the order of rows and of samples in them; padding rows give none.
    """
    parts: dict[str, list[Any]] = {"sample_id": [], "logprobs": [], "entropies": [], "masked": []}
    for entry in statistics:
        borders = entry.row.borders
        for sample_id, start, end in zip(entry.row.sample_ids, borders, borders[1:], strict=False):
            parts["sample_id"].append(sample_id)
            for name in ("logprobs", "entropies", "masked"):
                parts[name].append(getattr(entry, name)[start:end])
    return pa.table(parts, schema=TOKEN_STATISTICS.arrow.append(TOKEN_MASKS.arrow.field("masked")))


def _other_metrics(measurements: Measurements, counts: dict[str, int]) -> dict[str, Any]:
    """Return the metrics that have no column.

    A value that is not finite is null, because JSON cannot hold it, and is named in `not_finite`: null alone would read
    as "not measured".
    """
    sums, maxima = measurements.totals.sums, measurements.totals.maxima
    metrics = {
        "clipped": measurements.clipped,
        # Recorded because sums are rounded in another order with another number of either: weights then agree, but not
        # to the last bit.
        "threads": measurements.threads,
        "processes": measurements.processes,
        "masked_fraction_positive": _share(sums["masked_positive"], sums["positive"]),
        "masked_fraction_negative": _share(sums["masked_negative"], sums["negative"]),
        "truncated_fraction": _share(sums["truncated"], counts["rl"]),
        **_mismatch(measurements.totals, counts["rl"]),
        **ratio_quantiles(measurements.statistics),
        "ce_nll_mean": _share(sums["ce_nll"], counts["ce"]),
        "ce_nll_max": maxima["ce_nll"] if counts["ce"] else None,
        "ref_kl_mean": _share(sums["ref_kl"], counts["ref_kl"]),
        "ref_kl_masked_fraction": _share(sums["ref_kl_masked"], counts["ref_kl"]),
    }
    missing = [name for name, value in metrics.items() if value is not None and not math.isfinite(value)]
    return metrics | dict.fromkeys(missing) | ({"not_finite": missing} if missing else {})


def _mismatch(totals: Totals, num_rl: int) -> dict[str, float | None]:
    """Return mean, standard deviation and maximum of the mismatch by group; mean and maximum over all are columns."""
    num_masked = totals.sums["masked"]
    metrics: dict[str, float | None] = {}
    for group, count in zip(GROUPS, (num_rl, num_masked, num_rl - num_masked), strict=True):
        name = f"{group}mismatch_kl"
        mean, square = _share(totals.sums[name], count), _share(totals.sums[f"{name}_squared"], count)
        variance = None if mean is None or square is None else square - mean * mean
        # Rounding may leave a variance just below zero.
        metrics[f"{name}_std"] = variance if variance is None or math.isnan(variance) else math.sqrt(max(variance, 0.0))
        if group:
            metrics |= {f"{name}_mean": mean, f"{name}_max": totals.maxima[name] if count else None}
    return metrics


def ratio_quantiles(statistics: list[RowStatistics]) -> dict[str, float | None]:
    """Return quantiles of the importance ratio over all rl tokens of an update, exactly; null without any."""
    parts = [np.zeros(0)]
    for entry in statistics:
        member = entry.row.streams["rl_weights"] != 0
        parts.append(entry.logprobs[member].astype(np.float64) - entry.row.streams["logprobs"][member])
    log_ratios = np.concatenate(parts)
    names = [f"ratio_q{quantile:g}" for quantile in QUANTILES]
    if not log_ratios.size:
        return dict.fromkeys(names)
    with np.errstate(over="ignore", invalid="ignore"):
        return dict(zip(names, np.quantile(np.exp(log_ratios), QUANTILES).tolist(), strict=True))


def _share(total: float, count: float) -> float | None:
    return total / count if count else None
