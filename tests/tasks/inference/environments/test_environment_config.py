"""What an environment's section becomes: stock environments around a taskset, and settings of single seats."""

import pytest

from configs.environments import EnvironmentConfig
from tasks.inference.environments.examples import UnknownSeat, verifiers_config
from tasks.inference.environments.packages import package_version

pytestmark = [pytest.mark.engine, pytest.mark.essential]


def section(**others):
    """Return the section of an environment over sample_reverse_text."""
    return EnvironmentConfig.model_validate({"name": "e", "taskset": {"id": "sample_reverse_text"}} | others)


def of(**others):
    return verifiers_config(section(**others).model_dump(mode="json"))


def test_a_plain_taskset_has_one_seat_with_our_harness_and_runtime():
    found = of(max_turns=3)
    assert (found.agent.harness.id, found.agent.runtime.type, found.agent.max_turns) == ("chat_loop", "subprocess", 3)
    assert found.agent.sampling is None, "the request says how to sample"


def test_a_seat_s_own_settings_go_before_those_of_all_and_both_before_the_environment_s():
    seats = {"user": {"max_turns": 5, "temperature": 0.25, "harness": {"id": "null"}}}
    found = of(env={"id": "user-sim"}, max_turns=2, seats=seats)
    assert (found.assistant.max_turns, found.assistant.harness.id) == (2, "chat_loop")
    assert (found.user.max_turns, found.user.harness.id) == (5, "null")
    assert found.user.sampling.model_dump(exclude_unset=True) == {"temperature": 0.25}
    user = of(env={"id": "user-sim"}, seats={"user": {"top_k": 0, "extra_body": {"min_tokens": 2}}}).user
    assert user.sampling.model_dump(exclude_unset=True) == {"top_k": 0, "min_tokens": 2}
    assert of(env={"id": "user-sim"}).user.max_turns == 8, "the environment's own limit, where the config has none"


def test_limits_that_the_section_has_no_field_for_are_settings_of_the_environment():
    found = of(env={"agent": {"max_output_tokens": 9}, "timeout": {"episode": 30.0}})
    assert (found.agent.max_output_tokens, found.timeout.episode) == (9, 30.0)
    assert found.agent.harness.id == "chat_loop"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"env": {"id": "best-of-n", "m": 3}}, "(?s)m\n.*not permitted"),
        ({"env": {"num_rounds": 3}}, "(?s)num_rounds\n.*not permitted"),
        ({"env": {"id": "best-of-n", "n": 0}}, "greater than or equal to 1"),
        ({"env": {"id": "no-such-env"}}, "environment 'no-such-env' not found"),
        ({"env": {"agent": {"model": "another"}}}, r"env\.agent\.model: who plays a seat, and how, is set in"),
        ({"env": {"agent": {"sampling": {"temperature": 0}}}}, r"env\.agent\.sampling: who plays a seat, and how"),
    ],
)
def test_what_the_environment_does_not_know_is_refused(settings, said):
    with pytest.raises((ValueError, ModuleNotFoundError), match=said):
        of(**settings)


def test_a_seat_that_is_not_there_is_refused_by_name():
    with pytest.raises(UnknownSeat, match=r"seats\.agent: .* its seats are assistant, user"):
        of(env={"id": "user-sim"}, seats={"agent": {"max_turns": 1}})
    with pytest.raises(UnknownSeat, match="evaluation_seat: the environment has no seat 'A'; its seats are assistant"):
        of(env={"id": "user-sim"}, evaluation_seat="A")
    assert of(env={"id": "user-sim"}, evaluation_seat="assistant").env_id == "user-sim+sample_reverse_text"


def test_the_version_names_every_package_whose_code_runs():
    plain = package_version(section())
    assert package_version(section(env={"num_rounds": 2}, seats={"agent": {"max_turns": 1}})) == plain
    assert package_version(section(env={"id": "best-of-n"})) == plain, "verifiers is named already"
    harness = {"id": "sample_lookup"}
    own = package_version(section(env=harness))
    assert own != plain and "sample-lookup" in own
    assert "sample-lookup" in package_version(section(seats={"agent": {"harness": harness}}))
    assert "sample-lookup" in package_version(section(env={"agent": {"harness": harness, "max_turns": 2}}))
