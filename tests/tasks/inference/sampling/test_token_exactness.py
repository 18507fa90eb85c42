"""Tokens of a tool environment with several turns: on the wire, in messages and in packed rows, one and the same."""

from dataclasses import dataclass

import pyarrow as pa
import pytest
from sample_lookup.demonstrations import demonstrations
from sample_lookup.words import words

from configs.environments import EnvironmentConfig
from configs.run import RunConfig, View
from tasks.inference.engine.client import ServedModel
from tasks.inference.engine.metrics import EngineMetrics
from tasks.learner.tiny import tiny_qwen3
from tasks.metrics.engines import engine_metrics
from tasks.metrics.rollouts import retokenised_turns
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import ENGINE, KEY, assigned, engine_of, examples_of, served
from tests.fixtures.proxy import Proxy, check_packed, check_wire, packed, recording
from tests.fixtures.sampled import sample
from tests.fixtures.warming import taught

pytestmark = pytest.mark.engine

LOOKUP = EnvironmentConfig(name="lookup", taskset={"id": "sample_lookup", "num_examples": 4}, max_turns=6)
RENDERER = {"enable_thinking": False}
SIZE = 5


@dataclass(frozen=True)
class Sampled:
    """Rollouts by a model that calls the tool, and the calls that they made."""

    proxy: Proxy
    tables: dict[str, pa.Table]
    counted: pa.Table

    @property
    def traces(self):
        return self.tables["traces"].to_pylist()

    @property
    def messages(self):
        return self.tables["messages"].to_pylist()


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
        "rollout": {"max_tokens": 24, "timeout_seconds": 240.0},
        "engine": ENGINE.model_copy(update={"max_model_len": 512}),
        "model": {"path": str(weights), "renderer": "qwen3", "renderer_settings": RENDERER},
    }
    config = RunConfig.model_validate(sections)
    examples = examples_of(LOOKUP)
    with (
        engine_of(weights, directory / "engine.json", config.engine, metrics=True) as engine,
        recording(engine.url) as proxy,
        served(LOOKUP, directory) as told,
    ):
        view = View(config, ("rollout", "environments", "engine", "model", "external"), "rollout")
        rows = assigned("lookup", examples["example_id"].to_pylist()[:2], SIZE)
        counted = EngineMetrics([ServedModel(engine.url, KEY)])
        with counted.measure():
            groups = sample(proxy.url, told["address"], view, rows, examples, policy=Policy("the policy", 0))
    tables = {name: pa.concat_tables([group[name] for group in groups.values()]) for name in ("traces", "messages")}
    return Sampled(proxy, tables, counted.take())


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


def test_the_engine_counted_what_was_sampled(sampled):
    found = engine_metrics(sampled.counted)
    assert found["engine/generation_tokens"] == sum(row["num_output_tokens"] for row in sampled.traces)
    assert found["engine/requests"] == len(sampled.proxy.calls) and found["engine/restarts"] == 0
    assert 0 < found["engine/first_token_seconds_mean"] <= found["engine/request_seconds_mean"]
    assert found["engine/generation_tokens_per_second"] > 0 and 0 < found["engine/prefix_cache_hit_rate"] < 1
