"""A verifiers harness that runs the chat loop inside the environment server's event loop."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chat_loop.harness import ChatLoopHarness

__all__ = ["ChatLoopHarness"]


def __getattr__(name: str) -> Any:
    # At first use: the command that writes demonstrations needs no verifiers, which takes seconds to import.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from chat_loop.harness import ChatLoopHarness

    return ChatLoopHarness
