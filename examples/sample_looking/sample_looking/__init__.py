"""A verifiers taskset: count the squares of pictures, shown by the user or by a tool."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sample_looking.conversation import LookingEnv
    from sample_looking.taskset import LookingTaskset

__all__ = ["LookingEnv", "LookingTaskset"]


def __getattr__(name: str) -> Any:
    # At first use: the command that writes demonstrations needs no verifiers, which takes seconds to import.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sample_looking import conversation, taskset

    return getattr(taskset if name == "LookingTaskset" else conversation, name)
