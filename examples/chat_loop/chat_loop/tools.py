"""The tools of a task: what its tool servers offer the model, and what they answer to its calls."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from verifiers.v1.harnesses.utils.mcp import MCPConnection, call_mcp, connect_mcp

Message = dict[str, Any]


class Tools:
    """The tools of the servers that a rollout reaches over MCP; none where it has no server."""

    def __init__(
        self,
        schemas: Sequence[Mapping[str, Any]] = (),
        owners: Mapping[str, tuple[str, str]] | None = None,
        servers: Mapping[str, MCPConnection] | None = None,
    ) -> None:
        self.schemas = list(schemas)
        """As the chat completions API takes them."""
        self._owners = dict(owners or {})
        self._servers = dict(servers or {})

    @classmethod
    async def connect(cls, urls: Mapping[str, str], seconds: float, stack: AsyncExitStack) -> "Tools":
        """Return what the servers at `urls`, by name, offer; the connections live as long as `stack`.

        A call may take `seconds`.
        """
        if not urls:
            return cls()
        servers = {name: {"url": url, "timeout": seconds} for name, url in urls.items()}
        return cls(*await connect_mcp({"mcpServers": servers}, stack))

    async def results(self, calls: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Run the calls of one assistant message in turn; return one tool message for each, errors among them."""
        return [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": await self._result(call["function"]["name"], call["function"]["arguments"]),
            }
            for call in calls
        ]

    async def _result(self, name: str, arguments: str) -> str | list[dict[str, Any]]:
        if name not in self._owners:
            return f"error: there is no tool {name!r}"
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"error: the arguments are not JSON: {error}"
        if not isinstance(given, dict):
            return f"error: the arguments are no JSON object but {type(given).__name__}"
        return await call_mcp(self._servers, self._owners, name, given)
