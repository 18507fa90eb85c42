"""Shapes of made-up rollouts: which messages follow each other, and what ended a rollout."""

from dataclasses import dataclass
from functools import cache

TOOL_ENVIRONMENT, TEXT_ENVIRONMENT = "arithmetic", "summaries"


@dataclass(frozen=True)
class Shape:
    """One course that a rollout may take: the role of every message, and the message that each one follows."""

    roles: tuple[str, ...]
    parents: tuple[int | None, ...]
    calls: frozenset[int] = frozenset()
    """The sampled messages that call a tool."""

    @property
    def sampled(self) -> tuple[bool, ...]:
        """Whether the policy wrote each message."""
        return tuple(role == "assistant" for role in self.roles)

    @property
    def num_branches(self) -> int:
        """Messages that nothing follows."""
        return len(set(range(len(self.roles))) - set(self.parents))


@dataclass(frozen=True)
class Ending:
    """How a rollout failed: the columns that say so, and the traceback."""

    error_class: str
    error_type: str
    message: str
    place: str

    @property
    def traceback(self) -> str:
        """The traceback, as long as those of real servers."""
        frames = [
            f'  File "/opt/environments/{self.place}/{name}.py", line {17 * number + 40}, in {name}\n'
            f"    result = await self.{name}(message, timeout=self.config.timeout)\n"
            for number, name in enumerate(("serve", "rollout", "turn", "respond", "call_tool", "request", "send"))
        ]
        return f"Traceback (most recent call last):\n{''.join(frames)}{self.error_type}: {self.message}\n"


ENDINGS = (
    Ending("timeout", "TimeoutError", "no answer from the tool server within 30.0 s", "tools"),
    Ending("infrastructure", "SandboxError", "the sandbox was lost: connection reset by peer", "sandboxes"),
    Ending("environment", "ZeroDivisionError", "division by zero", "arithmetic"),
    Ending("model", "MalformedResponse", "the engine's answer holds no tokens", "engine"),
)


@cache
def chat(num_turns: int) -> Shape:
    """Return a system message and so many turns of user and policy."""
    roles = ("system", *("user", "assistant") * num_turns)
    return Shape(roles, _row(len(roles)))


@cache
def tools(num_calls: int, again: bool = False) -> Shape:
    """Return a question, so many calls of a tool, and an answer; with `again` another answer to the last result."""
    roles = ("system", "user", *("assistant", "tool") * num_calls, "assistant")
    parents = _row(len(roles))
    calls = frozenset(range(2, 2 + 2 * num_calls, 2))
    if again:
        return Shape((*roles, "assistant"), (*parents, len(roles) - 2), calls)
    return Shape(roles, parents, calls)


@cache
def broken(shape: Shape, num_messages: int) -> Shape:
    """Return the first messages of a shape."""
    calls = frozenset(number for number in shape.calls if number < num_messages)
    return Shape(shape.roles[:num_messages], shape.parents[:num_messages], calls)


def _row(length: int) -> tuple[int | None, ...]:
    return (None, *range(length - 1))
