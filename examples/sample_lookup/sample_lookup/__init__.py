"""A verifiers taskset: follow entries of a small store with a tool, then answer."""

from sample_lookup.conversation import LookupEnv
from sample_lookup.taskset import LookupTaskset

__all__ = ["LookupEnv", "LookupTaskset"]
