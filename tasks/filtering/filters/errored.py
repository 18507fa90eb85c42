"""Errored: the rollout failed; its reward, if any, says nothing about the policy."""

from configs.filters import ErroredFilter
from tasks.arrays.finding import FilterInput, Finding, hits_from


def errored(material: FilterInput, settings: ErroredFilter) -> Finding:
    """Hit every trace with an error class; the evidence is its class and type."""
    rows = material.traces.select(["error_class", "error_type"]).to_pylist()
    evidence = {row: dict(error) for row, error in enumerate(rows) if error["error_class"] is not None}
    return hits_from(evidence, len(rows))
