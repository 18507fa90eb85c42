"""Who brings a learner to a policy: when it asks whether the learner answers, and when it takes that for known."""

import json
import socket

import pytest

from configs.run import RunConfig
from flows.services.base import Supervisor
from flows.services.learner import LearnerNode, LearnerProcess
from flows.services.pools import TOKEN, require_proof, shared_key
from flows.services.process import ServiceFailed
from storage.store import open_store
from tasks.learner import pulse
from tasks.learner.protocol import KEY_VARIABLE
from tasks.runtime.run_context import RunContext

PULSE = "127.0.0.1:1"


@pytest.fixture
def asked(monkeypatch):
    """The addresses at which a learner was asked whether it answers, which all do."""
    addresses = []
    monkeypatch.setattr(pulse, "ask", lambda address, seconds, key: addresses.append(address))
    return addresses


@pytest.fixture
def learner(tmp_path):
    """A service whose process nobody has started."""
    context = RunContext(open_store(tmp_path / "store"), "a", RunConfig(name="a"), {})
    return LearnerProcess(Supervisor("a", tmp_path / "logs"), context)


@pytest.fixture
def closed():
    """An address at which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def test_a_generation_that_answered_is_not_asked_again_and_another_one_is(learner, asked):
    first, second = ({"address": "a", "pulse": PULSE, "pid": pid} for pid in (1, 2))
    assert [learner._ready(each) for each in (first, first, second, second)] == [True] * 4
    assert asked == [PULSE] * 2


def test_a_learner_that_was_lost_is_asked_before_it_is_gone_back_to(learner, asked, closed):
    """Its guardian may see its end later than we do: until then the same generation is there, with the same report."""
    report = {"address": closed, "pulse": PULSE, "pid": 1}

    class Gone:
        generation, num_waits = 1, 0

        def wait(self):
            self.num_waits += 1
            if self.num_waits > 3:
                raise ServiceFailed("no restart is left")
            assert learner._ready(report)
            return report

    learner._handles["learner"] = Gone()
    with pytest.raises(ServiceFailed):
        learner._connect()
    assert asked == [PULSE] * 3


def test_nodes_on_a_pool_meet_at_a_port_that_the_first_one_holds(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, "a secret of these machines")
    learner = {"nodes": 2, "processes": 4, "replicas": 2}
    run = RunConfig.model_validate({"name": "a", "placement": {"services": "pools"}, "learner": learner})
    supervisor = Supervisor("a", tmp_path / "logs", on_pool=True)
    first = LearnerNode(supervisor, run, 0, "")
    host, _, port = first._meeting.partition(":")
    assert host == "127.0.0.1"
    second = LearnerNode(supervisor, run, 1, first._meeting)
    for node, number in ((first, 0), (second, 1)):
        spec = node._own()
        assert f"--rdzv-endpoint={host}:{port}" in spec.argv
        assert any(each.startswith(f"--rdzv-conf=rank={number},") for each in spec.argv)
        assert spec.env[KEY_VARIABLE] == shared_key(run, "learner")
        assert (spec.env["GLOO_SOCKET_IFNAME"], spec.env["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    socket.create_server((host, int(port))).close()  # as torchrun does, beside the socket that holds it

    spec = first._other(1)
    asked = json.loads(spec.report.with_suffix(".request.json").read_text())
    assert (asked["deployment"], asked["name"]) == ("serve/learner", "learner-a-2")
    asked = asked["parameters"]
    require_proof(asked["proof"], RunConfig.model_validate(asked["config"]), "learner", "2", first._meeting)
