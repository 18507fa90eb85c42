"""What check refuses of algorithms: each fault planted alone, and found alone, with where it is and why."""

import pytest

from configs.checks.run import problems
from configs.errors import ConfigError
from configs.load import load
from configs.run import RunConfig

OWN = "environments.0.algorithm="
ALONE = "assignment.group_size=1"
ECHO = 'algorithm={type="echo", '

FAULTS = [
    ([ALONE, "algorithm.type=rloo"], "assignment.group_size: rloo compares the rollouts of a group"),
    ([ALONE, "algorithm.type=max_rl"], "assignment.group_size: max_rl compares"),
    ([ALONE, "algorithm.type=dr_grpo"], "assignment.group_size: dr_grpo compares"),
    ([ALONE, "algorithm.type=reinforce_pp"], "assignment.group_size: reinforce_pp compares"),
    ([ALONE, "algorithm.type=hierarchical_grpo"], "assignment.group_size: hierarchical_grpo compares"),
    ([ALONE, "algorithm.type=echo"], "assignment.group_size: echo compares"),
    ([ALONE, 'algorithm={type="custom", function="a:b"}'], "assignment.group_size: custom compares"),
    ([ALONE, "algorithm.type=rae", OWN + '{type="grpo"}'], "assignment.group_size: grpo compares"),
    ([ECHO + "tool={tool_names=[]}}"], "algorithm.tool.tool_names: it names no tool"),
    ([ECHO + 'user={tool_names=["a"]}}'], "algorithm.user.tool_names: only results of tools have a tool's name"),
    ([ECHO + 'system={tool_names=["a"]}}'], "algorithm.system.tool_names: only results of tools"),
    ([ECHO + "arguments={limit=1}}"], "algorithm.arguments: there is no keep_mask that would be given them"),
    ([ECHO + 'keep_mask="masks.short"}'], "algorithm.keep_mask: 'masks.short' is no import path"),
    ([OWN + '{type="custom", function="a.b:c.d"}'], "environments.0.algorithm.function: 'a.b:c.d' is no import path"),
    (['algorithm={type="rae", decay=0}'], "algorithm.decay: at 0, order 'post' subtracts the reward itself"),
]


@pytest.mark.parametrize(("overrides", "expected"), FAULTS, ids=[fault[1] for fault in FAULTS])
def test_a_fault_is_found_and_nothing_else(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["demo"], overrides)
    assert [line[: len(expected)] for line in caught.value.problems] == [expected]


def test_echo_without_a_role_adds_nothing() -> None:
    silent = RunConfig.model_validate(load(["demo"]).model_dump() | {"algorithm": {"type": "echo", "tool": None}})
    (line,) = problems(silent)
    assert line.startswith("algorithm: without a role (tool, user, system) echo adds nothing to grpo")


@pytest.mark.parametrize(
    "overrides",
    [
        [ALONE, "algorithm.type=rae"],
        [ALONE, "algorithm.type=supervised"],
        [ALONE, 'algorithm={type="custom", function="a.b:c", from_groups=false}'],
        [ALONE, OWN + '{type="rae"}'],  # nothing is credited by the run's algorithm
        [ECHO + 'tool={tool_names=["search"]}, keep_mask="masks:short", arguments={limit=1}}'],
        [ECHO + "user={}, system={}}"],
        ['algorithm={type="rae", decay=0, order="pre"}'],
        ['algorithm={type="custom", function="f:_g"}'],
    ],
    ids=str,
)
def test_what_works_is_allowed(overrides: list[str]) -> None:
    assert problems(load(["demo"], overrides)) == []


def test_a_replay_is_held_to_it_where_it_credits_again() -> None:
    alone = load(["demo"], [ALONE, "algorithm.type=rae"]).model_dump(mode="json") | {"kind": "replay"}
    with pytest.raises(ConfigError, match=r"assignment\.group_size: rloo compares"):
        load((), ["algorithm.type=rloo", "replay.from_stage=advantage"], base=alone)
    assert load((), ["algorithm.type=rloo", "replay.from_stage=packing"], base=alone).algorithm.type == "rloo"


def test_a_warm_start_is_supervised_for_every_environment() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["sft_demo"], ['environments=[{name="a", taskset={id="x"}, algorithm={type="rae"}}]'])
    (line,) = caught.value.problems
    assert line == "environments.0.algorithm.type: a run of kind sft needs 'supervised'; it is 'rae'"


@pytest.mark.parametrize("from_groups", [True, False])
def test_a_function_of_ones_own_says_whether_equal_rewards_teach_it_something(from_groups: bool) -> None:
    config = load(["demo"], [f'algorithm={{type="custom", function="a:b", from_groups={str(from_groups).lower()}}}'])
    assert config.algorithm.compares_group is from_groups
    assert bool(config.learns_from_equals.get("")) is not from_groups


def test_an_evaluation_credits_nothing() -> None:
    assert problems(load(["demo"], ["kind=evaluate", ALONE, 'algorithm={type="custom", function="nothing"}'])) == []
