"""Metrics of the optimizer steps of a step. What was not measured has no entry."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tasks.metrics.figures import mean

_NOT_NUMBERS = ("policy_key_in", "weights_sha256_in", "weights_sha256", "metrics")
SPREAD = (
    *("loss", "rl_loss", "ce_loss", "ref_kl_loss", "grad_norm", "entropy", "mismatch_kl", "masked_fraction"),
    "learning_rate",
)
"""What is also reported as mean, least and most of all optimizer steps on a batch."""


def update_metrics(updates: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of the rows of `updates` of one step, in the order of the updates; none of no rows.

    `update/loss` is of the last optimizer step, further metrics of the learner included. `updates` counts them;
    `updates/loss/mean`, `min` and `max` are over all of them; `updates/num_tokens` and `updates/weighted_tokens` are
    sums.
    """
    if not updates:
        return {}
    found = _of_last(updates[-1]) | {"updates": float(len(updates))}
    for name in SPREAD:
        values = [row[name] for row in updates if row.get(name) is not None]
        if values:
            found[f"updates/{name}/mean"] = mean(values)
            found |= {f"updates/{name}/min": _extreme(min, values), f"updates/{name}/max": _extreme(max, values)}
    found["updates/num_tokens"] = float(sum(row["num_tokens"] for row in updates))
    found["updates/weighted_tokens"] = float(sum(_num_weighted(row) for row in updates))
    return found


def _of_last(update: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an optimizer step.

    Those further ones that were not finite are null in the JSON, which has no form for them, and NaN here.
    """
    further = json.loads(update.get("metrics") or "{}")
    # As NaN they stay visible: null alone would read as not measured.
    further |= dict.fromkeys(further.pop("not_finite", ()), math.nan)
    values = {name: value for name, value in update.items() if name not in _NOT_NUMBERS} | further
    return {f"update/{name}": float(value) for name, value in values.items() if isinstance(value, (int, float))}


def _num_weighted(row: Mapping[str, Any]) -> int:
    """Return the tokens that had a weight: reference KL is of those of the rl component, where there are any."""
    return int(max(row["rl_tokens"], row["ref_kl_tokens"]) + row["ce_tokens"])


def _extreme(pick: Callable[[Iterable[float]], float], values: Sequence[float]) -> float:
    """Return the least or the most; NaN where any of them is, whatever the order."""
    return math.nan if any(math.isnan(value) for value in values) else float(pick(values))
