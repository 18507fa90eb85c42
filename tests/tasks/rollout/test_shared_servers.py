"""Two stages that sample at once share the environment servers: nobody is blamed for what the other's rollouts did."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from configs.run import RunConfig, View
from flows.services.base import Supervisor
from flows.services.environments import EnvironmentServers
from tasks.inference.engine.client import ServedModel
from tasks.inference.sampling.lost_servers import InFlightRollout, ServiceLost, server_name
from tasks.inference.sampling.rollouts import SamplingPlan
from tasks.rollout import stage as rollout
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import assigned
from tests.fixtures.waiting import PATIENCE

SECONDS = PATIENCE


class Servers(EnvironmentServers):
    """The service of an environment whose server nobody starts."""

    def addresses(self) -> dict[str, tuple[str, ...]]:
        return {}


class Engine:
    """An engine that stays where it is."""

    @contextmanager
    def pinned(self, policy: Policy) -> Iterator[ServedModel]:
        yield ServedModel("http://engine", "key")


class Parts(dict[str, str]):
    """What became of each assignment: `sampled`, or why it was not tried."""

    def finished_units(self) -> set[str]:
        return {name.partition("/")[0] for name in self}


class Sampler:
    """Samples in memory; the server dies whenever `fatal` says so of a call, by its number and what is under way."""

    def __init__(self, fatal: Any) -> None:
        self.fatal = fatal
        self.alone: list[bool] = []
        """Of each call whether no two rollouts were to be under way at once."""

    def __call__(self, *, plan: SamplingPlan, on_group: Any, **_: Any) -> SimpleNamespace:
        """Stand in for the class BatchSampler."""
        return SimpleNamespace(sample=lambda assignments, examples: self._sample(assignments, plan, on_group))

    def _sample(self, assignments: pa.Table, plan: SamplingPlan, on_group: Any) -> None:
        self.alone.append(plan.one_at_a_time)
        rows = assignments.to_pylist()
        tried = [each for each in rows if each["assignment_id"] not in plan.given_up]
        wave = tried[:1] if plan.one_at_a_time else tried
        in_flight = [InFlightRollout(each["assignment_id"], each["group_id"], "e") for each in wave]
        if in_flight and self.fatal(len(self.alone), {each.assignment_id for each in in_flight}):
            lost = ServiceLost(server_name("e"), "tcp://e", "gone")
            lost.in_flight = in_flight
            raise lost
        on_group("", {each["assignment_id"]: plan.given_up.get(each["assignment_id"]) for each in rows})


@pytest.fixture
def servers(tmp_path: Path) -> Servers:
    return Servers(Supervisor("shared", tmp_path), RunConfig(), "key")


def sampled(monkeypatch: pytest.MonkeyPatch, servers: Servers, sampler: Sampler, examples: list[str]) -> Parts:
    """Do the stage with a sampler of its own; return what became of the assignments."""
    parts = Parts()
    parts.put = lambda rows: parts.update({name: why.message if why else "sampled" for name, why in rows.items()})  # type: ignore[attr-defined]
    monkeypatch.setattr(rollout, "BatchSampler", sampler)
    services: Any = (parts, Engine(), servers, SimpleNamespace(serve=None))
    inputs = rollout.RolloutInputs(assigned("e", examples, 1), pa.table({}), 0, Policy("policy", 0), *services)
    rollout.rollout(inputs, View(RunConfig(), rollout.STAGE.sections, "rollout"))
    return parts


def test_the_last_rollout_of_one_stage_is_not_blamed_for_those_of_another(
    monkeypatch: pytest.MonkeyPatch, servers: Servers
) -> None:
    """It was the only one here at both losses, but not the only one at the server: nobody had asked to be alone."""
    sampler = Sampler(lambda call, in_flight: call <= 2)
    assert sampled(monkeypatch, servers, sampler, ["innocent"]) == {"innocent/0": "sampled"}
    assert sampler.alone == [False, False, True]


def test_who_kills_when_really_alone_is_still_found_out(monkeypatch: pytest.MonkeyPatch, servers: Servers) -> None:
    sampler = Sampler(lambda call, in_flight: "killer/0" in in_flight)
    found = sampled(monkeypatch, servers, sampler, ["killer", "fine"])
    assert found["fine/0"] == "sampled" and "died while this rollout alone was under way" in found["killer/0"]
    assert sum(sampler.alone) >= 1


def test_who_is_alone_at_the_servers_is_alone_in_the_whole_run(servers: Servers) -> None:
    inside: list[str] = []
    asked = threading.Event()

    def alone() -> None:
        asked.set()
        with servers.sharing(alone=True):
            assert inside == [], "somebody else was still there"

    with ThreadPoolExecutor(2) as threads:
        with servers.sharing(alone=False), servers.sharing(alone=False):
            inside.append("others")
            waiting = [threads.submit(alone), threads.submit(alone)]
            assert asked.wait(SECONDS)
            threading.Event().wait(0.02)
            inside.clear()
        for each in waiting:
            each.result(SECONDS)


def test_two_who_are_to_be_alone_are_so_one_after_the_other(servers: Servers) -> None:
    inside, most, guard = 0, 0, threading.Lock()

    def alone() -> None:
        nonlocal inside, most
        with servers.sharing(alone=True):
            with guard:
                inside += 1
                most = max(most, inside)
            threading.Event().wait(0.01)
            with guard:
                inside -= 1

    with ThreadPoolExecutor(3) as threads:
        for each in [threads.submit(alone) for _ in range(3)]:
            each.result(SECONDS)
    assert most == 1
