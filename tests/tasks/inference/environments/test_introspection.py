"""What an environment's code says of itself: its seats, whether it scores, and hooks that nothing calls."""

import json

import pytest

from configs.environments import EnvironmentConfig
from tasks.inference.environments.examples import verifiers_config, write_examples
from tasks.inference.environments.introspection import FormerInterface, LostTaskConfig, facts_of
from tasks.inference.environments.servers import read_rows

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("plugins")]


def facts(taskset, settings=None, **sections):
    from verifiers.v1.utils.loaders import load_environment

    section = EnvironmentConfig(name="a", taskset={"id": taskset, **(settings or {})}, **sections).model_dump()
    env = load_environment(verifiers_config(section))
    return facts_of(env, next(iter(env.taskset), None))


def test_the_seats_are_those_of_the_environment_and_its_setup_says_which_are_trained():
    assert facts("unscored").seats == {"agent": True}
    assert facts("duel").seats == {"left": True, "right": True, "critic": True}
    assert facts("unscored", env={"id": "user-sim"}).seats == {"assistant": True, "user": False}


def test_a_reward_function_a_judge_or_code_of_its_own_scores():
    assert not facts("unscored").scores
    assert facts("faulty_taskset").scores and facts("duel").scores
    functions = {"task": {"rewards": {"length": {"fn": "tests.fixtures.masks:broken"}}}}
    assert facts("unscored", functions).scores


def test_the_settings_are_those_of_the_taskset():
    assert {"num_examples", "min_length"} <= set(facts("sample_reverse_text").settings)


def test_the_keys_are_those_of_the_judges_in_its_settings():
    judges = [{"id": "reference", "base_url": "http://judge/v1", "api_key_var": "JUDGE_KEY"}]
    assert facts("unscored", {"task": {"judges": judges}}).keys == {"JUDGE_KEY": "http://judge/v1"}
    assert facts("unscored").keys == {}


def test_hooks_of_an_earlier_interface_are_refused():
    with pytest.raises(FormerInterface, match="FormerTask has `tools` and `user` of its own"):
        facts("former_tools")


def test_settings_of_a_single_task_are_refused_as_no_server_has_them():
    with pytest.raises(LostTaskConfig, match=r"OwnTask .*OwnTaskConfig.*taskset\.task \(TaskConfig\)"):
        facts("own_config")


def test_a_harness_that_needs_a_container_is_refused_on_the_subprocess_runtime():
    with pytest.raises(ValueError, match="container"):
        facts("unscored", harness={"id": "codex"})


@pytest.mark.parametrize(("most", "num_examples"), [(3, 2), (5, 3), (100, 3)])
def test_examples_beyond_the_most_are_said_and_repeated_ones_are_left_out(tmp_path, most, num_examples):
    rows = [{"prompt": prompt, "answer": "4"} for prompt in ("a", "b", "a", "c", "a")]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    taskset = {"id": "own_data", "path": str(tmp_path / "rows.jsonl")}
    section = EnvironmentConfig(name="a", taskset=taskset, max_examples=most).model_dump()
    assert write_examples(section, tmp_path / "examples.arrow").has_more == (most < 5)
    assert read_rows(tmp_path / "examples.arrow").num_rows == num_examples
