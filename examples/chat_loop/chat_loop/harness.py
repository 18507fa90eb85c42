"""The harness: model calls and tool calls made from the environment server's own event loop."""

import asyncio
import json
import re
import uuid
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from pydantic import Field
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import HarnessError, InterceptionError
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace
from verifiers.v1.types import Messages

from chat_loop.tools import Message, Tools

RETRIED = frozenset({429, 500, 502, 503, 504})
CONTEXT_OVERFLOW = re.compile(r"maximum (context|model) length|max_model_len|context length", re.IGNORECASE)
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30)


class ChatLoopConfig(HarnessConfig):
    """How often a model call is tried."""

    attempts: int = Field(2, ge=1)
    """Tries at one model call that failed with 429 or 5xx."""
    backoff_seconds: float = Field(0.5, ge=0)
    """Wait before the second try; doubles."""


class ChatLoopHarness(Harness[ChatLoopConfig]):
    """Answers the conversation, calling tools until a reply calls none; a user's next turn comes through `resume`."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Ask the model, through the interception endpoint, until it calls no tool; return a made-up successful exit.

        Raises HarnessError on a refusal of the endpoint and InterceptionError where it cannot be reached.
        """
        system, prompt = self.resolve_prompt(data)
        try:
            await self._converse(ctx, trace, endpoint, secret, mcp_urls, conversation(system, prompt))
        except ExceptionGroup as several:
            # Connections to tool servers are task groups: what is raised beside them comes out as a group of one.
            raise sole_error(several) from None
        return ProgramResult(exit_code=0, stdout="", stderr="")

    async def _converse(
        self,
        ctx: ModelContext,
        trace: Trace,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        messages: list[Message],
    ) -> None:
        async with AsyncExitStack() as stack:
            tools = await Tools.connect(mcp_urls, self.config.tool_timeout, stack)
            # One connection for all turns: a new one for each takes three times the processor time of its request.
            kept = aiohttp.ClientSession(timeout=TIMEOUT, headers={"Authorization": f"Bearer {secret}"})
            session = await stack.enter_async_context(kept)
            offered = {"tools": tools.schemas} if tools.schemas else {}
            calls: Any = True
            while calls:
                body = {"model": ctx.model, "messages": messages, **offered}
                answer = await self._answer(session, f"{endpoint}/chat/completions", body, trace)
                if answer is None or not offered:
                    break
                reply: Message = json.loads(answer)["choices"][0]["message"]
                calls = reply.get("tool_calls")
                messages = [*messages, reply, *await tools.results(calls or [])]

    async def _answer(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any], trace: Trace) -> str | None:
        """The endpoint's answer to one model call, or None where the rollout has ended."""
        status, answer = await self._ask(session, url, body)
        if status == 200:
            return answer
        if status == 400 and trace.stop_condition is None and CONTEXT_OVERFLOW.search(answer):
            # The framework's own name for it: the trace then counts as truncated.
            trace.stop("max_total_tokens")
        if trace.stop_condition is None:
            raise HarnessError(f"model call answered {status}: {answer[-2000:]}")
        return None

    async def _ask(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, str]:
        # One key for all tries: the endpoint then records the turn at most once.
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        for attempt in range(self.config.attempts):
            try:
                async with session.post(url, json=body, headers=headers) as response:
                    status, answer = response.status, await response.text()
            except aiohttp.ClientError as error:
                raise InterceptionError(f"no answer from {url}: {error}") from error
            if status not in RETRIED or attempt + 1 == self.config.attempts:
                break
            await asyncio.sleep(self.config.backoff_seconds * 2**attempt)
        return status, answer


def sole_error(several: ExceptionGroup) -> Exception:
    """The error within groups of one; of several errors their group."""
    error: Exception = several
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def conversation(system: str | None, prompt: str | Messages | None) -> list[Message]:
    """The chat messages of a system prompt and a prompt, in the form of the chat completions API."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *(message_to_wire(message) for message in prompt or [])]
