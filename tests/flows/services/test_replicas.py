"""Two real engines serve one policy: the tokens of one engine, and a replica that is killed costs no row."""

import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest

from configs.environments import EnvironmentConfig
from flows.services import engine as services
from flows.services.base import Supervisor
from flows.services.engine import InferenceService
from flows.services.learner import LearnerProcess
from tasks.inference.engine.client import OF_POLICY, Engine
from tasks.inference.environments import servers as environments
from tasks.inference.sampling.sampler import BatchSampler
from tasks.learner.tiny import tiny_qwen3
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import assigned, recorded_first, served, small_run, view_of
from tests.fixtures.sampled import collected, failures
from tests.fixtures.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
POLICY, NEXT = Policy("first", 0), Policy("next", 1)
REVERSE = EnvironmentConfig(name="reverse", taskset={"id": "sample_reverse_text", "num_examples": 20})


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Two replicas, and two policies in the store, of which they serve the first."""
    directory = tmp_path_factory.mktemp("replicas")
    model, other = tiny_qwen3(directory / "model", seed=3), tiny_qwen3(directory / "other", seed=4)
    context = small_run(directory, model, replicas=2)
    with Supervisor("a", directory / "logs") as supervisor:
        service = InferenceService(supervisor, context, model)
        service.begin()
        with Supervisor("learner", directory / "learner") as short_lived:
            learner = LearnerProcess(short_lived, context, service.asleep)
            for policy, source in ((POLICY, model), (NEXT, other)):
                recorded_first(context.store, "a", policy, learner.load_fresh(policy, source), source)
        until(lambda: len(service.serve(POLICY).urls) == 2, lambda: "there are no two replicas")
        yield service


def served_keys(engine):
    """The policies that the replicas say they serve; nobody is brought to another one."""
    return {policy_at(engine, handle.wait()["url"]) for handle in engine.handles}


def policy_at(engine, url):
    with closing(Engine(url, engine.key)) as client:
        return client.state().policy_key


def test_a_policy_that_is_expected_is_there_before_anybody_asks_for_it(engine):
    with engine.pinned(POLICY):
        engine.preload(NEXT)
        until(lambda: engine._policy_lock._waiting == [NEXT.key], lambda: "nobody waits for the next policy")
        assert served_keys(engine) == {POLICY.key}, "who samples has the engine to the end"
    until(lambda: served_keys(engine) == {NEXT.key}, lambda: f"the engines serve {served_keys(engine)}")


def test_who_waits_while_a_policy_is_brought_does_not_bring_it_again(engine, monkeypatch):
    bring, seen, asked = InferenceService._load, [], []
    ready_urls = services._ready_urls

    def count(*given, **named):
        asked.append(True)
        return ready_urls(*given, **named)

    def slow(self, policy, url, *others):
        seen.append(url)
        until(lambda: len(asked) >= 2, lambda: "nobody else asks for the policy")
        time.sleep(0.2)  # what it does before it waits takes no time
        return bring(self, policy, url, *others)

    monkeypatch.setattr(InferenceService, "_load", slow)
    monkeypatch.setattr(services, "_ready_urls", count)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(engine.serve, POLICY)
        until(lambda: seen, lambda: "nobody brings the policy")
        second = threads.submit(engine.serve, POLICY)
        assert first.result() is second.result()
    assert len(seen) == 2, "each replica is asked once"
    assert engine.serve(POLICY) is not first.result() and len(seen) == 4, "who comes later asks the engines"


def test_files_are_read_only_to_bring_or_prove_a_policy(engine, monkeypatch):
    engine.serve(POLICY)
    with monkeypatch.context() as unread:
        unread.setattr(type(engine._context.store.policies), "directory", lambda *_: pytest.fail("files are verified"))
        assert engine.serve(POLICY).urls


def test_a_policy_that_cannot_be_brought_early_is_told_to_who_asks_for_it(engine, caplog):
    absent = Policy("absent", 2)
    with caplog.at_level("INFO", "flows.services.engine"):
        engine.preload(absent)
        until(lambda: "policy absent was not preloaded" in caplog.text, lambda: "nothing was tried")
    with pytest.raises(Exception, match="absent"):
        engine.serve(absent)
    assert engine.serve(POLICY).urls, "the engines go on"


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
    examples = environments.examples(REVERSE)
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
            serve_policy=partial(engine.serve, POLICY),
        )
        deal = sampler.servers._replica

        def note(group_id):
            dealt[group_id] = deal(group_id)
            return dealt[group_id]

        sampler.servers._replica = note
        sampler.sample(assignments, examples)
        return groups

    def kill():
        os.kill(engine._handles["engine 2"].pid, signal.SIGKILL)

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
