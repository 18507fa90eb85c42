"""Metrics of the engines that sampled a step: sums, rates and latencies over all that they counted meanwhile.

A step may be sampled in several intervals, because the engine was lost or the run was killed. Rates are over the
seconds of all of them, and hold across restarts of an engine, whose counters begin at zero again.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise

import pyarrow as pa

from tasks.inference.engine.metrics import GAUGES, HISTOGRAMS

SUMS = ("prompt_tokens", "generation_tokens", "requests", "preemptions", "restarts", "failed_readings")
RATES = ("prompt_tokens", "generation_tokens", "requests")
QUANTILES = {"p50": 0.5, "p95": 0.95}


def engine_metrics(rows: pa.Table) -> dict[str, float]:
    """Return the metrics of all engines together by name, from the rows of `engine_metrics`; none of no rows.

    Counts are summed. Of what is as it is at a moment there are the mean of all readings and the greatest of them.
    """
    found: dict[str, list[float]] = defaultdict(list)
    seconds: dict[str, float] = {}
    for row in rows.to_pylist():
        found[row["name"]].append(row["value"])
        if row["name"] == "seconds":  # engines of one interval work at the same time
            seconds[row["interval"]] = max(seconds.get(row["interval"], 0.0), row["value"])
    sums = {name: sum(values) for name, values in found.items()}
    made = dict(_sums_and_rates(sums, sum(seconds.values())))
    for name in GAUGES.values():
        if f"{name}_max" in found and sums["readings"]:
            made |= {f"{name}_max": max(found[f"{name}_max"]), f"{name}_mean": sums[f"{name}_sum"] / sums["readings"]}
    for name in HISTOGRAMS.values():
        made |= dict(_latency(name, sums))
    return {f"engine/{name}": value for name, value in made.items()}


def _sums_and_rates(sums: Mapping[str, float], seconds: float) -> Iterator[tuple[str, float]]:
    if not sums:
        return
    yield "seconds", seconds
    for name in SUMS:
        yield name, sums.get(name, 0.0)
    for name in RATES if seconds else ():
        yield f"{name}_per_second", sums.get(name, 0.0) / seconds
    if queries := sums.get("prefix_cache_queries"):
        yield "prefix_cache_hit_rate", sums.get("prefix_cache_hits", 0.0) / queries


def _latency(name: str, sums: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield mean and quantiles of a latency in seconds; nothing where nothing was measured."""
    if not (count := sums.get(f"{name}_count")):
        return
    yield f"{name}_seconds_mean", sums[f"{name}_sum"] / count
    start = f"{name}_le_"
    bounds = sorted((float(each.removeprefix(start)), value) for each, value in sums.items() if each.startswith(start))
    for quantile, share in QUANTILES.items() if bounds else ():
        yield f"{name}_seconds_{quantile}", histogram_quantile(bounds, share)


def histogram_quantile(bounds: list[tuple[float, float]], share: float) -> float:
    """Return a quantile of a histogram, by upper bounds with how many were at most that; counts rise with the bounds.

    Within a bucket values are taken to be spread evenly. What lies above the last finite bound counts as that bound.
    Source: `histogram_quantile` of Prometheus.
    """
    wanted = share * bounds[-1][1]
    for (low, below), (high, count) in pairwise([(0.0, 0.0), *bounds]):
        if count >= wanted and count > below:
            return low if high == float("inf") else low + (high - low) * (wanted - below) / (count - below)
    return bounds[-1][0]
