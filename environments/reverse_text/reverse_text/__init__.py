"""A verifiers taskset: write a short text backwards, inside answer tags."""

from reverse_text.taskset import ReverseTextTaskset

__all__ = ["ReverseTextTaskset"]
