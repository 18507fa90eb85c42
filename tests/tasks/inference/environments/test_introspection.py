"""What an environment's code says of itself: its seats, whether it scores, and hooks that nothing calls."""

import json

import pytest
from pydantic import ValidationError

from configs.environments import EnvironmentConfig
from tasks.inference.environments.examples import verifiers_config, write_examples
from tasks.inference.environments.introspection import FormerInterface, LostTaskConfig, facts_of, settings_error

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


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"num_exmples": 3, "task": {"num_example": 1}}, "taskset.num_exmples: unknown setting; did you mean num_exam"),
        (
            {"xyzzy": 3, "plugh": 4},
            "taskset.xyzzy: unknown setting; taskset.plugh: unknown setting. The taskset takes: ",
        ),
    ],
)
def test_a_taskset_says_once_what_it_takes_and_nothing_of_other_sections(sections, expected):
    with pytest.raises(ValidationError) as refused:
        facts("sample_reverse_text", sections)
    text = settings_error(refused.value, "sample_reverse_text")
    assert expected in text and text.count("takes") == ("xyzzy" in sections) and "system_prompt" not in text
    assert ("taskset.task.num_example: unknown setting" in [*text.split("; ")]) == ("task" in sections)


def test_a_harness_that_needs_a_container_is_refused_on_the_subprocess_runtime():
    with pytest.raises(ValueError, match="container"):
        facts("unscored", harness={"id": "codex"})


@pytest.mark.parametrize(("most", "beyond", "repeated"), [(3, "2", 1), (5, "", 2), (100, "", 2)])
def test_examples_beyond_the_most_and_repeated_ones_are_counted(tmp_path, most, beyond, repeated):
    rows = [{"prompt": prompt, "answer": "4"} for prompt in ("a", "b", "a", "c", "a")]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    taskset = {"id": "own_data", "path": str(tmp_path / "rows.jsonl")}
    section = EnvironmentConfig(name="a", taskset=taskset, max_examples=most).model_dump()
    found = write_examples(section, tmp_path / "examples.arrow")
    assert (found.num_beyond, found.num_repeated) == (beyond, repeated)
