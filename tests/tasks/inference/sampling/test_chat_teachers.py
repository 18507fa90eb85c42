"""Teachers that chat APIs serve: their replies as tokens of the trained model, and every way in which they fail."""

import asyncio
import json
from collections import Counter
from types import SimpleNamespace

import pytest
from aiohttp import web
from verifiers.v1.types import AssistantMessage

from configs.algorithms import ChatTeacherConfig
from configs.environments import EnvironmentConfig
from configs.run import View
from storage.store import open_store
from storage.turns import TurnCache
from tasks.inference.engine.client import ServedModel
from tasks.inference.environments.chat_teacher import reply_tokens
from tasks.inference.sampling.sampler import BatchSampler
from tasks.inference.trace_rows.demonstrations import DemonstrationUnusable
from tasks.runtime.refs import Policy
from tests.fixtures.endpoints import endpoint
from tests.fixtures.hosts import KEY, SECTIONS, assigned, config_of, examples_of, served
from tests.fixtures.sampled import failures, own, rows_of, sample

pytestmark = pytest.mark.engine

REVERSE = EnvironmentConfig(name="reverse", taskset={"id": "sample_reverse_text", "num_examples": 20})
NO_THOUGHT = "<think>\n\n</think>\n\n"
GOOD, EMPTY, CUT, CALLING = ("<rev>cba</rev>", "stop"), (" ", "stop"), ("<rev>c", "length"), ("<tool_call>", "stop")
BUSY, LATER, BROKEN, SILENT = (429, {"Retry-After": "0.1"}), (503, {}), (500, {}), (None, {})
NONSENSE = (200, {})


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with served(REVERSE, tmp_path_factory.mktemp("reverse")) as told:
        yield told["address"]


@pytest.fixture(scope="module")
def examples():
    return examples_of(REVERSE)


@pytest.fixture
def view(models):
    """Builds the view of a rollout stage; the model answers without a thought."""

    def build(**rollout):
        config = config_of(models["a"], REVERSE, **rollout)
        model = config.model.model_copy(update={"renderer_settings": {"enable_thinking": False}})
        return View(config.model_copy(update={"model": model}), SECTIONS, "rollout")

    return build


def teacher(url, **settings):
    return ServedModel(url, KEY, "policy", chat=ChatTeacherConfig(url=url, model="policy", **settings))


@pytest.mark.essential
def test_a_real_teachers_text_becomes_the_tokens_that_it_sampled(small_engine, address, examples, view):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(view().model.path)
    (letter,), end = tokenizer.encode("a"), tokenizer.convert_tokens_to_ids("<|im_end|>")
    # A random model never ends by itself: these two tokens alone are likely.
    settings = {"logit_bias": {str(letter): 100, str(end): 100}, "min_tokens": 1}
    others = {"reverse": teacher(f"{small_engine.url}/v1", settings=settings)}
    rows = assigned("reverse", examples["example_id"].to_pylist()[:2], 4)
    groups = sample(small_engine.url, address, view(max_tokens=40), rows, examples, others=others)
    traces, messages = rows_of(groups, "traces"), rows_of(groups, "messages")
    assert not failures(traces) and KEY not in str(traces) + str(messages)
    for trace in traces:
        prompt, reply = own(trace, messages)
        fed = [{"role": "user", "content": prompt["content"]}]
        text = tokenizer.apply_chat_template(fed, tokenize=False, add_generation_prompt=True) + NO_THOUGHT
        sampled = [token for token, mask in zip(reply["token_ids"], reply["mask"], strict=True) if mask]
        assert sampled == [letter] * len(reply["content"]) + [end]
        assert tokenizer.decode([*prompt["token_ids"], *reply["token_ids"][: -len(sampled)]]) == text
        assert not any(reply["logprobs"]) and trace["policy_key"] == "" and trace["reward"] is not None
        assert json.loads(trace["info"])["teacher"] == "policy"
        (call,) = json.loads(trace["record"])["calls"]
        assert trace["num_output_tokens"] == len(sampled) == call["usage"]["completion_tokens"]


