"""What must hold between sections: each fault planted alone, and found alone; what is off leaves no trace in keys."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from configs.checks.run import missing_files, problems, require_files
from configs.errors import ConfigError
from configs.filters import FilteringConfig
from configs.load import load
from configs.run import RunConfig, View, content
from configs.sections import DifficultyPoolsSampler
from configs.training import LoraConfig, TrainingConfig
from storage.keys import content_key
from tasks.advantage import stage as advantage
from tasks.assignment import stage as assignment
from tasks.filtering import stage as filtering

TWICE = '[{name="a", taskset={id="x"}}, {name="a", taskset={id="y"}}]'
NUMBERED = '[{name="a", servers=2, taskset={id="x"}}, {name="a-2", taskset={id="y"}}]'
NO_ID = '[{name="a", taskset={}}]'
OWN = "environments.0.algorithm="
ALONE = "assignment.group_size=1"
ECHO = 'algorithm={type="echo", '
REFILL = "assignment.refill=true"
POOLS = 'assignment.sampler={type="difficulty_pools"}'
WATCHING = 'filtering.filters=[{type="errored"}, {type="zero_advantage", enforce=false}]'
CISPO = "training.loss.type=cispo"
WARM = 'environments=[{name="a", taskset={id="x"}, algorithm={type="rae"}}]'
DEMO_FAULTS = [
    ("packing.tokens_per_row=255", "packing.tokens_per_row: a row of 255 tokens cannot hold"),
    ("rollout.max_tokens=256", "rollout.max_tokens: 256 leaves no room"),
    ("evaluation.pass_at=[1, 2]", "evaluation.pass_at: pass@2 needs"),
    ("evaluation.pass_at=[0]", "evaluation.pass_at: pass@0 needs"),
    ("environments=[]", "environments: a run of kind train needs"),
    (f"environments={TWICE}", "environments: 2 of them are named 'a'"),
    (f"environments={NUMBERED}", "environments: 2 servers are named 'a-2'"),
    (
        "environments.0.servers=2",
        "environments.0.address=tcp://h:1,tcp://h:2",
        "environments.0.servers: the environment",
    ),
    (f"environments={NO_ID}", "environments.0.taskset.id: say which"),
    ("assignment.group_size=1", "assignment.group_size: grpo compares"),
    ("training={warmup_steps=5, decay_steps=5}", "training.decay_steps: the rate reaches zero at step 5"),
    ("training.betas=[0.9, 1.0]", "training.betas: "),
    ("training={decay_steps=9, schedule={type='constant'}}", "training.decay_steps: 9, but training.schedule"),
    ("training.schedule={type='cosine'}", "training.decay_steps: training.schedule 'cosine' needs"),
    ("training.schedule={type='wsd', final_steps=2}", "training.decay_steps: training.schedule 'wsd' needs"),
    ("training.schedule={type='linear', min_ratio=0.1}", "training.decay_steps: training.schedule 'linear' n"),
    (
        "training={warmup_steps=5, decay_steps=9, schedule={type='wsd', final_steps=5}}",
        "training.schedule.final_steps: a decay of 5 steps that ends at training.decay_steps 9",
    ),
    ("training={deterministic=false, save_optimizer_every=2}", "training.deterministic: with training.save_opt"),
    ("training.compile=true", "training.compile: layers are compiled on CUDA"),
    ("training.checkpoint_every=2", "training.checkpoint_every: without training.gradient_checkpointing"),
    ("training.offload_activations=true", "training.offload_activations: without training.gradient_ch"),
    ("learner.replicas=2", "learner.replicas: 2 does not divide the 1 processes"),
    ("learner.context_parallel=2", "learner.context_parallel: 2 does not divide the 1 processes"),
    ("learner.nodes=2", "learner.rendezvous: '', but 2 nodes meet at HOST:PORT"),
    (
        "placement.services=pools",
        "learner={nodes=2, rendezvous='a:1'}",
        "learner.rendezvous: 'a:1', but with placement.services=pools the first node says",
    ),
    (
        "placement.services=pools",
        "learner.memory_directory=/dev/shm",
        "learner.memory_directory: it is the memory of one machine, and with placement.services=pools",
    ),
    (
        "learner={nodes=2, rendezvous='a:1', memory_directory='/dev/shm', keep_state=true}",
        "learner.memory_directory: it is the memory of one machine, and with learner.nodes=2",
    ),
    ("rollout.temperature=0", "rollout.temperature: training needs"),
    ("environments.0.temperature=0", "environments.0.temperature: training needs"),
    ('filtering.filters=[{type="truncated"}]', "filtering.filters: 'errored' may not be left out"),
    ('filtering.filters=[{type="errored"}, {type="errored"}]', "filtering.filters: 'errored' is there 2"),
    ("algorithm.overlong={max_tokens=8, buffer_tokens=9}", "algorithm.overlong.buffer_tokens: 9 is more than"),
    (
        'environments.0.algorithm={type="max_rl", overlong={max_tokens=8, buffer_tokens=9}}',
        "environments.0.algorithm.overlong.buffer_tokens: 9 is more than",
    ),
    (ALONE, "algorithm.type=rloo", "assignment.group_size: rloo compares the rollouts of a group"),
    (ALONE, "algorithm.type=max_rl", "assignment.group_size: max_rl compares"),
    (ALONE, "algorithm.type=dr_grpo", "assignment.group_size: dr_grpo compares"),
    (ALONE, "algorithm.type=reinforce_pp", "assignment.group_size: reinforce_pp compares"),
    (ALONE, "algorithm.type=hierarchical_grpo", "assignment.group_size: hierarchical_grpo compares"),
    (ALONE, "algorithm.type=echo", "assignment.group_size: echo compares"),
    (ALONE, 'algorithm={type="custom", function="a:b"}', "assignment.group_size: custom compares"),
    (ALONE, "algorithm.type=rae", OWN + '{type="grpo"}', "assignment.group_size: grpo compares"),
    (ECHO + "tool={tool_names=[]}}", "algorithm.tool.tool_names: it names no tool"),
    (ECHO + 'user={tool_names=["a"]}}', "algorithm.user.tool_names: only results of tools have a tool's name"),
    (ECHO + 'system={tool_names=["a"]}}', "algorithm.system.tool_names: only results of tools"),
    (ECHO + "arguments={limit=1}}", "algorithm.arguments: there is no keep_mask that would be given them"),
    (ECHO + "in_parts=true}", "algorithm.in_parts: there is no keep_mask that would be called"),
    (ECHO + 'keep_mask="masks.short"}', "algorithm.keep_mask: 'masks.short' is no import path"),
    (OWN + '{type="custom", function="a.b:c.d"}', "environments.0.algorithm.function: 'a.b:c.d' is no import path"),
    ('algorithm={type="rae", decay=0}', "algorithm.decay: at 0, order 'post' subtracts the reward itself"),
    (REFILL, "filtering.max_batch_attempts=1", "assignment.refill: filtering.max_batch_at"),
    (POOLS, "assignment.shuffle=false", "assignment.shuffle: difficulty_pools draws at random"),
    ("admission={reject_min=0.5, reject_max=0.25}", "admission: the range from 0.5 to 0.25 is empty"),
    (REFILL, "algorithm.overlong={max_tokens=64, buffer_tokens=8}", "assignment.refill: gr"),
    (REFILL, "algorithm.length_penalty={}", "assignment.refill: groups whose advantages"),
    (REFILL, 'filtering.filters=[{type="errored"}]', "assignment.refill: groups whose a"),
    (REFILL, WATCHING, "admission={reject_min=0.1, reject_max=0.5}", "assignment.refill: g"),
    ("training.lora={dropout=0.1}", "training.lora.dropout: 0.1 would train another policy than is published"),
    ("training.lora={rank=513}", "training.lora.rank: the engine serves adapters up to rank 512, not 513"),
    ("training.lora={target_modules=[]}", "training.lora.target_modules: name at least one module"),
    (
        "training.lora={target_modules=['q_proj', 'lm_head']}",
        "training.lora.target_modules: lm_head cannot have an adapter",
    ),
    (
        "training.lora={target_modules=['embed_tokens']}",
        "training.lora.target_modules: embed_tokens cannot have an adapter",
    ),
    ("training.loss.sequence_mask={low=2.0, high=1.0}", "training.loss.sequence_mask: low 2.0 is not below high 1.0"),
    (
        "training.loss.sequence_mask.low=null",
        "training.loss.sequence_mask.high=null",
        "training.loss.sequence_mask: low and high are both null",
    ),
    (CISPO, "training.loss.tis.cap=5.0", "training.loss.tis.cap: cispo clips the same ratios at 5.0"),
    (
        CISPO,
        "training.loss.clip_low=0.5",
        "training.loss.tis.cap=0.5",
        "training.loss.tis.cap: 0.5 is not above cispo's",
    ),
]
SFT_FAULTS = [
    ("data.path=''", "data.path: a run of kind sft needs"),
    ("data.max_length=2049", "packing.tokens_per_row: a row of 2048 tokens cannot hold"),
    ("evaluation.every=2", "evaluation.every: a run of kind sft has demonstrations in place of env"),
    ('evaluation.sets=[{name="hard", every=2}]', "evaluation.every: a run of kind sft has demonstrations"),
    ("algorithm.type=grpo", "algorithm.type: a run of kind sft needs"),
    ('filtering.filters=[{type="errored"}, {type="zero_advantage"}]', "filtering.filters: 'zero_adv"),
    (REFILL, "assignment.refill: demonstrations are what they are"),
    (POOLS, "assignment.sampler: difficulty_pools goes by rewards"),
    (WARM, "environments.0.algorithm.type: a run of kind sft needs 'supervised'; it is 'rae'"),
]
FAULTS = [("demo", *each) for each in DEMO_FAULTS] + [("sft_demo", *each) for each in SFT_FAULTS]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[-1])
def test_a_fault_is_found_and_nothing_else(fault: tuple[str, ...]) -> None:
    preset, *overrides, expected = fault
    with pytest.raises(ConfigError) as caught:
        load([preset], overrides)
    assert [line[: len(expected)] for line in caught.value.problems] == [expected]


@pytest.mark.parametrize(
    "fine",
    [
        ("demo", "packing.tokens_per_row=256"),
        ("demo", "rollout.max_tokens=255"),
        ("demo", "evaluation={attempts=2, pass_at=[1, 2]}"),
        ("demo", "training={warmup_steps=5, decay_steps=6}"),
        ("demo", "training={warmup_steps=5, decay_steps=9, schedule={type='wsd', final_steps=4}}"),
        ("demo", "training={gradient_checkpointing=true, checkpoint_every=2, offload_activations=true}"),
        ("demo", "algorithm.overlong={max_tokens=8, buffer_tokens=8}"),
        ("sft_demo", "data.max_length=2048"),
        ("sft_demo", "environments=[]"),
        ("sft_demo", "evaluation={every=0, at_start=true}"),
        ("demo", "training.lora={rank=512, target_modules=['q_proj', 'v_proj']}"),
        ("demo", REFILL, "filtering.max_batch_attempts=2", POOLS, "admission={reject_min=0}"),
        ("demo", ALONE, "algorithm.type=rae"),
        ("demo", ALONE, "algorithm.type=supervised"),
        ("demo", ALONE, 'algorithm={type="custom", function="a.b:c", from_groups=false}'),
        ("demo", ALONE, OWN + '{type="rae"}'),  # nothing is credited by the run's algorithm
        ("demo", ECHO + 'tool={tool_names=["search"]}, keep_mask="masks:short", arguments={limit=1}}'),
        ("demo", ECHO + "user={}, system={}}"),
        ("demo", 'algorithm={type="rae", decay=0, order="pre"}'),
        ("demo", 'algorithm={type="custom", function="f:_g"}'),
        ("demo", "training.loss.sequence_mask={low=1.0, high=2.0}"),
        ("demo", "training.loss.sequence_mask.low=null"),
        ("demo", CISPO, "training.loss.tis.cap=4.9"),
        ("demo", CISPO, 'training.loss.tis={cap=9.0, level="sequence"}'),
        ("demo", CISPO, "training.loss.clip_low=0.5", "training.loss.tis.cap=0.6"),
        ("demo", "training.loss.type=ppo", "training.loss.tis.cap=5.0"),
        # An evaluation asks for nothing of training, and credits nothing.
        ("demo", "kind=evaluate", "packing.tokens_per_row=2", ALONE),
        ("demo", "kind=evaluate", ALONE, 'algorithm={type="custom", function="nothing"}'),
        # Groups without signal are replaced where a gate or a filter refuses them.
        ("demo", REFILL, "algorithm.overlong={max_tokens=64, buffer_tokens=8}", "admission={}"),
        ("demo", REFILL, "algorithm.length_penalty={}", "admission={reject_min=-0.1, reject_max=0.1}"),
        ("demo", REFILL, WATCHING, "admission={}"),
        ("demo", REFILL, WATCHING, "algorithm.type=rae"),
        ("demo", REFILL, WATCHING, 'algorithm={type="custom", function="m:f", from_groups=false}'),
        ("demo", REFILL, "algorithm.type=rloo"),
    ],
    ids=str,
)
def test_what_works_is_allowed(fine: tuple[str, ...]) -> None:
    assert problems(load([fine[0]], fine[1:])) == []


def test_files_that_are_missing_here(tmp_path: Path) -> None:
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
def test_samples_longer_than_the_model_are_refused(preset: str, key: str, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.touch()
    config = load([preset], [f"model.path={tmp_path}", f"data.path={data}"])
    for positions, expected in ((256, []), (255, [key])):
        (tmp_path / "config.json").write_text(f'{{"max_position_embeddings": {positions}}}')
        assert [line.partition(":")[0] for line in missing_files(config)] == expected
    (tmp_path / "config.json").write_text("{}")
    assert missing_files(config) == []


@pytest.mark.parametrize(
    ("of_model", "expected"),
    [
        ({"layer_types": ["full_attention"], "sliding_window": 16}, ""),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 256}, ""),
        ({"layer_types": ["sliding_attention"], "sliding_window": 255}, "256 is longer than the sliding window"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of linear_attention"),
        ({"text_config": {"layer_types": ["linear_attention"]}}, "layers of linear_attention"),
        ({"layer_types": 3}, ""),
        ([], ""),
    ],
)
def test_a_model_whose_layers_cannot_be_trained_is_refused(of_model: Any, expected: str, tmp_path: Path) -> None:
    """They can be evaluated: the engine has its own kernels for them."""
    (tmp_path / "config.json").write_text(json.dumps(of_model))
    config = load(["demo"], [f"model.path={tmp_path}"])
    assert [expected in line for line in missing_files(config)] == [True] * bool(expected)
    assert missing_files(config.model_copy(update={"kind": "evaluate"})) == []


def test_a_model_is_needed_unless_a_policy_stands_for_it() -> None:
    config = RunConfig(kind="evaluate")
    assert missing_files(config) == ["model.path: say which directory (or hub id) holds the starting weights"]
    named = config.evaluation.model_copy(update={"policy": "latest"})
    assert missing_files(config.model_copy(update={"evaluation": named})) == []


def test_a_hub_id_is_not_taken_for_a_directory() -> None:
    assert missing_files(load(["qwen3_gpu"])) == []


def test_echo_without_a_role_adds_nothing() -> None:
    silent = RunConfig.model_validate(load(["demo"]).model_dump() | {"algorithm": {"type": "echo", "tool": None}})
    (line,) = problems(silent)
    assert line.startswith("algorithm: without a role (tool, user, system) echo adds nothing to grpo")


def test_a_replay_is_held_to_it_where_it_credits_again() -> None:
    alone = load(["demo"], [ALONE, "algorithm.type=rae"]).model_dump(mode="json") | {"kind": "replay"}
    with pytest.raises(ConfigError, match=r"assignment\.group_size: rloo compares"):
        load((), ["algorithm.type=rloo", "replay.from_stage=advantage"], base=alone)
    assert load((), ["algorithm.type=rloo", "replay.from_stage=packing"], base=alone).algorithm.type == "rloo"


@pytest.mark.parametrize("from_groups", [True, False])
def test_a_function_of_ones_own_says_whether_equal_rewards_teach_it_something(from_groups: bool) -> None:
    config = load(["demo"], [f'algorithm={{type="custom", function="a:b", from_groups={str(from_groups).lower()}}}'])
    assert config.algorithm.compares_group is from_groups
    assert bool(config.learns_from_equals.get("")) is not from_groups


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


@pytest.mark.parametrize("settings", [{"rank": 0}, {"alpha": 0}, {"target_modules": "every-linear"}])
def test_what_makes_no_sense_is_no_section(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LoraConfig(**settings)


def test_adapters_are_in_keys() -> None:
    assert content(TrainingConfig())["lora"] is None
    one, other = (content(TrainingConfig(lora=LoraConfig(rank=rank))) for rank in (4, 8))
    assert one["lora"]["rank"] == 4
    assert one != other


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        (["rollout.max_off_policy_steps=1"], "rollout.max_off_policy_steps: 1 lets the engine sample"),
        (["rollout.max_off_policy_steps=1", "engine.gpus=0,1", "learner.gpus=1"], "rollout.max_off_policy_steps"),
        (["learner.gpus=1", "learner.processes=2"], "learner.gpus: '1' are fewer"),
        (["rollout.max_off_policy_steps=1", "engine.gpus=0", "learner.gpus=1"], ""),
        (["rollout.max_off_policy_steps=1", "engine.url=http://127.0.0.1:1"], ""),
        ([], ""),
    ],
)
def test_engine_and_learner_do_not_work_at_once_on_one_gpu(settings: list[str], where: str) -> None:
    if not where:
        assert load(["qwen3_gpu"], settings)
        return
    with pytest.raises(ConfigError, match=re.escape(where)):
        load(["qwen3_gpu"], settings)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        (["training.dtype=float32"], "training.policy_dtype: bfloat16, but the model is computed in float32"),
        (["training.dtype=auto", "training.device=cpu"], "training.policy_dtype"),
        (["learner.memory_directory="], "learner.keep_state: there is no place for it"),
        (["training.dtype=auto"], ""),
    ],
)
def test_what_is_published_and_kept_has_a_precision_and_a_place(settings: list[str], where: str) -> None:
    if not where:
        assert load(["qwen3_gpu"], settings)
        return
    with pytest.raises(ConfigError, match=re.escape(where)):
        load(["qwen3_gpu"], settings)


ON_POOLS = ["store=s3://bucket/x", "placement.services=pools", "placement.interface=eth0"]


@pytest.mark.parametrize(
    ("kind", "settings", "fits"),
    [
        ("train", ON_POOLS, False),
        ("train", ["store=s3://bucket/x", "learner={nodes=2, rendezvous='a:1'}"], False),
        ("train", [*ON_POOLS, "placement.interface=lo", "learner.nodes=2"], True),
        ("sft", [*ON_POOLS, "data.path=rows.jsonl"], False),
        ("evaluate", ON_POOLS, False),
        ("train", [*ON_POOLS, "placement.interface=lo"], True),
        ("train", [*ON_POOLS, "placement.services=local"], True),
        ("train", [*ON_POOLS, "store=/shared/x"], True),
        ("train", [*ON_POOLS, "store=file:///shared/x"], True),
        ("evaluate", [*ON_POOLS, "evaluation.external={url='http://h:1', model='m'}"], True),
        ("replay", [*ON_POOLS, "replay={run='a', from_stage='filtering', until='packing'}"], True),
        ("replay", [*ON_POOLS, "replay={run='a', from_stage='packing', until='training'}"], False),
    ],
)
def test_weights_come_to_other_machines_by_a_shared_file_system(kind: str, settings: list[str], fits: bool) -> None:
    preset = "sft_demo" if kind == "sft" else "demo"
    if fits:
        assert load([preset], [f"kind={kind}", *settings])
        return
    with pytest.raises(ConfigError, match=r"(services: pools|nodes: 2), but the store is s3://bucket/x"):
        load([preset], [f"kind={kind}", *settings])


STREAM = ["rollout.max_off_policy_steps=2", "environments.0.address="]
KEEP = [*STREAM, "rollout.weight_update=keep"]


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        (["rollout.weight_update=keep"], "no rollouts are under way then"),
        (["rollout.max_off_policy_steps=1", "rollout.weight_update=abort"], "no rollouts are under way then"),
        ([*STREAM, "rollout.recompute_states=false"], "'keep'; states are computed again otherwise"),
        ([*KEEP, "training.lora.rank=8"], "training.lora serves each policy as an adapter"),
        ([*KEEP, "engine.url=http://127.0.0.1:1"], "the engine of someone else (engine.url)"),
        ([*KEEP, "environments.0.address=tcp://127.0.0.1:1"], "environments of someone else (environments.N.address)"),
        (KEEP, ""),
        ([*STREAM, "rollout.keep_turns=true"], ""),
        ([*STREAM, "rollout.weight_update=abort", "training.lora.rank=8", "engine.url=http://127.0.0.1:1"], ""),
    ],
)
def test_weights_are_exchanged_only_where_each_token_can_know_its_policy(settings: list[str], where: str) -> None:
    if not where:
        assert load(["demo"], settings)
        return
    with pytest.raises(ConfigError, match=r"rollout\.(weight_update|recompute_states): .*" + re.escape(where)):
        load(["demo"], settings)


TURNS = "rollout.keep_turns=true"


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ([*STREAM, TURNS, "engine.url=http://127.0.0.1:1"], "the engine of someone else (engine.url)"),
        ([TURNS, "environments.0.address=tcp://127.0.0.1:1"], "environments of someone else (environments.N.address)"),
    ],
)
def test_turns_are_kept_only_where_they_come_by(settings: list[str], where: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.keep_turns: .*" + re.escape(where)):
        load(["demo"], settings)
    assert load(["demo"], [TURNS, "environments.0.address=", "engine.url=http://127.0.0.1:1"])


OVERSAMPLED = [*STREAM, "assignment.oversampling=1.5"]


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        (["rollout.stale=drop"], "rollout.stale: .*no rollouts are under way then"),
        ([*STREAM, "rollout.stale=top_up"], "rollout.stale: .*take rollout.weight_update=keep"),
        ([*KEEP, "rollout.stale=top_up"], ""),
        ([*OVERSAMPLED, "rollout.stale=drop"], ""),
        (OVERSAMPLED, "assignment.oversampling: 1.5 .*take rollout.stale=drop"),
        ([*STREAM, POOLS], ""),
    ],
)
def test_a_stream_says_what_becomes_of_groups_that_are_too_old(settings: list[str], where: str) -> None:
    if not where:
        assert load(["demo"], settings)
        return
    with pytest.raises(ConfigError, match=where):
        load(["demo"], settings)


def test_a_directory_is_no_data_file(tmp_path: Path) -> None:
    mine = f'[{{name="mine", taskset={{id="own_data", path="{tmp_path}"}}}}]'
    config = load(["demo"], ["model.path=owner/model", f"environments={mine}"])
    (line,) = missing_files(config)
    assert line.startswith(f"environments.0.taskset.path: {tmp_path} is a directory; want a data file")
    assert missing_files(load(["demo"], ["model.path=owner/model"])) == []
