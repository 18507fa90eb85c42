"""A verifiers taskset: walk from topic to topic of a small link graph with two tools."""

from sample_wikispeedia.taskset import WikispeediaTaskset

__all__ = ["WikispeediaTaskset"]
