"""Tokens of a tool environment with several turns: on the wire, in messages and in packed rows, one and the same.

Its engine tells how busy it is: rollouts are sampled with the limit that follows from that, and none goes on before
more are under way than there may be at first.
"""

import asyncio
from dataclasses import dataclass

import pyarrow as pa
import pytest
from sample_lookup.demonstrations import demonstrations
from sample_lookup.words import words

from configs.environments import EnvironmentConfig
from configs.run import RunConfig, View
from tasks.inference.engine.client import ServedModel
from tasks.inference.engine.metrics import EngineMetrics
from tasks.inference.environments import servers as environments
from tasks.inference.sampling.limits import INITIAL_LIMIT, AdaptiveLimit, Limiter
from tasks.inference.sampling.load_meter import follow_loads
from tasks.learner.tiny import tiny_qwen3
from tasks.metrics.engines import engine_metrics
from tasks.metrics.rollouts import retokenised_turns
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import ENGINE, KEY, assigned, engine_of, served
from tests.fixtures.proxy import Proxy, check_packed, check_wire, packed, recording
from tests.fixtures.sampled import sample
from tests.fixtures.waiting import PATIENCE
from tests.fixtures.warming import taught

pytestmark = pytest.mark.engine

LOOKUP = EnvironmentConfig(name="lookup", taskset={"id": "sample_lookup", "num_examples": 4}, max_turns=6)
RENDERER = {"enable_thinking": False}
MOST, SIZE = 64, 5
TOGETHER = INITIAL_LIMIT + 1
"""Rollouts of which each waits with its first call until the others have made theirs: more than there may be at first.
"""


@dataclass(frozen=True)
class Sampled:
    """Rollouts by a model that calls the tool, the calls that they made, and how a limit was moved meanwhile."""

    proxy: Proxy
    tables: dict[str, pa.Table]
    limits: list[int]
    without_metrics: int
    counted: pa.Table

    @property
    def traces(self):
        return self.tables["traces"].to_pylist()

    @property
    def messages(self):
        return self.tables["messages"].to_pylist()


async def steered(url):
    """The limits that an engine at rest gives a crowd that is held back by each of them."""
    adaptive, limits = AdaptiveLimit(limiter := Limiter(MOST)), [limiter.limit]

    def adjust(load):
        adaptive.adjust(load)
        limits.append(limiter.limit)

    crowd = [asyncio.create_task(limiter.__aenter__()) for _ in range(2 * MOST)]
    moving = asyncio.create_task(follow_loads(lambda: [ServedModel(url, KEY)], adjust))
    async with asyncio.timeout(PATIENCE):
        while len(limits) < 4 and not moving.done():
            await asyncio.sleep(0.05)
    for task in (moving, *crowd):
        task.cancel()
    await asyncio.gather(moving, *crowd, return_exceptions=True)
    return limits


async def unsteered(url):
    """The limit that an engine leaves which has no metrics."""
    adaptive = AdaptiveLimit(limiter := Limiter(MOST))
    async with asyncio.timeout(PATIENCE):
        await follow_loads(lambda: [ServedModel(url, KEY)], adaptive.adjust)
    return limiter.limit


def calling(directory):
    """A model that calls the tool, or says in tags what it found."""
    tiny_qwen3(directory, hidden=96, layers=2, heads=3, kv_heads=3, words=words())
    rows = demonstrations(320, seed=1, right=0.8, reminded=0.2)
    return taught(directory, RENDERER, ((row["messages"], row["tools"]) for row in rows))


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lookup")
    weights = calling(directory / "model")
    sections = {
        "environments": (LOOKUP,),
        "rollout": {"max_tokens": 24, "timeout_seconds": 240.0, "adaptive_in_flight": True, "max_in_flight": MOST},
        "engine": ENGINE.model_copy(update={"max_model_len": 512}),
        "model": {"path": str(weights), "renderer": "qwen3", "renderer_settings": RENDERER},
    }
    config = RunConfig.model_validate(sections)
    examples = environments.examples(LOOKUP)
    with (
        engine_of(weights, directory / "engine.json", config.engine, metrics=True) as engine,
        recording(engine.url) as proxy,
        served(LOOKUP, directory) as told,
    ):
        proxy.together = TOGETHER
        view = View(config, ("rollout", "environments", "engine", "model", "external"), "rollout")
        rows = assigned("lookup", examples["example_id"].to_pylist()[:2], SIZE)
        counted = EngineMetrics([ServedModel(engine.url, KEY)])
        with counted.measure():
            groups = sample(proxy.url, told["address"], view, rows, examples, policy=Policy("the policy", 0))
        limits, without = asyncio.run(steered(engine.url)), asyncio.run(unsteered(f"{engine.url}/nothing"))
    tables = {name: pa.concat_tables([group[name] for group in groups.values()]) for name in ("traces", "messages")}
    return Sampled(proxy, tables, limits, without, counted.table())


def test_every_turn_is_what_went_over_the_wire(sampled):
    calls, traces = sampled.proxy.calls, sampled.traces
    assert [row["error_message"] for row in traces] == [None] * 2 * SIZE
    assert check_wire(calls, traces, sampled.messages) == len(calls) > len(traces)
    assert any(row["role"] == "tool" for row in sampled.messages), "a model that calls no tool would show nothing"


def test_packed_rows_hold_the_same_tokens_and_each_sampled_one_once(sampled):
    credits, batches = packed(sampled.tables["traces"], sampled.tables["messages"], 512)
    check_packed(credits, batches, sampled.messages)
    assert len(credits) == 2 * SIZE, "one sample for each rollout"


def test_no_turn_is_tokenised_again(sampled):
    assert [row["num_branches"] for row in sampled.traces] == [1] * 2 * SIZE
    assert retokenised_turns(sampled.tables["messages"]) == {}


def test_a_changed_token_would_be_noticed(sampled):
    messages = sampled.messages
    answer = next(row for row in messages if row["sampled"])
    answer["token_ids"] = [answer["token_ids"][0] + 1, *answer["token_ids"][1:]]
    with pytest.raises(AssertionError):
        check_wire(sampled.proxy.calls, sampled.traces, messages)


def test_all_rollouts_end_though_more_than_the_first_limit_wait_for_each_other(sampled):
    assert len({call.session for call in sampled.proxy.calls}) == 2 * SIZE > TOGETHER > INITIAL_LIMIT
    assert len({row["trace_id"] for row in sampled.traces}) == 2 * SIZE


def test_a_limit_starts_small_and_grows_while_the_engine_keeps_up(sampled):
    assert sampled.limits[:4] == [INITIAL_LIMIT, INITIAL_LIMIT + 4, INITIAL_LIMIT + 8, INITIAL_LIMIT + 12]


def test_an_engine_without_metrics_is_left_alone(sampled):
    assert sampled.without_metrics == MOST


def test_the_engine_counted_what_was_sampled(sampled):
    found = engine_metrics(sampled.counted)
    assert found["engine/generation_tokens"] == sum(row["num_output_tokens"] for row in sampled.traces)
    assert found["engine/requests"] == len(sampled.proxy.calls) and found["engine/restarts"] == 0
    assert 0 < found["engine/first_token_seconds_mean"] <= found["engine/request_seconds_mean"]
    assert found["engine/generation_tokens_per_second"] > 0 and 0 < found["engine/prefix_cache_hit_rate"] < 1
