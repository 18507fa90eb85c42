"""What a rollout asks of the engine: the salt of the policy, the right temperature, seeds of its assignment."""

from dataclasses import replace

import pytest

from configs.environments import EnvironmentConfig
from configs.run import RunConfig
from configs.services import ExternalModelConfig
from flows.services.base import Supervisor
from flows.services.environments import EnvironmentServers
from tasks.inference.engine.client import OF_POLICY, ServedModel
from tasks.inference.environments.agent_runs import SEED_STRIDE
from tasks.inference.sampling.model_requests import sampling_config
from tasks.inference.sampling.sampler import BatchSampler
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import view_of

pytestmark = pytest.mark.engine

ASSIGNMENT = {"assignment_id": "0-0/1", "environment": "e", "example_id": "x", "seed": 41}


def sampling(policy="the-policy", teachers=None, **environment):
    """Return the runner of a sampler that calls no service."""
    section = EnvironmentConfig(name="e", taskset={"id": "e"}, **environment)
    view = view_of("somewhere", section, temperature=0.7, max_tokens=9)
    served = {OF_POLICY: ServedModel("http://127.0.0.1:9", "", salt=policy), **(teachers or {})}
    handed_over = {"addresses": {}, "on_group": lambda *_: None}
    return BatchSampler(served=served, policy=Policy(policy, 3), step=4, config=view, **handed_over).runner


@pytest.mark.parametrize("policy", ["one", "another"])
def test_every_request_carries_the_policy_as_cache_salt(policy):
    made = sampling(policy)
    request = made._sampling(made._origin(ASSIGNMENT), 41)
    assert request.model_dump()["cache_salt"] == policy


@pytest.mark.parametrize(("own", "expected"), [(None, 0.7), (0.3, 0.3), (0.0, 0.0)])
def test_an_environment_s_own_temperature_goes_before_the_run_s(own, expected):
    made = sampling(temperature=own)
    origin = made._origin(ASSIGNMENT)
    assert origin.temperature == expected
    assert made._sampling(origin, 41).temperature == expected


def test_length_is_that_of_the_config_and_the_seed_that_of_the_attempt():
    made = sampling()
    request = made._sampling(made._origin(ASSIGNMENT), 41).model_dump()
    assert (request["max_tokens"], request["top_p"], request["seed"]) == (9, 1.0, 41)


def test_settings_of_the_environment_go_before_the_run_s_and_those_that_are_not_set_are_not_sent():
    names = {"temperature", "top_p", "max_tokens", "reasoning_effort", "seed", "cache_salt", "detokenize"}
    own = {"top_p": 0.5, "top_k": 0, "stop": (".",)}
    for settings, fields in (({}, {}), ({**own, "extra_body": {"min_tokens": 2}}, {**own, "min_tokens": 2})):
        made = sampling(**settings)
        request = made._sampling(made._origin(ASSIGNMENT), 41).model_dump()
        assert request.keys() == {*names, *fields} and request["detokenize"] == bool(settings)
        assert request.items() >= {"max_tokens": 9, **fields}.items()


@pytest.mark.parametrize("chat", [None, ExternalModelConfig(url="https://somewhere/v1", model="m")])
def test_a_server_of_another_program_which_gives_all_turns_one_seed_gets_none(chat):
    made = sampling(address="tcp://127.0.0.1:9")
    made.served[OF_POLICY] = replace(made.served[OF_POLICY], chat=chat)
    assert made._sampling(made._origin(ASSIGNMENT), 41).model_dump()["seed"] is None


@pytest.mark.parametrize("seed", [0, 41, 2**31 - 1, 2**62 + 2**30 - 1])
def test_a_chat_api_is_sent_small_seeds_by_every_seat_of_an_episode(seed):
    external = ExternalModelConfig(url="https://somewhere/v1", model="m")
    served = ServedModel(external.url, "", external.model, chat=external)
    found = sampling_config(served, {"temperature": 1.0}, seed).model_dump()["seed"]
    assert found == seed or seed > 41
    assert found >= 0 and found + 1000 * SEED_STRIDE < 2**31


@pytest.mark.parametrize(("key", "sent"), [("its key", "Bearer its key"), ("", "Bearer EMPTY")])
def test_a_teacher_is_sent_its_own_key_or_none(key, sent):
    made = sampling(teachers={"e": ServedModel("http://127.0.0.1:7", key)})
    assert made.client_configs["e"].headers == {"Authorization": sent}
    assert made.client_configs[""].headers == {}, "of an engine without a key the environment server may know one"


def test_an_environment_with_a_teacher_is_sampled_by_that_and_by_no_policy():
    made = sampling(teachers={"e": ServedModel("http://127.0.0.1:7/", "its key", "its-name", "its weights")})
    origin = made._origin(ASSIGNMENT)
    assert (origin.policy_key, origin.policy_version, origin.step) == ("", 4, 4)
    assert made._sampling(origin, 41).model_dump()["cache_salt"] == "its weights"
    name = made._sampler("e")
    asked = made.client_configs[name]
    assert asked.base_url == "http://127.0.0.1:7/v1" and asked.headers == {"Authorization": "Bearer its key"}
    assert made.served[name].model == "its-name"
    assert set(made.watch.engines) == {"http://127.0.0.1:9", "http://127.0.0.1:7"}


class Started(Supervisor):
    """Keeps what it is told to start."""

    def start(self, spec):
        self.specs = [*getattr(self, "specs", []), spec]
        return None


@pytest.mark.parametrize("external", [False, True])
def test_the_key_of_somebody_elses_api_is_not_overwritten_by_one_of_ours(tmp_path, external):
    """Both may be in one variable; the engine's is made anew for every run, and no engine is asked here."""
    chat = {"url": "https://host/v1", "model": "m", "api_key_variable": "STAGECOACH_ENGINE_KEY"}
    tree = {"kind": "evaluate", "environments": ({"name": "e", "taskset": {"id": "sample_reverse_text"}},)}
    config = RunConfig.model_validate(tree | ({"evaluation": {"external": chat}} if external else {}))
    supervisor = Started("run", tmp_path)
    EnvironmentServers(supervisor, config, "ours").begin()
    (spec,) = supervisor.specs
    assert ("STAGECOACH_ENGINE_KEY" in spec.env) != external
