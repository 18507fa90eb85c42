"""The bulk route answers as the single one does, in few forward passes, and each request for itself."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.environments import EnvironmentConfig
from configs.run import View
from tasks.inference.engine.checks import check_serving
from tasks.inference.engine.client import MODEL, Engine, EngineCall, EngineError, reload_weights
from tests.fixtures.faults import in_single_requests
from tests.fixtures.hosts import ENGINE, engine_of
from tests.fixtures.sampled import failures, sampled
from tests.fixtures.waiting import until
from tests.tasks.inference.engine.bulk_calls import (
    answers_in_bulk,
    body,
    bulk_lines,
    client,
    single_answers,
    tokens_and_logprobs,
)
from tests.tasks.inference.engine.probes import policy_row

pytestmark = pytest.mark.engine

MOST_CALLS, MOST_PASSES = 16, 60
"""Of 128 rollouts of one turn."""


@pytest.fixture(scope="module")
def counting(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that reports its load and its forward passes."""
    with engine_of(models["a"], tmp_path_factory.mktemp("engine") / "report.json", metrics=True) as engine:
        yield engine


def metric(engine: Engine, name: str, label: str = "") -> float:
    """The value of one of the engine's metrics, summed over its labels, or over those that have a text in them."""
    with client(engine) as http:
        found = re.findall(rf"^{name}\{{.*?{re.escape(label)}.*?\}} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert found or label  # a route that was never called is not counted
    return sum(map(float, found))


def num_calls(engine: Engine) -> float:
    """How often the engine's routes were called for tokens, one by one or in bulk."""
    return metric(engine, "http_requests_total", "/inference/v1/generate")


@pytest.mark.essential
def test_a_bulk_call_answers_as_the_single_route(small_engine: Engine, models: dict[str, Path]) -> None:
    small_engine.serve("bulk", models["a"])
    bodies = [body(number, max_tokens=5 + 3 * number) for number in range(30)]  # up to 92 tokens
    expected = tokens_and_logprobs(single_answers(small_engine, bodies))
    found = tokens_and_logprobs(answers_in_bulk(small_engine, bodies))
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=1e-5)
    assert len({tuple(tokens) for tokens in found[0]}) == len(bodies)


@pytest.mark.parametrize("sampling", [{"max_tokens": 30}, {"top_p": 0.7, "logprobs": 3}, {"n": 2}], ids=str)
def test_a_group_whose_seeds_differ_is_answered_as_one_by_one(
    small_engine: Engine, models: dict[str, Path], sampling: dict[str, object]
) -> None:
    small_engine.serve("group", models["a"])
    prompts = ([number] * 20 for number in (5, 5, 5, 5, 7, 7, 5, 5))
    bodies = [
        {**body(number, prompt=prompt, **sampling), "return_token_ids": True} for number, prompt in enumerate(prompts)
    ]
    del bodies[2]["request_id"]
    bodies[3]["priority"] = 0  # says what is the default, and is another body
    expected, found = (
        [content for _, content in ask(small_engine, bodies)] for ask in (single_answers, answers_in_bulk)
    )
    same = ("usage", "prompt_token_ids")
    assert [[each[name] for name in same] for each in found] == [[each[name] for name in same] for each in expected]
    tokens = [[choice["token_ids"] for choice in each["choices"]] for each in found]
    assert tokens == [[choice["token_ids"] for choice in each["choices"]] for each in expected]
    assert len({str(each) for each in tokens}) == len(bodies)
    names = [each["request_id"] for each in found]
    assert names[:2] + names[3:] == [f"generate-tokens-request-{number}" for number in (0, 1, 3, 4, 5, 6, 7)]


def test_what_a_group_has_in_common_is_worked_out_once() -> None:
    from tasks.inference.engine.bulk import Admitted, BulkCall

    ways = list[str]()

    class Serving:
        async def admit(self, body: Any) -> Any:
            ways.append("alone")
            return Admitted(body, None, ())

        async def admit_like(self, admitted: Any, own: Any) -> Any:
            ways.append(f"like {admitted.request['request_id']}, seed {own.seed}")
            return Admitted(admitted.request, None, ())

    call = BulkCall.__new__(BulkCall)
    call._serving, call._alike = Serving(), (None, None)
    others = [body(3, prompt=[6]), body(4, prompt=[6], top_p=0.5), body(5, prompt=[6], seed=True), "text"]
    for each in (*(body(number, prompt=[5]) for number in range(3)), *others, body(6, prompt=[6])):
        asyncio.run(call._admit_one(each))
    assert ways == ["alone", "like request-0, seed 1", "like request-0, seed 2", *["alone"] * 5]


