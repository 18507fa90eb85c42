"""Every model call of a rollout has a random stream of its own: distributions, forks, retries, both routes, a crash."""

import asyncio
import json
from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from verifiers.v1.clients import Client, ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.state import State
from verifiers.v1.types import AssistantMessage, SamplingConfig, ToolCall, ToolMessage, UserMessage

from configs.environments import EnvironmentConfig
from storage.store import open_store
from storage.turns import TurnCache
from tasks.inference.environments import agent_runs
from tasks.inference.environments.agent_runs import (
    ENGINE_SEED_BITS,
    NUM_SEEDS,
    SEED_STRIDE,
    AgentRun,
    call_seed,
    play_episode,
    prompt_digest,
)
from tasks.inference.environments.model_client import CHAT_API_SEED_BITS, SeededClient, resolve_seeded_client
from tests.fixtures.faults import happened
from tests.fixtures.flagged import flagged
from tests.fixtures.hosts import assigned, examples_of, served, view_of
from tests.fixtures.proxy import recording
from tests.fixtures.sampled import failures, own, rows_of, sample

pytestmark = pytest.mark.engine

NUM_ROLLOUTS = 4_000
TWO_TURNS = EnvironmentConfig(name="two", taskset={"id": "two_turns"})
DIALECT = ChatDialect()


class Coin(Client):
    """Answers a call with 0 or 1, drawn as engines draw: by a generator that begins with the seed of the request."""

    def __init__(self, faults=()):
        self.faults = list(faults)
        self.seeds = []
        self.bodies = []

    async def get_response(self, dialect, body, sampling, *others, **named):
        self.seeds.append(sampling.seed)
        self.bodies.append(body["seed"])
        await asyncio.sleep(0)
        if self.faults and (fault := self.faults.pop(0)):
            raise fault
        generator = torch.Generator().manual_seed(sampling.seed)
        return int(torch.rand(1, generator=generator) < 0.5)

    async def relay(self, dialect, body, *others, **named):
        self.bodies.append(body["seed"])
        return 0


def trace(seed, name="s"):
    """A trace as verifiers mints it for an agent run with a seed."""
    config = AgentConfig(sampling=None if seed is None else SamplingConfig(seed=seed))
    agent = SimpleNamespace(name="agent", config=config, trainable=True)
    return SimpleNamespace(id=name, info={}, agent=agent, state=State())


def seeded(client, seed):
    """A client whose calls of session "s" are those of a run with a seed."""
    agent_runs._runs["s"] = AgentRun(trace(seed), 0, None)
    return SeededClient(client, ENGINE_SEED_BITS)


async def call(client, *texts):
    """Ask for a reply to messages of a user and a model that take turns."""
    roles = [UserMessage, AssistantMessage] * len(texts)
    prompt = [role(content=text) for role, text in zip(roles, texts, strict=False)]
    turn = SimpleNamespace(prompt=prompt)
    return await client.get_response(DIALECT, {}, SamplingConfig(seed=0), turn=turn, session_id="s", headers={})


async def play(run_seed):
    """Play a rollout of three turns whose replies are 0 or 1."""
    client, texts, replies = seeded(Coin(), run_seed), ["begin"], []
    for _ in range(3):
        replies.append(await call(client, *texts))
        texts += [str(replies[-1]), "again"]
    return tuple(replies)


def test_replies_of_three_turns_are_independent():
    """All eight outcomes of three fair choices are within five standard errors of an eighth."""

    async def outcomes():
        return Counter([await play(seed) for seed in range(NUM_ROLLOUTS)])

    counts = asyncio.run(outcomes())
    expected = NUM_ROLLOUTS / 8
    error = (expected * 7 / 8) ** 0.5
    for outcome in product((0, 1), repeat=3):
        assert abs(counts[outcome] - expected) < 5 * error, counts


def seeds_of(coin, *prompts, run_seed=7):
    """Make calls with these prompts, one after another; return the seeds that were sent."""
    client = seeded(coin, run_seed)

    async def make_calls():
        for prompt in prompts:
            try:
                await call(client, *prompt)
            except RuntimeError:
                continue

    asyncio.run(make_calls())
    return coin.seeds


def test_the_first_call_keeps_the_seed_of_the_run_and_no_two_calls_share_one():
    prompts = [("a",), ("a", "b", "c"), ("a",), ("a", "b", "c"), ("fresh",), ("a",)]
    coin = Coin()
    seeds = seeds_of(coin, *prompts)
    assert seeds[0] == 7 and len(set(seeds)) == len(prompts)
    assert coin.bodies == seeds, "the trace records the body: it says with which seed a call was sampled"
    assert seeds == seeds_of(Coin(), *prompts), "played again, the rollout asks for the same"
    assert not set(seeds) & set(seeds_of(Coin(), *prompts, run_seed=8))


@pytest.mark.fault("services", "a model call fails", "it is sent again with its seed, which no other turn has")
def test_a_call_that_failed_is_sent_again_with_its_seed():
    lost = RuntimeError("the engine is gone")
    happened(repr(lost))
    prompts = [("a",), ("a",), ("a", "b", "c"), ("a", "b", "c"), ("a", "b", "c")]
    seeds = seeds_of(Coin([lost, None, lost, None, None]), *prompts)
    assert seeds[0] == seeds[1] == 7 and seeds[2] == seeds[3]
    assert seeds[4] not in seeds[:4], "the reply before it was read: this is another draw"


