"""Engines that join a run, without one: who may, who is refused and named, and how the run waits for enough of them."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from configs.run import RunConfig
from configs.services import EngineConfig
from flows.services.base import Supervisor
from flows.services.engine import InferenceService
from flows.services.process import ServiceFailed
from storage.records import JOIN, LEAVE
from storage.store import open_store
from tasks.inference.engine.checks import EngineMismatch
from tasks.inference.engine.client import OF_POLICY, EngineLost, ServedModel
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy
from tests.fixtures.waiting import until

OWN, A, B, C = (f"http://127.0.0.1:{port}" for port in (1, 2, 3, 4))
FIRST, SECOND = Policy("first", 0), Policy("second", 1)


class Service(InferenceService):
    """The service of a run whose engines are names: each holds any policy, or has a problem."""

    def __init__(self, supervisor, context, source):
        super().__init__(supervisor, context, source)
        self.problems, self.loads = {}, []
        self.own = [SimpleNamespace(alive=True, report={"url": OWN}, ready_now=self.own_report, wait=self.fail)]

    handles = property(lambda self: self.own)

    def own_report(self):
        return None if OWN in self.problems else {"url": OWN}

    def fail(self):
        raise ServiceFailed("it was stopped")

    def _replicas(self, source):
        return self.own

    def _base(self, policy):
        return ""

    def _load(self, policy, url, recompute=True):
        self.loads.append((url, policy.key))
        if problem := self.problems.get(url):
            raise problem
        self._verified[url] = policy.key
        return ServedModel(url, "")


@pytest.fixture
def run_of(tmp_path):
    @contextmanager
    def opened(replicas):
        config = RunConfig(name="a", kind="train", engine=EngineConfig(replicas=replicas))
        context = RunContext(open_store(tmp_path / "store"), "a", config, {})
        runs = context.store.runs
        runs.record(run="a", event="started", kind="train", config={})
        with Supervisor("a", tmp_path / "logs") as supervisor:
            service, told = Service(supervisor, context, tmp_path), []

            def record(event, url):
                runs.record(run="a", event=event, message=url)

            with supervisor.subscribe(lambda event, **facts: told.append((event, facts["text"]))):
                yield service, record, told

    return opened


def test_engines_join_up_to_the_upper_bound_and_in_their_order(run_of):
    with run_of((1, 3)) as (service, record, told):
        assert service.serve(FIRST).urls == (OWN,)
        for url in (OWN, A, B, C):
            record(JOIN, url)
        assert service.addresses_now({OWN})[OF_POLICY] == {OWN, A, B}, "an engine of the run's own is no other one"
        record(LEAVE, A)
        assert service.addresses_now({OWN, A, B})[OF_POLICY] == {OWN, B, C}
        assert service.addresses_now({OWN, B, C})[OF_POLICY] == {OWN, B, C} and "has left" in told[-1][1]
        assert service.serve(SECOND).urls == (OWN, B, C)
    assert service.loads.count((A, "first")) == 1, "engines with rollouts are not asked"


def test_one_that_cannot_prove_its_weights_or_is_lost_is_dismissed_once_and_may_join_again(run_of):
    with run_of((1, 2)) as (service, record, told):
        record(JOIN, A)
        service.problems[A] = EngineMismatch("it holds other weights")
        assert service.serve(FIRST).urls == (OWN,)
        assert service.addresses_now({OWN})[OF_POLICY] == {OWN} and service.loads.count((A, "first")) == 1
        del service.problems[A]
        record(JOIN, A)
        assert service.serve(SECOND).urls == (OWN, A)
        service.problems[A] = EngineLost("it is gone")
        assert service.addresses_now({OWN})[OF_POLICY] == {OWN} == service.addresses_now({OWN})[OF_POLICY]
    assert told == [
        ("note", f"engine at {A}: it takes no rollouts; it holds other weights"),
        ("note", f"engine at {A}: it has joined the run, with policy second"),
        ("lost", f"engine at {A}: it takes no rollouts; it is gone"),
    ]


def test_one_that_joins_again_is_behind_those_that_serve(run_of):
    with run_of((1, 2)) as (service, record, _):
        for event, url in ((JOIN, A), (JOIN, B), (LEAVE, A)):
            record(event, url)
        assert service.serve(FIRST).urls == (OWN, B)
        record(JOIN, A)
        record(JOIN, B)
        assert service.addresses_now({OWN, B})[OF_POLICY] == {OWN, B}


def test_one_that_leaves_stays_while_an_evaluation_beside_a_step_may_have_rollouts_there(run_of):
    with run_of((1, 2)) as (service, record, told):
        record(JOIN, A)
        with service.pinned(FIRST):
            with service.pinned(FIRST):
                record(LEAVE, A)
                assert service.addresses_now({OWN})[OF_POLICY] == {OWN} and "has left" not in told[-1][1]
            service.addresses_now({OWN})
            assert "has left" in told[-1][1]


def test_sampling_waits_for_the_lower_bound_says_so_and_ends_with_the_services(run_of):
    served = []

    def serve(policy):
        with suppress(ServiceFailed):
            served.append(service.serve(policy).urls)
        served.append("ended")

    def waits(number):
        return any(f"sampling waits: {number} of at least 2 engines" in text for _, text in told)

    with ThreadPoolExecutor(1) as threads, run_of((2, 3)) as (service, record, told):
        service._verified[OWN] = "before"
        service.own[0].alive, service.problems[OWN] = False, EngineLost("no restart is left")
        record(JOIN, A)
        threads.submit(serve, FIRST)
        until(lambda: waits(1), lambda: told, every=0.05)
        assert not served
        record(JOIN, B)
        until(lambda: served == [(A, B), "ended"], lambda: (served, told), every=0.05)
        service.problems |= dict.fromkeys((A, B), EngineLost("it is gone"))
        threads.submit(serve, SECOND)
        until(lambda: waits(0), lambda: told, every=0.05)
    assert served[2:] == ["ended"]


def test_exchanged_weights_reach_those_that_joined_and_a_loss_is_one_of_the_engine(run_of):
    with run_of((1, 3)) as (service, record, _):
        record(JOIN, A)
        with service.pinned(FIRST) as model:
            assert model.urls == (OWN, A)
            record(LEAVE, A)
            assert service.addresses_now({OWN, A})[OF_POLICY] == {OWN}
            assert service.exchange(SECOND, recompute=True).urls == (OWN, A), "it still has rollouts"
            service.problems[A] = EngineLost("it is gone")
            with pytest.raises(EngineLost):
                service.exchange(Policy("third", 2), recompute=True)
            assert service.exchange(Policy("third", 2), recompute=True).urls == (OWN,)
