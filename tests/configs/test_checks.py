"""What must hold between sections: each fault planted alone, and found alone; what is off leaves no trace in keys."""

import json
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from configs.checks.run import missing_files, problems, require_files
from configs.errors import ConfigError
from configs.filters import FilteringConfig
from configs.load import load
from configs.run import RunConfig, View
from configs.sections import DifficultyPoolsSampler
from storage.keys import content_key
from tasks.advantage import stage as advantage
from tasks.assignment import stage as assignment
from tasks.filtering import stage as filtering

GROUPS = tomllib.loads((Path(__file__).parent / "faults.toml").read_text(encoding="utf-8"))["group"]
FAULTS = [(group["preset"], fault["with"], fault["says"]) for group in GROUPS for fault in group["faults"]]
FINE = [(group["preset"], settings) for group in GROUPS for settings in group["fine"]]
ALONE = "assignment.group_size=1"
SHARED_ROW = ["learner.processes=2", "learner.context_parallel=2"]
COMPILED = ["training.compile=true", "training.device=cuda", "training.dtype=bfloat16"]


@pytest.mark.parametrize(("preset", "settings", "says"), FAULTS, ids=[says for _, _, says in FAULTS])
def test_a_fault_is_found_and_nothing_else(preset, settings, says):
    with pytest.raises(ConfigError) as caught:
        load([preset], settings)
    assert [line[: len(says)] for line in caught.value.problems] == [says]


@pytest.mark.parametrize(("preset", "settings"), FINE, ids=str)
def test_what_works_is_allowed(preset, settings):
    assert problems(load([preset], settings)) == []


def test_files_that_are_missing_here(tmp_path):
    config = load(["sft_demo"], [f"data.path={tmp_path}/none.jsonl", f"model.path={tmp_path}/none"])
    assert missing_files(config) == [
        f"model.path: there is no directory {tmp_path}/none",
        f"data.path: there is no file {tmp_path}/none.jsonl",
    ]
    with pytest.raises(ConfigError, match=r"data\.path: there is no file"):
        require_files(config)
    (tmp_path / "none").mkdir()
    (tmp_path / "none.jsonl").touch()
    require_files(config)


@pytest.mark.parametrize(
    ("preset", "key"), [("demo", "engine.max_model_len"), ("sft_demo", "data.max_length")], ids=["train", "sft"]
)
def test_samples_longer_than_the_model_are_refused(preset, key, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.touch()
    config = load([preset], [f"model.path={tmp_path}", f"data.path={data}"])
    for positions, expected in ((256, []), (255, [key])):
        (tmp_path / "config.json").write_text(f'{{"max_position_embeddings": {positions}}}')
        assert [line.partition(":")[0] for line in missing_files(config)] == expected
    (tmp_path / "config.json").write_text("{}")
    assert missing_files(config) == []


@pytest.mark.parametrize(
    ("of_model", "settings", "expected"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}, SHARED_ROW, ""),
        ({"layer_types": ["linear_attention", "full_attention"]}, [], ""),
        ({"layer_types": ["linear_attention", "full_attention"]}, SHARED_ROW, "layers of linear_attention"),
        ({"layers_block_type": ["mamba", "attention", "mlp"]}, SHARED_ROW, "layers of mamba "),
        ({"text_config": {"layer_types": ["linear_attention"]}}, SHARED_ROW, "layers of linear_attention"),
        ({"layer_types": ["linear_attention"]}, COMPILED, "training.compile: linear_attention"),
        ({"attn_logit_softcapping": 50.0}, COMPILED, "training.compile: attention with a soft cap"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 16}, COMPILED, ""),
        ([], SHARED_ROW, ""),
    ],
)
def test_what_layers_with_a_state_or_a_soft_cap_cannot_have_is_refused(of_model, settings, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(of_model))
    config = load(["demo"], [f"model.path={tmp_path}", *settings])
    assert [expected in line for line in missing_files(config)] == [True] * bool(expected)
    assert missing_files(config.model_copy(update={"kind": "evaluate"})) == []


HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("of_model", "overrides", "expected"),
    [
        (HEADS, ["learner={processes=4, context_parallel=4}"], "learner.context_parallel: 4 ranks cannot share"),
        (HEADS, ["learner={processes=6, context_parallel=6}"], ""),
        (HEADS | {"num_key_value_heads": 3}, ["learner={processes=2, context_parallel=2}"], "learner.context_parallel"),
        ({"vision_config": {}}, ["training.lora.rank=4"], "training.lora: the model sees"),
        ({"vision_config": {}}, ["learner={processes=2, context_parallel=2}"], "learner.context_parallel: the model"),
        ({"vision_config": {}}, [], ""),
        ({"hidden_size": 72}, ["training={fp8=true, dtype='bfloat16'}"], "training.fp8: the model's hidden_size, 72"),
        ({"hidden_size": 72}, [], ""),
        ({"hidden_size": 64}, ["training={fp8=true, dtype='bfloat16'}"], ""),
    ],
)
def test_a_model_that_the_learner_would_refuse_is_refused_before(of_model, overrides, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(of_model))
    config = load(["demo"], [f"model.path={tmp_path}", *overrides])
    assert [line.startswith(expected) for line in missing_files(config)] == [True] * bool(expected)


