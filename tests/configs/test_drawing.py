"""How a step is drawn: what cannot work is refused, and what is off leaves no trace in keys."""

import pytest
from pydantic import ValidationError

from configs.checks.run import problems
from configs.errors import ConfigError
from configs.filters import FilteringConfig
from configs.load import load
from configs.run import RunConfig, View
from configs.sections import DifficultyPoolsSampler
from storage.keys import content_key
from tasks.advantage import stage as advantage
from tasks.assignment import stage as assignment
from tasks.filtering import stage as filtering

POOLS = 'assignment.sampler={type="difficulty_pools"}'
WATCHING = 'filtering.filters=[{type="errored"}, {type="zero_advantage", enforce=false}]'
FAULTS = [
    ("demo", ["assignment.refill=true", "filtering.max_batch_attempts=1"], "assignment.refill: filtering.max_batch_at"),
    ("demo", [POOLS, "assignment.shuffle=false"], "assignment.shuffle: difficulty_pools draws at random"),
    ("demo", ["admission={reject_min=0.5, reject_max=0.25}"], "admission: the range from 0.5 to 0.25 is empty"),
    (
        "demo",
        ["assignment.refill=true", "algorithm.overlong={max_tokens=64, buffer_tokens=8}"],
        "assignment.refill: gr",
    ),
    ("demo", ["assignment.refill=true", "algorithm.length_penalty={}"], "assignment.refill: groups whose advantages"),
    ("demo", ["assignment.refill=true", 'filtering.filters=[{type="errored"}]'], "assignment.refill: groups whose a"),
    (
        "demo",
        ["assignment.refill=true", WATCHING, "admission={reject_min=0.1, reject_max=0.5}"],
        "assignment.refill: g",
    ),
    ("sft_demo", ["assignment.refill=true"], "assignment.refill: demonstrations are what they are"),
    ("sft_demo", [POOLS], "assignment.sampler: difficulty_pools goes by rewards"),
]


@pytest.mark.parametrize(("preset", "overrides", "expected"), FAULTS, ids=[fault[2] for fault in FAULTS])
def test_what_cannot_work_is_found_and_nothing_else(preset: str, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([preset], overrides)
    assert [line[: len(expected)] for line in caught.value.problems] == [expected]


def test_the_bounds_themselves_are_allowed() -> None:
    settings = ["assignment.refill=true", "filtering.max_batch_attempts=2", POOLS, "admission={reject_min=0}"]
    assert problems(load(["demo"], settings)) == []


@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.overlong={max_tokens=64, buffer_tokens=8}", "admission={}"],
        ["algorithm.length_penalty={}", "admission={reject_min=-0.1, reject_max=0.1}"],
        [WATCHING, "admission={}"],
        [WATCHING, "algorithm.type=rae"],
        [WATCHING, 'algorithm={type="custom", function="m:f", from_groups=false}'],
        ["algorithm.type=rloo"],
    ],
    ids=str,
)
def test_groups_without_signal_are_replaced_where_a_gate_or_a_filter_refuses_them(settings: list[str]) -> None:
    assert problems(load(["demo"], ["assignment.refill=true", *settings])) == []


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ([("a", 0.5, 1), ("b", 0.5, 1)], "must rise"),
        ([("a", 0.5, 1), ("b", 0.25, 1)], "must rise"),
        ([("a", 0.5, 1), ("a", 0.75, 1)], "must differ"),
        ([("a", 0.5, 0)], "greater than 0"),
        ([], "at least 1"),
    ],
)
def test_pools_that_make_no_sense(pools: list[tuple[str, float, float]], said: str) -> None:
    rows = [dict(zip(("name", "threshold", "weight"), pool, strict=True)) for pool in pools]
    with pytest.raises(ValidationError, match=said):
        DifficultyPoolsSampler.model_validate({"pools": rows})


def sections(config: RunConfig) -> list[str]:
    stages = [module.STAGE for module in (assignment, filtering, advantage)]
    return [content_key(View(config, stage.sections, stage.name).content()) for stage in stages]


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"assignment": {"refill": False, "sampler": {"type": "standard"}}, "admission": None}, [False, False, False]),
        ({"assignment": {"refill": True}}, [True, False, False]),
        ({"assignment": {"sampler": {"type": "difficulty_pools"}}}, [True, False, False]),
        ({"admission": {}}, [False, False, True]),
        ({"filtering": FilteringConfig(max_batch_attempts=2).model_dump()}, [False, False, False]),
        ({"algorithm": {"type": "rloo"}}, [False, False, True]),
        ({"algorithm": {"type": "rae"}}, [False, True, True]),
        ({"algorithm": {"type": "grpo", "length_penalty": {}}}, [False, True, True]),
        ({"algorithm": {"type": "supervised"}}, [False, False, True]),
    ],
    ids=str,
)
def test_a_setting_reaches_its_stage_and_what_is_off_none(settings: dict[str, object], changed: list[bool]) -> None:
    one, other = (sections(RunConfig.model_validate({"seed": 7} | each)) for each in ({}, settings))
    assert [a != b for a, b in zip(one, other, strict=True)] == changed
