"""The numbers of many steps' optimizer steps at once: those of the last one of each, and their spread over a step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flows.metrics import mean, update_metrics
from flows.viewer.data.shared_reads import each_once
from flows.viewer.library import Library
from storage.read.lineage import Work

SLICE = ("run", "step", "attempt", "seq")
SPREAD = ("loss", "rl_loss", "ce_loss", "ref_kl_loss", "grad_norm", "entropy", "mismatch_kl", "masked_fraction")
"""What is also told as mean, least and most of all optimizer steps on a batch."""


def update_numbers(library: Library, works: Iterable[Work]) -> dict[str, dict[str, float]]:
    """Return the numbers of trainings by key: `update/loss` as `flows.metrics` has it of the last optimizer step.

    `updates/loss/mean`, `min` and `max` are over all optimizer steps of the batch; `updates/num_tokens` and
    `updates/weighted_tokens` are sums. One look at the table for all that were not read before.
    """
    wanted = {work.identity: work for work in works}

    def read(names: list[tuple[str, ...]]) -> dict[tuple[str, ...], dict[str, float]]:
        rows = library.frames().of([wanted[name] for name in names], "updates").drop(SLICE).collect()
        by_key = rows.sort("key", "update").group_by("key", maintain_order=True)
        made = {key: _numbers(own.drop("key").to_dicts()) for (key,), own in by_key}
        return {name: made[wanted[name].key] for name in names if wanted[name].key in made}

    found = each_once(library, "numbers of updates", list(wanted), read)
    return {wanted[name].key: numbers for name, numbers in found.items()}


def _numbers(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found = update_metrics(rows[-1]) | {"updates": float(len(rows))}
    for name in SPREAD:
        values = [row[name] for row in rows if row[name] is not None]
        if values:
            found[f"updates/{name}/mean"] = mean(values)
            found |= {f"updates/{name}/{word}": _extreme(pick, values) for word, pick in (("min", min), ("max", max))}
    found["updates/num_tokens"] = float(sum(row["num_tokens"] for row in rows))
    found["updates/weighted_tokens"] = float(sum(_weighted(row) for row in rows))
    return found


def _weighted(row: Mapping[str, Any]) -> int:
    """Return the tokens that had a weight: reference KL is of those of the rl component, where there are any."""
    return int(max(row["rl_tokens"], row["ref_kl_tokens"]) + row["ce_tokens"])


def _extreme(pick: Any, values: Sequence[float]) -> float:
    """Return the least or the most; NaN where any of them is, whatever the order."""
    return math.nan if any(math.isnan(value) for value in values) else float(pick(values))