def test_a_model_is_needed_unless_a_policy_stands_for_it():
    config = RunConfig(kind="evaluate")
    assert missing_files(config) == ["model.path: say which directory (or hub id) holds the starting weights"]
    named = config.evaluation.model_copy(update={"policy": "latest"})
    assert missing_files(config.model_copy(update={"evaluation": named})) == []


def test_echo_without_a_role_adds_nothing():
    silent = RunConfig.model_validate(load(["demo"]).model_dump() | {"algorithm": {"type": "echo", "tool": None}})
    (line,) = problems(silent)
    assert line.startswith("algorithm: without a role (tool, user, system) echo adds nothing to grpo")


def test_a_replay_is_held_to_it_where_it_credits_again():
    alone = load(["demo"], [ALONE, "algorithm.type=rae"]).model_dump(mode="json") | {"kind": "replay"}
    with pytest.raises(ConfigError, match=r"assignment\.group_size: rloo compares"):
        load((), ["algorithm.type=rloo", "replay.from_stage=advantage"], base=alone)
    assert load((), ["algorithm.type=rloo", "replay.from_stage=packing"], base=alone).algorithm.type == "rloo"


@pytest.mark.parametrize("from_groups", [True, False])
def test_a_function_of_ones_own_says_whether_equal_rewards_teach_it_something(from_groups):
    config = load(["demo"], [f'algorithm={{type="custom", function="a:b", from_groups={str(from_groups).lower()}}}'])
    assert config.algorithm.compares_group is from_groups
    assert bool(config.learns_from_equals.get("")) is not from_groups


@pytest.mark.parametrize(
    ("names", "thresholds", "said"), [("ab", (0.5, 0.5), "must rise"), ("aa", (0.5, 0.75), "must differ")]
)
def test_pools_that_make_no_sense(names, thresholds, said):
    pools = zip(names, thresholds, strict=True)
    rows = [{"name": name, "threshold": threshold, "weight": 1} for name, threshold in pools]
    with pytest.raises(ValidationError, match=said):
        DifficultyPoolsSampler.model_validate({"pools": rows})


def sections(config):
    stages = [module.STAGE for module in (assignment, filtering, advantage)]
    return {stage.name: content_key(View(config, stage.sections, stage.name).content()) for stage in stages}


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"assignment": {"refill": False, "sampler": {"type": "standard"}}, "admission": None}, ""),
        ({"assignment": {"refill": True}}, "assignment"),
        ({"admission": {}}, "advantage"),
        ({"filtering": FilteringConfig(max_batch_attempts=2).model_dump()}, ""),
        ({"algorithm": {"type": "rae"}}, "filtering advantage"),
        ({"algorithm": {"type": "grpo", "length_penalty": {}}}, "filtering advantage"),
    ],
    ids=str,
)
def test_a_setting_reaches_its_stage_and_what_is_off_none(settings, changed):
    one, other = (sections(RunConfig.model_validate({"seed": 7} | each)) for each in ({}, settings))
    assert [stage for stage in one if one[stage] != other[stage]] == changed.split()


def test_a_directory_is_no_data_file(tmp_path):
    mine = f'[{{name="mine", taskset={{id="own_data", path="{tmp_path}"}}}}]'
    config = load(["demo"], ["model.path=owner/model", f"environments={mine}"])
    (line,) = missing_files(config)
    assert line.startswith(f"environments.0.taskset.path: {tmp_path} is a directory; want a data file")
    assert missing_files(load(["demo"], ["model.path=owner/model"])) == []  # a hub id is no directory


def test_a_replay_that_samples_is_held_to_what_environments_need():
    base = load(("demo",), ["seed=7"]).model_dump(mode="json") | {"kind": "replay"}
    base["environments"][0]["seats"] = {"rival": {"model": {}}}
    load((), (), base=base | {"replay": {"run": "base", "from_stage": "filtering"}})
    with pytest.raises(ConfigError) as refused:
        load((), (), base=base | {"replay": {"run": "base", "from_stage": "rollout"}})
    (line,) = refused.value.problems
    assert line.startswith("environments.0.seats.rival.model: give the path")
