"""A verifiers taskset: sort names, then merge in those that the user adds turn by turn."""

from sample_alphabet_sort.conversation import AlphabetSortEnv
from sample_alphabet_sort.taskset import AlphabetSortTaskset

__all__ = ["AlphabetSortEnv", "AlphabetSortTaskset"]
