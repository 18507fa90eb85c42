"""The environment with a tool: its store, its scores by hand, its demonstrations, and the tool through the harness."""

import asyncio
import json

import pytest
from sample_lookup.chains import Chain, answered, chains, is_right, prompt, reached, tagged
from sample_lookup.demonstrations import called
from sample_lookup.words import SCHEMA

from tests.fixtures.commands import cases
from tests.fixtures.endpoints import endpoint

pytestmark = pytest.mark.engine

CHAIN = Chain(("abc", "xyz"), "42")


@cases(__file__, "answers")
def test_the_answer_of_a_reply(reply, is_answer, right):
    assert (answered(reply), is_right(reply, "42")) == (is_answer, right)


@cases(__file__, "lookups")
def test_progress_counts_entries_from_the_first_name(results, num_found):
    assert reached(results, CHAIN.names, CHAIN.value) == num_found


class Served:
    """What the harness asked a made-up model, whose replies were given, while the real tool server ran."""

    def __init__(self, replies):
        self.bodies = []
        asyncio.run(self._serve(replies))

    async def _serve(self, replies):
        from types import SimpleNamespace

        from aiohttp import web
        from chat_loop.harness import ChatLoopConfig, ChatLoopHarness
        from sample_lookup.taskset import LookupConfig, LookupTaskset
        from verifiers.v1.mcp import serve_shared
        from verifiers.v1.task import TaskData

        async def answer(request):
            self.bodies.append(await request.json())
            return web.json_response({"choices": [{"message": replies[len(self.bodies) - 1]}]})

        config = LookupConfig(id="sample_lookup", num_examples=3)
        self.chain = next(config.generated())
        context = SimpleNamespace(model="policy")
        trace = SimpleNamespace(stop_condition=None)
        tools = serve_shared(LookupTaskset.toolsets(config), harness_is_local=True)
        async with endpoint(answer) as url, tools as shared:
            urls = {name: server.url for name, server in shared.items()}
            data = TaskData(prompt=prompt(self.chain.names[0]))
            harness = ChatLoopHarness(ChatLoopConfig(id="chat_loop"))
            await harness.launch(context, trace, trace, f"{url}/v1", "secret", urls, data)


def call(number, name, arguments):
    """An assistant message with one call."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": f"c{number}", "function": function}]}


@pytest.fixture(scope="module")
def served():
    """A conversation of calls right and wrong, ended by a reply without one."""
    name = next(chains(3, 2, seed=0)).names[0]
    calls = [("lookup", json.dumps({"name": name})), ("lookup", '{"name": "?"}'), ("find", "{}"), ("lookup", "{")]
    calls += [("lookup", "[]"), ("lookup", "{}"), ("lookup", '{"name": ' + "1" * 5000 + "}"), ("lookup", "[" * 100_000)]
    replies = [call(number, *each) for number, each in enumerate(calls)]
    return Served([*replies, {"role": "assistant", "content": tagged("1")}])


def test_the_model_is_offered_the_tool_that_demonstrations_show(served):
    assert all(body["tools"] == [SCHEMA] for body in served.bodies)


def test_calls_are_answered_until_a_reply_has_none(served):
    assert len(served.bodies) == 9
    first, *_, last = (body["messages"] for body in served.bodies)
    assert first == [{"role": "user", "content": prompt(served.chain.names[0])}]
    assert [message["role"] for message in last] == ["user", *["assistant", "tool"] * 8]
    tools = [message for message in last if message["role"] == "tool"]
    assert [(message["tool_call_id"], message["name"]) for message in tools] == [
        (f"c{number}", "find" if number == 2 else "lookup") for number in range(8)
    ]
    results = [message["content"] for message in tools]
    assert results[:3] == [f"see {served.chain.names[1]}", "nothing", "error: there is no tool 'find'"]
    assert results[3].startswith("error: the arguments are not JSON")
    assert results[4] == "error: the arguments are no JSON object but list"
    assert "Field required" in results[5]
    # What JSON allows and Python does not read is the model's mistake too, not the rollout's failure.
    assert all(result.startswith("error: the arguments are not JSON") for result in results[6:])


def test_demonstrated_calls_are_what_the_tool_answers(served):
    (_, result) = called(served.chain, 1)
    assert served.bodies[-1]["messages"][2]["content"] == result["content"]