@pytest.mark.parametrize(
    "own", [{"seed": True}, {"seed": "x"}, {"seed": 2**64}, {"seed": -2}, {"seed": None}, {"id": 5}]
)
def test_a_seed_or_an_id_of_another_kind_is_answered_as_by_the_single_route(
    small_engine: Engine, own: dict[str, Any]
) -> None:
    first, odd = body(1, temperature=0.0), body(1, temperature=0.0)
    if "id" in own:
        odd["request_id"] = own["id"]
    else:
        odd["sampling_params"] |= own
    found, (expected,) = answers_in_bulk(small_engine, [first, odd])[1], single_answers(small_engine, [odd])
    assert found[0] == expected[0]
    if found[0] != 200:
        assert found == expected


def test_prompts_beyond_one_forward_pass_wait_for_the_next_one(small_engine: Engine, models: dict[str, Path]) -> None:
    # The engine on the CPU dies of a prompt that is computed in parts, if its request has a seed.
    small_engine.serve("many", models["a"])
    prompts = [[(number * 17 + index * index) % 256 for index in range(150)] for number in range(80)]
    bodies = [body(number, prompt=prompt, max_tokens=4) for number, prompt in enumerate(prompts)]
    expected = tokens_and_logprobs(single_answers(small_engine, bodies))
    found = tokens_and_logprobs(answers_in_bulk(small_engine, [{**each, "cache_salt": "bulk"} for each in bodies]))
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 70, "ignore_eos": True},
        {"prompt_logprobs": 1, "logprobs": 3},
        {"n": 3},
        {"logprobs": None},
        {"detokenize": True, "stop": ["a", "b", "c"]},
        {"temperature": 0.0, "top_p": 1.0, "stop_token_ids": list(range(100, 200))},
    ],
    ids=str,
)
def test_one_request_is_answered_to_the_last_bit(small_engine: Engine, sampling: dict[str, object]) -> None:
    asked = {**body(1, **sampling), "return_token_ids": True}
    salted = [{**asked, "cache_salt": salt} for salt in ("single", "bulk")]  # neither finds the other's states
    assert answers_in_bulk(small_engine, salted[1:]) == single_answers(small_engine, salted[:1])


def test_an_error_is_that_request_s_own(small_engine: Engine) -> None:
    bad = [
        body(1, model="nobody"),
        body(2, max_tokens=-1),
        body(3, prompt=[1] * 5000),
        body(4, prompt=[10**6]),
        {"token_ids": [1]},
        "text",
    ]
    good = [body(number) for number in range(10, 16)]
    mixed = [each for pair in zip(bad, good, strict=True) for each in pair]
    answers = answers_in_bulk(small_engine, mixed)
    assert [status for status, _ in answers[1::2]] == [200] * len(good)
    assert answers[::2] == single_answers(small_engine, bad)
    assert {status for status, _ in answers[::2]} == {400, 404}


def test_streams_and_calls_of_another_shape_are_refused(small_engine: Engine) -> None:
    ((status, refused),) = answers_in_bulk(small_engine, [{**body(1), "stream": True}])
    assert status == 400 and "no streams" in refused["error"]["message"]
    with client(small_engine) as http:
        for content in (b"no JSON", b'{"requests": 1}', b"{}"):
            assert http.post("/inference/v1/generate_many", content=content).status_code == 400
    assert answers_in_bulk(small_engine, []) == []


@pytest.mark.parametrize("route", ["generate_many", "abort_many", "in_turn"])
def test_the_key_is_required(small_engine: Engine, route: str) -> None:
    with client(small_engine, key="another") as http:
        assert http.post(f"/inference/v1/{route}", json={"requests": [body(1)]}).status_code == 401


def test_a_request_is_aborted_by_its_id(small_engine: Engine) -> None:
    bodies = [body(number, ignore_eos=True) for number in range(3)]
    with ThreadPoolExecutor() as pool, small_engine.pause(), bulk_lines(small_engine, bodies) as lines:
        first = pool.submit(next, lines)
        with client(small_engine) as http:
            # Passed over until it has arrived.
            while not first.done():
                ids = {"request_ids": ["request-1", "nobody's"]}
                assert http.post("/inference/v1/abort_many", json=ids).status_code == 200
        index, status, aborted = json.loads(first.result())
        assert (index, status, aborted["choices"][0]["finish_reason"]) == (1, 200, "abort")
        small_engine._request("POST", "/resume")
        left = {index: content["choices"][0] for index, _, content in map(json.loads, lines)}
    assert {index: (len(each["token_ids"]), each["finish_reason"]) for index, each in left.items()} == {
        0: (12, "length"),
        2: (12, "length"),
    }


def test_many_requests_take_few_forward_passes(counting: Engine) -> None:
    bodies = [body(number, max_tokens=6 + number % 17, ignore_eos=True) for number in range(128)]
    before = metric(counting, "vllm:iteration_tokens_total_count")
    answers = answers_in_bulk(counting, bodies)
    passes = metric(counting, "vllm:iteration_tokens_total_count") - before
    assert max(len(tokens) for tokens in tokens_and_logprobs(answers)[0]) <= passes <= MOST_PASSES


