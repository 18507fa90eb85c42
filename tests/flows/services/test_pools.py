"""What a run and its services on pools agree on: leases by one's own clock, keys of a shared token, an interface."""

import json

import pytest

from configs.run import RunConfig
from flows.serve import _log_directory, _service
from flows.services.base import Supervisor
from flows.services.environments import EnvironmentServers
from flows.services.pools import (
    BEAT_SECONDS,
    TOKEN,
    RenewalWatch,
    address_of,
    proof_of,
    require_proof,
    shared_key,
    stand_in,
)
from flows.services.process import ServiceFailed
from storage.store import open_store

RUN = RunConfig.model_validate({"name": "a", "store": "/data", "placement": {"services": "pools"}})


def test_a_lease_ends_when_nothing_new_was_read_in_so_many_looks():
    renewals = RenewalWatch(3 * BEAT_SECONDS)
    assert [renewals.look(1) for _ in range(4)] == [True, True, True, False], "the first look is a renewal"
    assert renewals.look(2), "whoever says something new is there, however late it is read"
    never = RenewalWatch(2 * BEAT_SECONDS)
    assert [never.look(None), never.look(None)] == [True, False], "a run that never renewed it is no run"


def test_keys_are_of_the_token_the_run_and_the_purpose(monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(ServiceFailed, match=f"{TOKEN} is not set here. Nothing was started"):
        shared_key(RUN, "engine")
    monkeypatch.setenv(TOKEN, "one")
    other = RUN.model_copy(update={"name": "b"})
    keys = {shared_key(RUN, "engine"), shared_key(RUN, "environment"), shared_key(other, "engine")}
    assert len(keys) == 3 and shared_key(RUN, "engine") in keys


def test_a_proof_fits_one_request(monkeypatch):
    monkeypatch.setenv(TOKEN, "one")
    asked = RUN, "engine", "2", "/weights"
    proof = proof_of(*asked)
    again = RunConfig.model_validate(RUN.model_dump(mode="json"))
    require_proof(proof, again, *asked[1:])  # as it comes out of Prefect
    for other in ((RUN, "engine", "2", "/elsewhere"), (RUN.model_copy(update={"steps": 3}), *asked[1:])):
        with pytest.raises(ServiceFailed, match="Nothing was started"):
            require_proof(proof, *other)
    monkeypatch.setenv(TOKEN, "two")
    with pytest.raises(ServiceFailed, match=f"{TOKEN} of this machine"):
        require_proof(proof, *asked)


def test_a_request_has_the_config_and_no_token(monkeypatch, tmp_path):
    monkeypatch.setenv(TOKEN, "a very long secret")
    stand_in(RUN, "engine", "2", "/weights", tmp_path / "engine-2.json")
    file = tmp_path / "engine-2.request.json"
    assert file.stat().st_mode & 0o077 == 0
    text = file.read_text()
    request = json.loads(text)
    assert "a very long secret" not in text and shared_key(RUN, "engine") not in text
    assert (request["deployment"], request["name"]) == ("serve/engine", "engine-a-2")
    assert RunConfig.model_validate(request["parameters"]["config"]) == RUN


def test_a_worker_finds_the_store_from_any_directory(monkeypatch, tmp_path):
    monkeypatch.setenv(TOKEN, "one")
    monkeypatch.chdir(tmp_path)
    run = RUN.model_copy(update={"store": "store"})
    stand_in(run, "learner", "1", "", tmp_path / "learner.json")
    asked = json.loads((tmp_path / "learner.request.json").read_text())["parameters"]
    there = RunConfig.model_validate(asked["config"])
    assert there.store == str(tmp_path / "store")
    monkeypatch.chdir("/")
    require_proof(asked["proof"], there, "learner", "1", "")
    key = shared_key(there, "learner")
    monkeypatch.chdir(tmp_path)
    assert shared_key(run, "learner") == key


def test_a_machine_without_the_store_or_the_model_serves_no_weights(monkeypatch, tmp_path, root):
    monkeypatch.chdir(tmp_path)
    run = RUN.model_copy(update={"store": str(root)})
    for service in ("engine", "learner"):
        with pytest.raises(ServiceFailed, match=r"no .*/store/format.json.*Nothing was started.*at the same paths"):
            _log_directory(run, service, "")
    assert not root.exists(), "no store is made"
    assert _log_directory(run, "environment", "") == tmp_path / ".stagecoach/logs/a"
    open_store(run.store)
    assert _log_directory(run, "learner", "127.0.0.1:9") == tmp_path / "store/logs/a"
    with pytest.raises(ServiceFailed, match="no /nowhere/model, and the engine"):
        _log_directory(run, "engine", "/nowhere/model")
    assert _log_directory(run, "engine", str(tmp_path)) == tmp_path / "store/logs/a"
    bucket = run.model_copy(update={"store": "s3://bucket/store"})
    assert _log_directory(bucket, "learner", "") == tmp_path / ".stagecoach/logs/a"


def test_each_server_of_an_environment_is_asked_for_by_its_own_name(monkeypatch, tmp_path):
    monkeypatch.setenv(TOKEN, "one")
    environment = {"name": "calc", "taskset": {"id": "sample_calc_tools"}, "servers": 2}
    own = {"name": "own", "taskset": {"id": "sample_lookup"}}
    tried = {"environments": [environment], "evaluation": {"environments": [own]}}
    run = RunConfig.model_validate({**RUN.model_dump(), **tried})
    servers = EnvironmentServers(Supervisor("a", tmp_path), run, "key")
    servers._spec(run.served_environments["evaluation.environments.0"])
    for number in (0, 1):
        servers._spec(run.environments[0], number)
    asked = [json.loads(file.read_text()) for file in sorted(servers.supervisor.reports.glob("*.request.json"))]
    assert {(each["name"], each["parameters"]["member"]) for each in asked} == {
        ("environment-a-calc", "calc"),
        ("environment-a-calc-2", "calc-2"),
        ("environment-a-own", "own"),
    }
    for each in asked:
        served = _service(Supervisor("a", tmp_path, on_pool=True), run, "environment", each["parameters"]["member"], "")
        assert isinstance(served, EnvironmentServers)
        (only,) = served._environments.values()
        name = each["parameters"]["member"].partition("-")[0]
        assert (only.name, only.server_names, only.max_restarts) == (name, (name,), 0), "one, and it is its run's"


def test_an_interface_has_an_address_of_this_machine_or_is_explained():
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(ServiceFailed, match=r"placement.interface is 'eth99'.*Here there are: .*\blo\b"):
        address_of("eth99")
