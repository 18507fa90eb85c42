"""A verifiers taskset: follow entries of a small store with a tool, then answer."""

from lookup.conversation import LookupEnv
from lookup.taskset import LookupTaskset

__all__ = ["LookupEnv", "LookupTaskset"]
