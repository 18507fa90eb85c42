"""Putting a config together, and everything that can be wrong with one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.algorithms import GrpoConfig, RlooConfig, SupervisedConfig
from configs.environments import ElasticPool, StaticPool
from configs.errors import ConfigError
from configs.layers import presets
from configs.load import dump, from_json, load, settings
from configs.run import RunConfig


def problems(*overrides, files=("demo",)):
    """Return what is wrong with the config of these overrides."""
    with pytest.raises(ConfigError) as caught:
        load(files, overrides)
    return caught.value.problems


@pytest.fixture
def toml(tmp_path):
    """Write a TOML file."""

    def write(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


def test_later_files_win_and_overrides_last(toml):
    first = toml("first.toml", "steps = 5\n[training]\nlearning_rate = 1e-3\nwarmup_steps = 2\n")
    second = toml("second.toml", "[training]\nlearning_rate = 2e-3\n")
    config = load(["demo", first, second], ["training.warmup_steps=4"])
    assert (config.steps, config.training.learning_rate, config.training.warmup_steps) == (5, 2e-3, 4)
    assert config.assignment.groups_per_step == 8


@pytest.mark.parametrize(
    ("override", "value", "expected"),
    [
        ("training.learning_rate=1e-5", lambda config: config.training.learning_rate, 1e-5),
        ("environments.0.max_turns=null", lambda config: config.environments[0].max_turns, None),
        ("filtering.filters.2.enforce=false", lambda config: config.filtering.filters[2].enforce, False),
        ("model.path = '12'", lambda config: config.model.path, "12"),
        ("environments.0.taskset.min_length=2", lambda config: config.environments[0].taskset["min_length"], 2),
        ("evaluation.pass_at=[1]", lambda config: config.evaluation.pass_at, (1,)),
    ],
)
def test_overrides(override, value, expected):
    assert value(load(["demo"], [override])) == expected


def test_another_type_takes_nothing_over_from_the_old_one(toml):
    file = toml("std.toml", '[algorithm]\ntype = "grpo"\nnormalise_std = true\n')
    assert load(["demo", file]).algorithm == GrpoConfig(normalise_std=True)
    assert load(["demo", file], ["algorithm.type=supervised"]).algorithm == SupervisedConfig()
    assert load(["demo", file], ['algorithm={type="supervised"}']).algorithm == SupervisedConfig()


def test_unknown_keys_name_path_source_and_nearest_name(toml):
    file = toml("mine.toml", "[training]\nlearning_rat = 1\n")
    assert problems(files=("demo", file)) == (
        f"training.learning_rat: unknown key ({file}); did you mean training.learning_rate?",
    )
    assert problems("learning_rate=1", "lr=1") == (
        "learning_rate: unknown key (override learning_rate=1); did you mean training.learning_rate?",
        "lr: unknown key (override lr=1); did you mean training.learning_rate?",
    )
    assert problems("filtering.filters.2.enforc=false") == (
        "filtering.filters.2.enforc: unknown key (override filtering.filters.2.enforc=false); "
        "did you mean filtering.filters.2.enforce?",
    )
    assert problems("tracking.mode=online") == (
        "tracking.mode: not a key of this tracking.type (override tracking.mode=online); it belongs to another one, "
        "which is to be set first",
    )


def test_removed_keys_say_what_became_of_them():
    (line,) = problems("environments.0.args={}")
    assert line.startswith("environments.0.args: no longer a key (override")
    assert "`taskset`" in line


def test_wrong_types_are_told_all_at_once():
    lines = problems("rollout.max_tokens=many", "training.learning_rate=-1", "steps.x=1", "environments.9.name=a")
    assert lines == (
        "steps.x: steps is a value and has no keys (override steps.x=1)",
        "environments.9: environments has 1 of them, numbered from 0 (override environments.9.name=a)",
        "rollout.max_tokens: should be a valid integer, unable to parse string as an integer; it is 'many' "
        "(override rollout.max_tokens=many)",
        "training.learning_rate: should be greater than 0; it is -1 (override training.learning_rate=-1)",
    )


def test_an_unknown_type_names_the_known_ones():
    (line,) = problems("algorithm.type=grop")
    assert line.startswith("algorithm.type: 'grop' is none of 'grpo'") and "'grpo'" in line and "'supervised'" in line


def test_a_file_of_a_few_sections_is_checked_alone(tmp_path):
    """`stagecoach config` reads it; what a run needs besides is no mistake there."""
    part = tmp_path / "part.toml"
    part.write_text("[training]\nlearning_rate = 1e-5\n")
    (rate,) = [each for each in settings([part]) if each.key == "training.learning_rate"]
    assert (rate.value, rate.source) == (1e-5, str(part))
    part.write_text("[training]\nlearning_rate = 0\nlearning_rat = 1\n")
    with pytest.raises(ConfigError, match=r"training\.learning_rat: unknown key") as refused:
        settings([part])
    assert "training.learning_rate: " in str(refused.value)


def test_a_pool_without_type_is_refused_plainly():
    (line,) = problems("environments.0.pool.num_workers=2")
    assert line.startswith("environments.0.pool: say of which `type` it is")


@pytest.mark.parametrize("value", ["inf", "2020-01-01"])
def test_values_that_json_cannot_hold_are_refused(value):
    (line,) = problems(f"environments.0.taskset.limit={value}")
    assert line.startswith("environments.0.taskset.limit: ")


def test_files_that_are_not_there():
    assert problems(files=("dmo",)) == (
        f"dmo: no such file, and no such preset; the presets are {', '.join(presets())}; did you mean demo?",
    )


def test_num_workers_of_old_configs_becomes_a_pool_with_a_warning():
    with pytest.warns(FutureWarning, match=r"environments\.0\.num_workers is deprecated"):
        assert load(["demo"], ["environments.0.num_workers=auto"]).environments[0].pool == ElasticPool()
    with pytest.warns(FutureWarning, match="num_workers"):
        config = load(["demo"], ['environments.0.pool={type="elastic", multiplex=4}', "environments.0.num_workers=3"])
    assert config.environments[0].pool == ElasticPool(multiplex=4)


def test_a_bare_number_of_workers_is_a_static_pool():
    with pytest.warns(FutureWarning, match=r"write environments\.0\.pool = {'type': 'static', 'num_workers': 3}"):
        assert load(["demo"], ["environments.0.num_workers=3"]).environments[0].pool == StaticPool(num_workers=3)


@pytest.mark.parametrize("preset", presets())
def test_presets_have_their_kind_and_hold_no_deprecated_keys(preset, recwarn):
    assert load([preset]).kind == {"sft_demo": "sft", "dpo_demo": "dpo"}.get(preset, "train")
    assert not recwarn.list


@given(
    seed=st.none() | st.integers(0, 2**31),
    rate=st.floats(1e-12, 1e3, allow_nan=False),
    taskset=st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8) | st.booleans(), max_size=4),
    name=st.text(max_size=8),
    pass_at=st.lists(st.integers(1, 9), max_size=3),
)
def test_recorded_configs_come_back_as_they_were(seed, rate, taskset, name, pass_at):
    config = RunConfig.model_validate(
        {
            "seed": seed,
            "training": {"learning_rate": rate},
            "environments": [{"name": name, "taskset": taskset, "pool": {"type": "elastic"}}],
            "evaluation": {"pass_at": pass_at},
        }
    )
    assert from_json(dump(config)) == config
    assert dump(from_json(dump(config))) == dump(config)


def test_recorded_configs_of_another_layout_are_refused():
    tree = json.loads(dump(RunConfig()))
    tree["rollout"]["speed"] = 3
    with pytest.raises(ConfigError, match=r"rollout\.speed: unknown key \(recorded config\)"):
        from_json(json.dumps(tree))
    with pytest.raises(ConfigError, match="not JSON"):
        from_json("{")


def test_the_section_of_earlier_layouts_is_understood(toml):
    file = toml("old.toml", '[advantage]\ntype = "rloo"\n')
    with pytest.warns(FutureWarning, match="the section is called algorithm"):
        assert load(["demo", file]).algorithm == RlooConfig()
    recorded = json.loads(dump(load(["demo"], ["algorithm.normalise_std=true"])))
    recorded["advantage"] = recorded.pop("algorithm")
    assert load((), base=recorded).algorithm == GrpoConfig(normalise_std=True)
    assert from_json(json.dumps(recorded)).algorithm == GrpoConfig(normalise_std=True)
    recorded["prefect"] |= {"service_logs": True, "tasks": "steps"}  # a key that is gone, and a value
    assert load((), base=recorded).prefect.tasks == "none"


def test_settings_have_value_default_origin_and_meaning(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("[training]\nlearning_rate = 0.5\n[[environments]]\nname = 'x'\ntaskset = {id = 'y'}\n")
    found = {each.key: each for each in settings([file], ["steps=3"])}
    rate = found["training.learning_rate"]
    assert (rate.value, rate.default, rate.source) == (0.5, RunConfig().training.learning_rate, str(file))
    assert rate.meaning == "Peak learning rate."
    assert (found["steps"].value, found["steps"].source) == (3, "override steps=3")
    assert found["environments.0.name"].value == "x" and found["environments.0.weight"].source == str(file)
    assert found["rollout.temperature"].source == ""
    assert all(each.meaning for each in found.values()), "a setting without a word of what it means"
