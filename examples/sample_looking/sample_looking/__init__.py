"""A verifiers taskset: count the squares of a picture."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sample_looking.taskset import LookingTaskset

__all__ = ["LookingTaskset"]


def __getattr__(name: str) -> Any:
    # At first use: the command that writes demonstrations needs no verifiers, which takes seconds to import.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sample_looking.taskset import LookingTaskset

    return LookingTaskset
