"""A model call within the process is what it is over HTTP: the same traces, limits, errors and retries."""

import asyncio
import json
from typing import Any

import pytest
from chat_loop import endpoints
from chat_loop.endpoints import InProcess, OverHttp, connect
from verifiers.v1.errors import InterceptionError

from tests.environments.scripted import calling, played

pytestmark = pytest.mark.engine

SETTINGS = {"id": "sample_calc_tools", "num_examples": 2, "num_calls": 2}
KEPT = ("nodes", "calls", "errors", "rewards", "metrics", "stop_condition", "is_completed", "ok", "tools")
MOMENTS = {"timestamp", "time", "traceback"}


def say(body):
    """Two calls and an answer."""
    told = [message for message in body["messages"] if message["role"] == "tool"]
    return calling("calc", expression="7+5") if len(told) < 2 else "<ans> 12 ü </ans>"


class Busy:
    """Refuses the first tries with a status, then says what `say` does."""

    def __init__(self, status, number):
        self.status, self.number = status, number

    def __call__(self, body):
        self.number -= 1
        return self.status if self.number >= 0 else say(body)


def timeless(value):
    """A dumped trace without what differs from one run to the next."""
    if isinstance(value, dict):
        return {key: timeless(each) for key, each in value.items() if key not in MOMENTS}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def both(monkeypatch, reply, **limits):
    """Play episodes within the process and over HTTP; return the traces and the requests of each."""
    outcomes, connected = [], []

    async def note(*arguments):
        connected.append(await connect(*arguments))
        return connected[-1]

    monkeypatch.setattr("chat_loop.harness.connect", note)
    for servers in (endpoints._servers, NeverFilled()):
        monkeypatch.setattr(endpoints, "_servers", servers)
        connected.clear()
        episodes, bodies = played(SETTINGS, ["agent"], reply(), limits={"retries": {"max_retries": 0}, **limits})
        assert {type(each) for each in connected} == {OverHttp if isinstance(servers, NeverFilled) else InProcess}
        traces = [timeless(trace.model_dump(include=set(KEPT))) for each in episodes for trace in each.traces]
        outcomes.append([*traces, {"bodies": bodies}])
    assert outcomes[0] == outcomes[1]
    assert endpoints._servers == {}, "what was registered is forgotten"
    return outcomes


class NeverFilled(dict[str, Any]):
    """No server is of this process."""

    def __setitem__(self, key, value):
        """Forget it."""


@pytest.mark.nightly
def test_a_conversation_with_tools(monkeypatch):
    traces = both(monkeypatch, lambda: say)[0]
    assert [trace["ok"] for trace in traces[:-1]] == [True, True] and len(traces[-1]["bodies"]) == 6


@pytest.mark.nightly
def test_a_limit_of_turns(monkeypatch):
    traces = both(monkeypatch, lambda: say, max_turns=2)[0]
    assert {trace["stop_condition"] for trace in traces[:-1]} == {"max_turns"}


@pytest.mark.nightly
def test_a_refusal_ends_the_rollout_with_the_providers_error(monkeypatch):
    traces = both(monkeypatch, lambda: lambda body: 404)[0]
    assert {trace["errors"][0]["type"] for trace in traces[:-1]} == {"ProviderError"}
    assert {trace["errors"][0]["status_code"] for trace in traces[:-1]} == {404}


@pytest.mark.nightly
def test_a_busy_model_is_asked_again_and_the_turn_is_recorded_once(monkeypatch):
    traces = both(monkeypatch, lambda: Busy(503, 1))[0]
    assert [len(trace["calls"]) for trace in traces[:-1]] == [4, 3] and all(trace["ok"] for trace in traces[:-1])
    assert [call["error"] is None for call in traces[0]["calls"]] == [False, True, True, True]


class Handled:
    """As much of an interception server as the endpoint asks for."""

    def __init__(self, handle):
        self.handle = handle

    def _handler_for(self, dialect):
        return self.handle


def test_a_cancelled_caller_leaves_the_handler_to_the_server():
    ended = []

    async def handle(request):
        await asyncio.sleep(0.05)
        ended.append(json.loads(await request.read()))

    async def go():
        asking = asyncio.create_task(InProcess(Handled(handle)).ask({"a": 1}, {}))
        await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert ended == []
        await asyncio.sleep(0.1)

    asyncio.run(go())
    assert ended == [{"a": 1}]


def test_a_handler_that_the_server_ends_is_no_cancellation_of_the_caller():
    async def handle(request):
        asyncio.current_task().cancel()
        await asyncio.sleep(1)

    with pytest.raises(InterceptionError, match="ended the call"):
        asyncio.run(InProcess(Handled(handle)).ask({}, {}))


def test_a_handler_that_fails_answers_as_a_web_server_does():
    async def handle(request):
        raise ValueError("a mistake")

    assert asyncio.run(InProcess(Handled(handle)).ask({}, {})) == (500, "500 Internal Server Error")