def test_parallel_branches_get_the_same_seeds_in_any_order():
    """Two of them have one prompt; only which of the two has which seed depends on the order."""
    branches = [("a", "b", "one"), ("a", "b", "two"), ("a", "b", "two"), ("a", "b", "three")]

    def seeds(order):
        coin = Coin()
        client = seeded(coin, 7)

        async def make_calls():
            await call(client, "a")
            await asyncio.gather(*(call(client, *prompt) for prompt in order))

        asyncio.run(make_calls())
        assert len(set(coin.seeds)) == 1 + len(order)
        found = {}
        for prompt, seed in zip(order, coin.seeds[1:], strict=True):
            found.setdefault(prompt, set()).add(seed)
        return found

    assert seeds(branches) == seeds(branches[::-1])


def test_the_seed_of_a_call_has_the_bits_that_its_receiver_takes():
    seeds = [[call_seed(7, f"{number}", 0, bits) for number in range(200)] for bits in (63, 31)]
    assert 2**62 < max(seeds[0]) < 2**63 and 2**30 < max(seeds[1]) < 2**31


def test_ids_that_a_chat_api_draws_at_random_are_in_no_seed():
    def prompt(number, arguments):
        made = ToolCall(id=f"call-{number}", name="look", arguments=arguments)
        state = [{"opaque": number}]
        reply = AssistantMessage(content=None, tool_calls=[made], provider_state=state)
        return [UserMessage(content="a"), reply, ToolMessage(tool_call_id=made.id, content="found")]

    assert prompt_digest(prompt(1, "{}")) == prompt_digest(prompt(2, "{}"))
    assert prompt_digest(prompt(1, "{}")) != prompt_digest(prompt(1, '{"at": 1}'))


@pytest.mark.parametrize(
    ("config", "bits"), [(TrainClientConfig(), ENGINE_SEED_BITS), (EvalClientConfig(), CHAT_API_SEED_BITS)]
)
def test_engines_and_chat_apis_are_called_by_a_seeded_client(config, bits):
    body = {"messages": [{"role": "user", "content": "a"}]}
    again = {"messages": [*body["messages"], {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]}

    async def make_calls():
        client = resolve_seeded_client(config)
        await client.close()
        client._client = coin = Coin()
        seeded(coin, 7)
        await client.relay(DIALECT, dict(body), session_id="s", headers={})
        await client.get_response(DIALECT, dict(again), SamplingConfig(seed=7), session_id="s")
        await client.relay(DIALECT, dict(again), session_id="s", headers={})
        return list(coin.bodies)

    first, second, third = asyncio.run(make_calls())
    digest = prompt_digest(DIALECT.parse_request(again).messages)
    assert (first, second, third) == (7, call_seed(7, digest, 0, bits), call_seed(7, digest, 1, bits))


def test_runs_of_an_episode_have_seeds_by_their_order_and_are_forgotten_with_it():
    traces = [trace(NUM_SEEDS - 1, f"{number}") for number in range(3)]
    context = ModelContext(model="m", client=EvalClientConfig())

    async def run_episode(env, task, ctx, *, on_trace):
        for minted in traces:
            on_trace(minted)
        assert {*agent_runs._runs} >= {"0", "1", "2"}

    asyncio.run(play_episode(run_episode, SimpleNamespace(), None, context))
    seeds = [minted.agent.config.sampling.seed for minted in traces]
    assert seeds == [NUM_SEEDS - 1, SEED_STRIDE - 1, 2 * SEED_STRIDE - 1]
    assert not {*agent_runs._runs} & {"0", "1", "2"}


@pytest.fixture(scope="module")
def play_two_turns(models, tmp_path_factory, plugins_of_module):
    """Samples rollouts of two turns from an engine; returns the tokens of their turns by assignment."""
    examples, config = examples_of(TWO_TURNS), view_of(models["a"], TWO_TURNS)
    with served(TWO_TURNS, tmp_path_factory.mktemp("two")) as server:

        def sample_tokens(url, example_ids, group_size, **options):
            rows = assigned("two", list(example_ids), group_size)
            groups = sample(url, server["address"], config, rows, examples, **options)
            traces, messages = rows_of(groups, "traces"), rows_of(groups, "messages")
            assert failures(traces) == []
            recorded = [[each["sampling"]["seed"] for each in json.loads(row["record"])["calls"]] for row in traces]
            assert all(len(set(seeds)) == 2 for seeds in recorded), "each call is recorded with its seed"
            return {row["assignment_id"]: sampled_turns(row, messages) for row in traces}

        yield sample_tokens


def sampled_turns(trace, messages):
    """The tokens that the model sampled in each turn of a trace."""
    turns = sorted((row for row in own(trace, messages) if row["sampled"]), key=lambda row: row["message"])
    return [flagged(row["token_ids"], row["mask"]) for row in turns]


def test_a_rollout_that_is_resumed_in_its_middle_is_the_same_rollout(small_engine, play_two_turns, tmp_path):
    """The answers to the first turns are kept, those to the second were lost with the process."""
    with recording(small_engine.url) as proxy:
        kept = TurnCache(open_store(tmp_path / "whole"), "run")
        whole = play_two_turns(proxy.url, ["t0", "t1"], 3, turns=kept)
        asked, left = list(proxy.calls), TurnCache(open_store(tmp_path / "left"), "run")
        assert len(asked) == 12
        first = {each.seed for each in asked} & {100 * number + member for number in range(2) for member in range(3)}
        answers = {json.dumps(each.sampled) for each in asked if each.seed in first}
        turns = [turn for group in ("t0", "t1") for turn in kept.of(group)]
        for turn in turns:
            if json.dumps(json.loads(turn.answer)["choices"][0]["token_ids"]) in answers:
                left.put(turn)
        again = play_two_turns(proxy.url, ["t0", "t1"], 3, turns=left)
        sampled_again = proxy.calls[12:]
    assert again == whole
    assert {each.seed for each in sampled_again} == {each.seed for each in asked} - first, "the first are not sampled"
