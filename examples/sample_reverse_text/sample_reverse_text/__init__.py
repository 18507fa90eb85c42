"""A verifiers taskset: write a short text backwards, inside answer tags."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sample_reverse_text.taskset import ReverseTextTaskset

__all__ = ["ReverseTextTaskset"]


def __getattr__(name: str) -> Any:
    # At first use: the command that writes demonstrations needs no verifiers, which takes seconds to import.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sample_reverse_text.taskset import ReverseTextTaskset

    return ReverseTextTaskset
