"""Calls of an environment's process to the engine: kept answers, policies, and pictures that are refused."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
from pydantic import create_model
from verifiers.v1.configs.agent import AgentConfig

from tasks.inference.engine.client import POLICIES_HEADER
from tasks.inference.environments import agent_runs
from tasks.inference.environments.agent_runs import AgentRun
from tasks.inference.environments.model_client import EngineHttp, request_digest
from tasks.inference.trace_rows.rows import POLICIES_FIELD, TURNS_FIELD

SPANS = [["old", 1], ["new", 2]]


class Wire(httpx.AsyncBaseTransport):
    """An engine that answers with the number of its call, and says which policies sampled that."""

    def __init__(self, finish_reason="stop", status=200):
        self.finish_reason, self.status, self.bodies = finish_reason, status, []

    @property
    def num_calls(self):
        return len(self.bodies)

    async def handle_async_request(self, request):
        content = await request.aread()
        assert int(request.headers["content-length"]) == len(content)
        self.bodies.append(json.loads(content))
        choices = [{"token_ids": [self.num_calls], "finish_reason": self.finish_reason}]
        answer = json.dumps({"request_id": "r", "choices": choices}, separators=(",", ":"))
        return httpx.Response(self.status, text=answer, headers={POLICIES_HEADER: json.dumps(SPANS)})


def calls(wire, kept_answers, *bodies):
    """Make calls of one agent run; return the answers, and the info of its trace."""
    config = SimpleNamespace(sampling=SimpleNamespace(seed=7))
    trace = SimpleNamespace(id="t", info={}, agent=SimpleNamespace(config=config))
    agent_runs._runs["t"] = AgentRun(trace, 0, kept_answers)

    async def ask():
        async with EngineHttp(transport=wire) as http:
            url, headers = "http://engine/inference/v1/generate", {"X-Session-ID": "t"}
            return [await http.post(url, json=body, headers=headers) for body in bodies]

    try:
        return asyncio.run(ask()), trace.info
    finally:
        del agent_runs._runs["t"]


def body(seed, **others):
    return {"model": "policy", "token_ids": [1], "sampling_params": {"seed": seed}, **others}


def sampled(answers):
    return [answer.json()["choices"][0]["token_ids"][0] for answer in answers]


def test_answers_are_kept_as_they_come_and_kept_ones_are_not_sampled_again():
    answers, info = calls(Wire(), {}, *(body(seed) for seed in range(6)))
    assert sampled(answers) == [1, 2, 3, 4, 5, 6]
    turns = info[TURNS_FIELD]
    assert [json.loads(turn["answer"])["choices"][0]["token_ids"] for turn in turns] == [[3], [4], [5], [6]]
    assert {turn["model"] for turn in turns} == {"policy"} and info[POLICIES_FIELD]["5"] == [("old", 1), ("new", 2)]
    wire, kept = Wire(), {turn["request"]: turn["answer"] for turn in turns[-1:]}
    again, info = calls(wire, kept, body(5, cache_salt="of other weights"), body(6))
    assert sampled(again) == [6, 1] and wire.num_calls == 1
    assert info[POLICIES_FIELD].keys() == {"5", "6"} and len(info[TURNS_FIELD]) == 1


@pytest.mark.parametrize(
    ("wire", "kept_answers"),
    [(Wire("abort"), {}), (Wire(status=503), {}), (Wire(), None)],
    ids=["cut off", "refused", "no plan"],
)
def test_what_an_engine_cut_off_or_refused_is_not_kept_nor_anything_without_a_plan(wire, kept_answers):
    _, info = calls(wire, kept_answers, body(1))
    assert TURNS_FIELD not in info and wire.num_calls == 1


def test_a_picture_that_is_elsewhere_is_refused_and_never_sent():
    wire = Wire()
    (answer,), _ = calls(wire, None, body(1, content_parts=[{"type": "image_url", "url": "http://else/where.png"}]))
    assert answer.status_code == 400 and wire.num_calls == 0


def test_the_engine_is_asked_for_log_probs_of_sampled_tokens_alone_and_kept_answers_keep_their_key():
    wire, asked = Wire(), [body(seed) for seed in (1, 2, 3)]
    for request, logprobs in zip(asked, (1, 2, None), strict=True):
        request["sampling_params"] |= {} if logprobs is None else {"logprobs": logprobs}
    _, info = calls(wire, {}, *asked)
    assert [sent["sampling_params"].get("logprobs") for sent in wire.bodies] == [0, 2, None]
    assert wire.bodies[0] == {**asked[0], "sampling_params": {"seed": 1, "logprobs": 0}}
    assert request_digest(asked[2]) in {turn["request"] for turn in info[TURNS_FIELD]}
    kept = {request_digest(asked[0]): '{"choices":[{"token_ids":[9]}]}'}
    (again,), _ = calls(wire, kept, asked[0])
    assert sampled([again]) == [9] and wire.num_calls == 3


def test_a_seat_that_the_environment_has_not_is_named():
    seats = dict.fromkeys(("buyer", "seller"), (AgentConfig, AgentConfig()))
    config = create_model("Config", **seats)()
    with pytest.raises(ValueError, match="bindings: the environment has no seat 'sellr'; it has buyer, seller"):
        agent_runs.env_with_players(SimpleNamespace(config=config), {"sellr": {}})
