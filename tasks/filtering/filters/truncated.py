"""Truncated: a limit on tokens or turns ended the rollout before the model did."""

from configs.filters import TruncatedFilter
from tasks.arrays.finding import FilterInput, Finding, hits_from


def truncated(material: FilterInput, settings: TruncatedFilter) -> Finding:
    """Hit every trace that a limit ended; the evidence is the stop condition and the tokens sampled."""
    rows = material.traces.select(["is_truncated", "stop_condition", "num_output_tokens"]).to_pylist()
    evidence = {row: trace for row, trace in enumerate(rows) if trace.pop("is_truncated")}
    return hits_from(evidence, len(rows))
