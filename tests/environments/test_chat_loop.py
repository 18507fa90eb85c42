"""The harness against a real HTTP endpoint that answers as told: what it retries, and what ends a rollout."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from chat_loop.harness import ChatLoopConfig, ChatLoopHarness, conversation
from chat_loop.tools import Tools
from verifiers.v1.errors import HarnessError, InterceptionError
from verifiers.v1.task import TaskData
from verifiers.v1.types import UserMessage

from tests.fixtures.endpoints import endpoint

pytestmark = [pytest.mark.engine, pytest.mark.essential]

OVERFLOW = '{"error": "Prompt length (600) exceeds maximum context length (512)."}'


class Stops:
    """As much of a trace as the harness touches."""

    stop_condition: str | None = None

    def stop(self, condition):
        self.stop_condition = condition


def launched(answers, trace, url=""):
    """Launch once against an endpoint that gives `answers` in turn; return the requests it saw."""
    seen = []

    async def answer(request):
        status, text = answers[len(seen)]
        seen.append({"headers": dict(request.headers), "body": await request.json()})
        return web.Response(status=status, text=text)

    async def go():
        harness = ChatLoopHarness(ChatLoopConfig(id="chat_loop", attempts=3, backoff_seconds=0))
        context = SimpleNamespace(model="policy")
        data, runtime, record = TaskData(prompt="hello", system_prompt="be short"), Any, trace
        async with endpoint(answer) as here:
            await harness.launch(context, record, runtime, url or f"{here}/v1", "secret", {}, data)

    asyncio.run(go())
    return seen


def test_one_call_is_one_request():
    (request,) = launched([(200, "{}")], Stops())
    assert request["headers"]["Authorization"] == "Bearer secret"
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"}]
    assert request["body"] == {"model": "policy", "messages": messages}


def test_tries_of_one_call_carry_one_key():
    requests = launched([(503, "busy"), (502, "busy"), (200, "{}")], Stops())
    assert len(requests) == 3
    assert len({request["headers"]["Idempotency-Key"] for request in requests}) == 1


@pytest.mark.parametrize(("answer", "times"), [((503, "busy"), 3), ((400, "no such model"), 1)])
def test_the_last_failure_or_a_refusal_ends_the_rollout(answer, times):
    with pytest.raises(HarnessError, match="answered {}: {}".format(*answer)):
        launched([answer] * times, Stops())


def test_a_refusal_beside_connections_to_tool_servers_is_no_group(monkeypatch):
    async def connect(urls, seconds, stack):
        await stack.enter_async_context(asyncio.TaskGroup())
        return Tools()

    monkeypatch.setattr(Tools, "connect", connect)
    with pytest.raises(HarnessError, match="answered 400: no such model"):
        launched([(400, "no such model")], Stops())


def test_a_prompt_that_does_not_fit_truncates():
    trace = Stops()
    launched([(400, OVERFLOW)], trace)
    assert trace.stop_condition == "max_total_tokens"


def test_a_stop_of_the_framework_is_no_failure():
    trace = Stops()
    trace.stop("max_turns")
    launched([(400, "rollout stopped: max_turns")], trace)
    assert trace.stop_condition == "max_turns"


def test_no_endpoint_is_a_failure_of_the_infrastructure():
    with pytest.raises(InterceptionError, match="no answer"):
        launched([], Stops(), url="http://127.0.0.1:9/v1")


def test_messages_prompts_are_passed_on():
    assert conversation(None, [UserMessage(content="a")]) == [{"role": "user", "content": "a"}]
    assert conversation(None, None) == []