def test_rollouts_of_one_turn_reach_the_engine_together(
    counting: Engine, models: dict[str, Path], view: Callable[..., View], tmp_path: Path
) -> None:
    counting.serve("together", models["a"])
    passes, calls = metric(counting, "vllm:iteration_tokens_total_count"), num_calls(counting)
    taskset, harness = {"id": "sample_reverse_text", "num_examples": 10}, {"id": "chat_loop"}
    environment = EnvironmentConfig(name="reverse", taskset=taskset, harness=harness, max_turns=1)
    traces, _ = sampled(counting, environment, view, tmp_path, 8, 16, max_in_flight=128)
    assert failures(traces) == [] and len(traces) == 128
    assert num_calls(counting) - calls <= MOST_CALLS
    assert metric(counting, "vllm:iteration_tokens_total_count") - passes <= MOST_PASSES


def test_a_client_that_hangs_up_aborts_what_is_unfinished(counting: Engine) -> None:
    bodies = [body(number, max_tokens=1 if number == 0 else 230, ignore_eos=True) for number in range(8)]
    before = metric(counting, "vllm:generation_tokens_total")
    with counting.pause(), bulk_lines(counting, bodies) as lines:
        counting._request("POST", "/resume")
        assert json.loads(next(lines))[0] == 0
    until(lambda: metric(counting, "vllm:num_requests_running") == 0, lambda: "requests of nobody run on")
    assert metric(counting, "vllm:generation_tokens_total") - before < 1 + 7 * 230


PROMPT = {"model": MODEL, "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2, "temperature": 0.0}}


@pytest.mark.essential
def test_requests_in_turn_are_answered_as_one_by_one(small_engine: Engine, models: dict[str, Path]) -> None:
    small_engine.serve("turn", models["a"])
    calls = (
        EngineCall("GET", "/weight_info"),
        EngineCall("POST", "/pause", params={"mode": "keep", "clear_cache": "false"}),
        EngineCall("GET", "/is_paused"),
        EngineCall("POST", "/resume"),
        EngineCall("POST", "/inference/v1/generate", PROMPT),
    )
    weights, _, paused, _, answer = small_engine._in_turn(*calls)
    assert weights == {"weight_version": "turn"} and paused == {"is_paused": True}
    assert answer["choices"] == in_single_requests(small_engine, calls[-1])[0]["choices"]
    assert small_engine._in_turn() == []


def test_the_first_request_in_turn_that_fails_is_the_last(small_engine: Engine, models: dict[str, Path]) -> None:
    small_engine.serve("turn", models["a"])
    named, wrong = EngineCall("POST", "/update_weight_version", {"new_version": "b"}), {"method": "no such method"}
    with pytest.raises(EngineError, match="/collective_rpc answered 4"):
        small_engine._in_turn(
            EngineCall("GET", "/weight_info"), EngineCall("POST", "/collective_rpc", wrong | {"args": 3}), named
        )
    assert small_engine.state().policy_key == "turn"
    with pytest.raises(EngineError, match="/nowhere answered 404"):
        small_engine._in_turn(EngineCall("GET", "/nowhere"), named)
    assert small_engine.state().policy_key == "turn"


def test_an_engine_of_others_gets_requests_one_by_one(
    small_engine: Engine, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    request, asked = small_engine._request, list[str]()

    def without_ours(method: str, path: str, **named: object) -> dict[str, Any]:
        asked.append(path)
        # Routes that such an engine lacks, it lacks under any name.
        return request(
            method, path if path == "/inference/v1/generate" else path.replace("/inference", "/not"), **named
        )

    monkeypatch.setattr(small_engine, "_request", without_ours)
    small_engine.serve("others", models["b"])
    assert small_engine.state().policy_key == "others" and small_engine.weights_sum() is None
    singles = ["/pause", "/inference/v1/count_tokens", "/update_weight_version", "/collective_rpc"]
    begin = asked.index("/pause")
    assert asked[begin : begin + 4] == singles and "/resume" in asked
    row = policy_row("others", models["b"])
    assert check_serving(small_engine, row, ENGINE) < 1e-4


def test_requests_in_turn_are_ended_where_the_client_hangs_up(small_engine: Engine, models: dict[str, Path]) -> None:
    small_engine.serve("before", models["a"])
    named = [EngineCall("POST", "/update_weight_version", {"new_version": name}) for name in ("", "after")]
    calls = [EngineCall("POST", "/pause", params={"mode": "keep"}), named[0], reload_weights(models["b"]), named[1]]
    body = {"requests": [each._asdict() for each in (*calls, EngineCall("POST", "/resume"))]}
    with client(small_engine) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/inference/v1/in_turn", json=body, timeout=httpx.Timeout(30, read=0.001))
    until(lambda: small_engine.state().policy_key == "after", lambda: "the reload was given up half done")
    until(small_engine.healthy, lambda: "it stayed paused")
    assert check_serving(small_engine, policy_row("after", models["b"]), ENGINE) < 1e-4
