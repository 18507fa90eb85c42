"""A verifiers harness that runs the chat loop inside the environment server's event loop."""

from chat_loop.harness import ChatLoopHarness

__all__ = ["ChatLoopHarness"]