def sampled_by(behaviours, address, examples, view, turns=None):
    """The traces and messages of an example for each behaviour of a chat API, and how often it was asked for each.

    A behaviour is the answers in turn, of which the last is repeated.
    """
    counts, prompts, groups = Counter(), [], {}

    async def respond(request):
        assert request.headers["Authorization"] == f"Bearer {KEY}" and "X-Stagecoach-Chat" not in request.headers
        prompt = (await request.json())["messages"][0]["content"]
        answers = behaviours[next(number for number, text in enumerate(prompts) if text == prompt)]
        content, ended = answers[min(counts[prompt], len(answers) - 1)]
        counts[prompt] += 1
        if isinstance(content, int):
            return web.Response(status=content, headers=ended)
        if content is None:
            await asyncio.sleep(30)
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": ended}
        about = {"id": "1", "created": 1, "model": "m-2", "object": "chat.completion"}
        return web.json_response({**about, "choices": [choice]})

    async def run():
        rows = assigned("reverse", examples["example_id"].to_pylist()[: len(behaviours)], 1)
        prompts[:] = [json.loads(task)["prompt"] for task in examples["task"].to_pylist()[: len(behaviours)]]
        async with endpoint(respond) as url:
            others = {"reverse": teacher(f"{url}/v1", retries=1, answer_seconds=1.0)}
            arguments = {"served": others, "addresses": {"reverse": (address,)}, "policy": Policy("", 0), "step": 0}
            arguments |= {"config": view(max_attempts=2), "on_group": groups.__setitem__, "turns": turns}
            await asyncio.to_thread(BatchSampler(**arguments).sample, rows, examples)
        return rows_of(groups, "traces"), rows_of(groups, "messages")

    traces, messages = asyncio.run(run())
    traces.sort(key=lambda row: examples["example_id"].to_pylist().index(row["example_id"]))
    return traces, messages, [counts[prompt] for prompt in prompts]


def test_what_fails_once_is_sent_again_and_what_fails_always_is_an_error(address, examples, view):
    passing = [[BUSY, GOOD], [LATER, GOOD], [SILENT, GOOD], [NONSENSE, GOOD], [EMPTY, GOOD], [CUT, GOOD]]
    traces, messages, counts = sampled_by([*passing, [EMPTY], [CUT], [CALLING], [BROKEN]], address, examples, view)
    assert not failures(traces[:6]) and counts[:9] == [2] * 9 and counts[9] > 2
    assert all(json.loads(row["info"])["teacher"] == "m-2" for row in traces[:6])
    for row, said in zip(traces[6:], ("it is empty", "cut off", "the renderer writes", "500"), strict=True):
        assert said in row["error_message"] and row["reward"] is None
        assert row["error_class"] == ("infrastructure" if said == "500" else "model")
        assert not any(any(message["mask"]) for message in own(row, messages)), "there is nothing to train on"


def test_replies_that_were_kept_are_not_asked_for_again(address, examples, view, tmp_path):
    turns = TurnCache(open_store(tmp_path), "run")
    first = sampled_by([[GOOD], [GOOD]], address, examples, view, turns)
    again = sampled_by([[GOOD], [BROKEN]], address, examples, view, turns)
    assert first[2] == [1, 1] and again[2] == [0, 0] and not failures(again[0])
    # Groups are handed over in the order in which they end.
    assert sorted(row["token_ids"] for row in first[1]) == sorted(row["token_ids"] for row in again[1])


@pytest.mark.parametrize("tool", [("custom", None), ("function", "files")])
def test_tools_that_are_no_plain_functions_are_refused(tool):
    reply = SimpleNamespace(message=AssistantMessage(content="done"), finish_reason="stop")
    turn = SimpleNamespace(prompt=[], tools=[SimpleNamespace(type=tool[0], namespace=tool[1])])
    with pytest.raises(DemonstrationUnusable, match="no plain functions"):
        reply_tokens(None, reply, turn)
