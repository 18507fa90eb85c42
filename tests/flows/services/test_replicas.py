"""A real engine joins a run in the middle of a batch, leaves it in another, and is killed in a third; so is its own."""

import json
import os
import signal
from contextlib import closing, contextmanager, suppress

import pytest

from configs.environments import EnvironmentConfig
from flows.services.base import Supervisor
from flows.services.engine import InferenceService
from flows.services.learner import LearnerProcess
from storage.records import JOIN, LEAVE, LEFT
from tasks.inference.engine.client import OF_POLICY, Engine, EngineLost
from tasks.inference.sampling.sampler import BatchSampler
from tasks.learner.tiny import tiny_qwen3
from tasks.runtime.stage import Policy
from tests.fixtures.engine_calls import paused
from tests.fixtures.hosts import (
    ENGINE,
    KEY,
    assigned,
    engine_of,
    examples_of,
    recorded_first,
    served,
    small_run,
    view_of,
)
from tests.fixtures.sampled import collected, failures
from tests.fixtures.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
POLICY = Policy("first", 0)
REVERSE = EnvironmentConfig(name="reverse", taskset={"id": "sample_reverse_text", "num_examples": 20})
NUM_GROUPS, MEMBERS = 12, 4


class Run:
    """A run with one engine of its own; `other` is the address of one that may join."""

    def __init__(self, service, address):
        self.service, self.address = service, address
        self.runs, self.told = service._context.store.runs, []
        self.examples = examples_of(REVERSE)
        self.assignments = assigned("reverse", self.examples["example_id"].to_pylist()[:NUM_GROUPS], MEMBERS)

    def record(self, event):
        self.runs.record(run="a", event=event, message=self.other)

    def sample(self, on_first=lambda pool: None):
        """Sample the batch; return the tokens of each rollout, and note the engines that it was placed at."""
        places = self.places = {}
        with self.service.pinned(POLICY) as model:
            groups, take = collected(lambda: on_first(sampler.servers))
            sampler = BatchSampler(
                served={OF_POLICY: model},
                addresses={"reverse": (self.address,)},
                policy=POLICY,
                step=0,
                config=view_of(self.service._source, REVERSE, max_in_flight=6),
                on_group=take,
                find=[self.service.addresses_now],
            )
            play = sampler.servers.play

            async def note(placed, *request):
                places.setdefault(placed.assignment_id, []).append(placed.replica)
                return await play(placed, *request)

            sampler.servers.play = note
            sampler.sample(self.assignments, self.examples)
        return tokens(groups)

    def kill_in_a_batch(self, url, pid):
        """Sample a batch in which an engine is killed; return the tokens."""

        def kill(pool):
            with stopped(pool, url):
                os.kill(pid, signal.SIGKILL)
                until(lambda: url not in pool.addresses[OF_POLICY], lambda: "its loss was not noticed")

        killed = self.sample(kill)
        assert any(url in visited and visited[-1] != url for visited in self.places.values())
        return killed


def tokens(groups):
    """The tokens of each message of each rollout, by assignment; each rollout is there once."""
    found = {}
    for tables in groups.values():
        traces, messages = tables["traces"].to_pylist(), tables["messages"].to_pylist()
        assert not failures(traces)
        for trace in traces:
            own = [row["token_ids"] for row in messages if row["trace_id"] == trace["trace_id"]]
            assert found.setdefault(trace["assignment_id"], own) is own
    assert len(found) == NUM_GROUPS * MEMBERS
    return found


def names_at(pool, url):
    return {rollout.assignment_id for rollout in [*pool.in_flight.values()] if rollout.replica == url}


@contextmanager
def stopped(pool, url):
    """Within the block an engine has rollouts that get no further: the batch cannot end there."""
    with suppress(EngineLost), closing(Engine(url, KEY)) as engine, paused(engine, clear_cache=False):
        until(lambda: names_at(pool, url), lambda: "no rollout goes there")
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("replicas")
    model, report = tiny_qwen3(directory / "model", seed=3), directory / "other.json"
    context = small_run(directory, model, replicas=[1, 2])
    with pytest.MonkeyPatch.context() as patch, Supervisor("a", directory / "logs") as supervisor:
        patch.setenv(ENGINE.api_key_variable, KEY)
        service = InferenceService(supervisor, context, model)
        service.begin()
        with Supervisor("learner", directory / "learner") as short_lived:
            learner = LearnerProcess(short_lived, context, service.asleep)
            recorded_first(context.store, "a", POLICY, learner.load_fresh(POLICY, model), model)
        context.store.runs.record(run="a", event="started", kind="train", config={})
        with served(REVERSE, directory) as told, engine_of(tiny_qwen3(directory / "other", seed=4), report) as other:
            run = Run(service, told["address"])
            run.other, run.pid = other.url, json.loads(report.read_text())["pid"]
            with supervisor.subscribe(lambda event, **facts: run.told.append(facts.get("text", event))):
                run.alone = run.sample()
                yield run


def test_files_are_read_only_to_bring_or_prove_a_policy(run, monkeypatch):
    run.service.serve(POLICY)
    with monkeypatch.context() as unread:
        unread.setattr(type(run.service._context.store.policies), "directory", lambda *_: pytest.fail("verified"))
        assert run.service.serve(POLICY).urls


def test_an_engine_joins_in_the_middle_of_a_batch_with_the_weights_of_the_policy(run):
    (own,) = run.service.serve(POLICY).urls

    def join(pool):
        with stopped(pool, own):
            run.record(JOIN)
            until(lambda: run.other in pool.addresses[OF_POLICY], lambda: f"it did not join: {run.told}")

    assert run.sample(join) == run.alone, "it has other weights than the policy, perhaps those it was started with"
    assert {place for (place,) in run.places.values()} == {own, run.other}
    told = f"engine at {run.other}: it has joined the run, with policy first"
    assert [text for text in run.told if "joined" in text] == [told]


def test_an_engine_that_leaves_ends_its_rollouts_and_gets_no_others(run):
    kept = set()

    def leave(pool):
        with stopped(pool, run.other):
            run.record(LEAVE)
            until(lambda: run.other not in pool.addresses[OF_POLICY], lambda: f"it did not leave: {run.told}")
            kept.update(name for name, visited in run.places.items() if run.other in visited)
            assert names_at(pool, run.other) <= kept and run.runs.engine_events("a")[run.other] == LEAVE

    run.record(JOIN)
    assert run.sample(leave) == run.alone
    assert {name for name, visited in run.places.items() if run.other in visited} == kept != run.places.keys()
    assert all(len(visited) == 1 for visited in run.places.values()), "a rollout was not ended where it was"
    assert run.sample() == run.alone and not any(run.other in visited for visited in run.places.values())
    assert run.runs.engine_events("a")[run.other] == LEFT


def test_a_killed_engine_of_the_run_costs_no_row_and_is_back_in_the_midst_of_it(run):
    run.record(JOIN)
    own, _ = run.service.serve(POLICY).urls
    handle = run.service._handles["engine"]
    assert run.kill_in_a_batch(own, handle.report["pid"]) == run.alone

    def wait(pool):
        with stopped(pool, run.other):
            until(lambda: len(pool.addresses[OF_POLICY]) == 2, lambda: "the killed engine did not come back")

    assert run.sample(wait) == run.alone
    assert handle.generation == 2 and any(handle.report["url"] in visited for visited in run.places.values())


def test_a_killed_engine_that_had_joined_costs_no_row(run):
    assert run.kill_in_a_batch(run.other, run.pid) == run.alone
    assert run.other not in run.service.addresses_now(())[OF_POLICY] and "takes no rollouts" in run.told[-1], run.told
