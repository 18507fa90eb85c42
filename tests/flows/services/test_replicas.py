"""Two real engines serve one policy: the tokens of one engine, and a replica that is killed costs no row."""

import os
import signal
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest

from configs.environments import EnvironmentConfig
from flows.services.base import Supervisor
from flows.services.engine import InferenceService
from flows.services.learner import LearnerProcess
from tasks.inference.engine.client import OF_POLICY, Engine
from tasks.inference.sampling.sampler import BatchSampler
from tasks.learner.tiny import tiny_qwen3
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import assigned, examples_of, recorded_first, served, small_run, view_of
from tests.fixtures.sampled import collected, failures
from tests.fixtures.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
POLICY = Policy("first", 0)
REVERSE = EnvironmentConfig(name="reverse", taskset={"id": "sample_reverse_text", "num_examples": 20})


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Two replicas that serve the one policy in the store."""
    directory = tmp_path_factory.mktemp("replicas")
    model = tiny_qwen3(directory / "model", seed=3)
    context = small_run(directory, model, replicas=2)
    with Supervisor("a", directory / "logs") as supervisor:
        service = InferenceService(supervisor, context, model)
        service.begin()
        with Supervisor("learner", directory / "learner") as short_lived:
            learner = LearnerProcess(short_lived, context, service.asleep)
            recorded_first(context.store, "a", POLICY, learner.load_fresh(POLICY, model), model)
        until(lambda: len(service.serve(POLICY).urls) == 2, lambda: "there are no two replicas")
        yield service


def policy_at(engine, url):
    with closing(Engine(url, engine.key)) as client:
        return client.state().policy_key


def test_files_are_read_only_to_bring_or_prove_a_policy(engine, monkeypatch):
    engine.serve(POLICY)
    with monkeypatch.context() as unread:
        unread.setattr(type(engine._context.store.policies), "directory", lambda *_: pytest.fail("files are verified"))
        assert engine.serve(POLICY).urls


def tokens(groups):
    """The tokens of each member of each group, sampled ones and others, in order of the members."""
    found = {}
    for group_id, tables in groups.items():
        traces = tables["traces"].sort_by("assignment_id").to_pylist()
        assert not failures(traces)
        messages = tables["messages"].to_pylist()
        found[group_id] = [
            [token for row in messages if row["trace_id"] == trace["trace_id"] for token in row["token_ids"]]
            for trace in traces
        ]
    return found


def test_a_killed_replica_costs_no_row(engine, tmp_path):
    examples = examples_of(REVERSE)
    dealt = {}
    assignments = assigned("reverse", examples["example_id"].to_pylist()[:12], 4)

    def sample(address, model, on_first):
        groups, take = collected(on_first)
        sampler = BatchSampler(
            served={OF_POLICY: model},
            addresses={"reverse": (address,)},
            policy=POLICY,
            step=0,
            config=view_of(engine._source, REVERSE, max_in_flight=16),
            on_group=take,
        )
        deal = sampler.servers._replica

        def note(group_id):
            dealt[group_id] = deal(group_id)
            return dealt[group_id]

        sampler.servers._replica = note
        sampler.sample(assignments, examples)
        return groups

    def kill():
        os.kill(engine._handles["engine 2"].report["pid"], signal.SIGKILL)

    with served(REVERSE, tmp_path) as told, engine.pinned(POLICY) as both:
        alone = sample(told["address"], replace(both, other_urls=()), lambda: None)
        shared = sample(told["address"], both, lambda: None)
        assert min(Counter(dealt.values()).values()) >= 4 and {*dealt.values()} == {*both.urls}, dealt
        killed = sample(told["address"], both, kill)
    for groups in (shared, killed):
        assert tokens(groups) == tokens(alone), "tokens depend on assignments, and not on who samples"
    assert policy_at(engine, engine.serve(POLICY).url) == POLICY.key
    until(lambda: len(engine.serve(POLICY).urls) == 2, lambda: "the killed replica did not come back")
    assert engine._handles["engine 2"].generation == 2
