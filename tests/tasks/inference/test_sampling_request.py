"""What a rollout asks of the engine: the policy's cache salt, the right temperature, the seed of its assignment."""

from typing import Any

import pytest

from configs.run import RunConfig, View
from configs.sections import EnvironmentConfig
from tasks.inference.rollouts import Sampling

pytestmark = pytest.mark.engine

ASSIGNMENT = {"assignment_id": "0-0/1", "environment": "e", "example_id": "x", "seed": 41}


def sampling(policy: str = "the-policy", **environment: Any) -> Sampling:
    """Return a sampling that calls nobody."""
    config = RunConfig.model_validate(
        {
            "environments": (EnvironmentConfig(name="e", taskset={"id": "e"}, **environment),),
            "rollout": {"temperature": 0.7, "max_tokens": 9},
            "model": {"path": "somewhere", "renderer": "qwen3"},
        }
    )
    view = View(config, ("rollout", "environments", "engine", "model"), "rollout")
    policy_of_run = {"key": policy, "version": 3}
    return Sampling("http://127.0.0.1:9", "", {}, policy_of_run, 4, view, lambda group_id, tables: None)


@pytest.mark.parametrize("policy", ["one", "another"])
def test_every_request_carries_the_policy_as_cache_salt(policy: str) -> None:
    made = sampling(policy)
    request = made._sampling(made._attempted(ASSIGNMENT), 41)
    assert request.model_dump()["cache_salt"] == policy


@pytest.mark.parametrize(("own", "expected"), [(None, 0.7), (0.3, 0.3), (0.0, 0.0)])
def test_an_environment_s_own_temperature_goes_before_the_run_s(own: float | None, expected: float) -> None:
    made = sampling(temperature=own)
    attempted = made._attempted(ASSIGNMENT)
    assert attempted.temperature == expected
    assert made._sampling(attempted, 41).temperature == expected


def test_seed_and_length_are_those_of_the_assignment_and_the_config() -> None:
    made = sampling()
    request = made._sampling(made._attempted(ASSIGNMENT), 41).model_dump()
    assert (request["seed"], request["max_tokens"], request["top_p"]) == (41, 9, 1.0)


def test_rows_say_which_policy_and_how_stale() -> None:
    attempted = sampling()._attempted(ASSIGNMENT)
    assert (attempted.policy_key, attempted.policy_version, attempted.step) == ("the-policy", 3, 4)
