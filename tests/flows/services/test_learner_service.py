"""The processes of a learner on machines of pools: where they meet, and what they ask for."""

import json
import socket

from configs.run import RunConfig
from flows.services.base import Supervisor
from flows.services.learner import LearnerNode
from flows.services.pools import TOKEN, require_proof, shared_key
from tasks.learner.protocol import KEY_VARIABLE


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
