"""What an environment's code says of itself: its seats, whether it scores, and hooks that nothing calls."""

from typing import Any

import pytest

from configs.environments import EnvironmentConfig
from tasks.inference.environments.examples import verifiers_config
from tasks.inference.environments.introspection import EnvironmentFacts, FormerInterface, LostTaskConfig, facts_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("plugins")]


def facts(taskset: str, settings: dict[str, Any] | None = None, **sections: Any) -> EnvironmentFacts:
    from verifiers.v1.utils.loaders import load_environment

    section = EnvironmentConfig(name="a", taskset={"id": taskset, **(settings or {})}, **sections).model_dump()
    env = load_environment(verifiers_config(section))
    return facts_of(env, next(iter(env.taskset), None))


def test_the_seats_are_those_of_the_environment_and_its_setup_says_which_are_trained() -> None:
    assert facts("unscored").seats == {"agent": True}
    assert facts("duel").seats == {"left": True, "right": True, "critic": True}
    assert facts("unscored", env={"id": "user-sim"}).seats == {"assistant": True, "user": False}


def test_a_reward_function_a_judge_or_code_of_its_own_scores() -> None:
    assert not facts("unscored").scores
    assert facts("faulty_taskset").scores and facts("duel").scores
    functions = {"task": {"rewards": {"length": {"fn": "tests.fixtures.masks:broken"}}}}
    assert facts("unscored", functions).scores


def test_the_settings_are_those_of_the_taskset() -> None:
    assert {"num_examples", "min_length"} <= set(facts("sample_reverse_text").settings)


def test_the_keys_are_those_of_the_judges_in_its_settings() -> None:
    judges = [{"id": "reference", "base_url": "http://judge/v1", "api_key_var": "JUDGE_KEY"}]
    assert facts("unscored", {"task": {"judges": judges}}).keys == {"JUDGE_KEY": "http://judge/v1"}
    assert facts("unscored").keys == {}


def test_hooks_of_an_earlier_interface_are_refused() -> None:
    with pytest.raises(FormerInterface, match="FormerTask has `tools` and `user` of its own"):
        facts("former_tools")


def test_settings_of_a_single_task_are_refused_as_no_server_has_them() -> None:
    with pytest.raises(LostTaskConfig, match=r"OwnTask .*OwnTaskConfig.*taskset\.task \(TaskConfig\)"):
        facts("own_config")


def test_a_harness_that_needs_a_container_is_refused_on_the_subprocess_runtime() -> None:
    with pytest.raises(ValueError, match="container"):
        facts("unscored", harness={"id": "codex"})
