"""What must hold between sections: each fault planted alone, and found alone."""

from pathlib import Path

import pytest

from configs.checks.run import missing_files, problems, require_files
from configs.errors import ConfigError
from configs.load import load
from configs.run import RunConfig

TWICE = '[{name="a", taskset={id="x"}}, {name="a", taskset={id="y"}}]'
NO_ID = '[{name="a", taskset={}}]'

FAULTS = [
    ("demo", "packing.tokens_per_row=255", "packing.tokens_per_row: a row of 255 tokens cannot hold"),
    ("demo", "rollout.max_tokens=256", "rollout.max_tokens: 256 leaves no room"),
    ("demo", "evaluation.pass_at=[1, 2]", "evaluation.pass_at: pass@2 needs"),
    ("demo", "evaluation.pass_at=[0]", "evaluation.pass_at: pass@0 needs"),
    ("demo", "environments=[]", "environments: a run of kind train needs"),
    ("demo", f"environments={TWICE}", "environments: 2 of them are named 'a'"),
    ("demo", f"environments={NO_ID}", "environments.0.taskset.id: say which"),
    ("demo", "assignment.group_size=1", "assignment.group_size: grpo compares"),
    ("demo", "training={warmup_steps=5, decay_steps=5}", "training.decay_steps: the rate reaches zero at step 5"),
    ("demo", "training.betas=[0.9, 1.0]", "training.betas: "),
    ("demo", "training={decay_steps=9, schedule={type='constant'}}", "training.decay_steps: 9, but training.schedule"),
    ("demo", "training.schedule={type='cosine'}", "training.decay_steps: training.schedule 'cosine' needs"),
    ("demo", "training.schedule={type='wsd', final_steps=2}", "training.decay_steps: training.schedule 'wsd' needs"),
    ("demo", "training.schedule={type='linear', min_ratio=0.1}", "training.decay_steps: training.schedule 'linear' n"),
    (
        "demo",
        "training={warmup_steps=5, decay_steps=9, schedule={type='wsd', final_steps=5}}",
        "training.schedule.final_steps: a decay of 5 steps that ends at training.decay_steps 9",
    ),
    ("demo", "training.checkpoint_every=2", "training.checkpoint_every: without training.gradient_checkpointing"),
    ("demo", "training.offload_activations=true", "training.offload_activations: without training.gradient_ch"),
    ("demo", "packing.data_parallel=2", "packing.data_parallel: rows are dealt to 2 ranks"),
    ("demo", "rollout.temperature=0", "rollout.temperature: training needs"),
    ("demo", "environments.0.temperature=0", "environments.0.temperature: training needs"),
    ("demo", 'filtering.filters=[{type="truncated"}]', "filtering.filters: 'errored' may not be left out"),
    ("demo", 'filtering.filters=[{type="errored"}, {type="errored"}]', "filtering.filters: 'errored' is there 2"),
    ("demo", "algorithm.overlong={max_tokens=8, buffer_tokens=9}", "algorithm.overlong.buffer_tokens: 9 is more than"),
    (
        "demo",
        'environments.0.algorithm={type="max_rl", overlong={max_tokens=8, buffer_tokens=9}}',
        "environments.0.algorithm.overlong.buffer_tokens: 9 is more than",
    ),
    ("sft_demo", "data.path=''", "data.path: a run of kind sft needs"),
    ("sft_demo", "data.max_length=2049", "packing.tokens_per_row: a row of 2048 tokens cannot hold"),
    ("sft_demo", "evaluation.every=2", "evaluation.every: a run of kind sft has demonstrations in place of env"),
    ("sft_demo", 'evaluation.sets=[{name="hard", every=2}]', "evaluation.every: a run of kind sft has demonstrations"),
    ("sft_demo", "algorithm.type=grpo", "algorithm.type: a run of kind sft needs"),
    ("sft_demo", 'filtering.filters=[{type="errored"}, {type="zero_advantage"}]', "filtering.filters: 'zero_adv"),
]


@pytest.mark.parametrize(("preset", "override", "expected"), FAULTS, ids=[fault[1] for fault in FAULTS])
def test_a_fault_is_found_and_nothing_else(preset: str, override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([preset], [override])
    assert [line[: len(expected)] for line in caught.value.problems] == [expected]


@pytest.mark.parametrize(
    ("preset", "override"),
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
    ],
)
def test_the_bounds_themselves_are_allowed(preset: str, override: str) -> None:
    assert problems(load([preset], [override])) == []


def test_an_evaluation_asks_for_nothing_of_training() -> None:
    config = load(["demo"], ["kind=evaluate", "packing.tokens_per_row=2", "assignment.group_size=1"])
    assert problems(config) == []


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


def test_a_model_is_needed_unless_a_policy_stands_for_it() -> None:
    config = RunConfig(kind="evaluate")
    assert missing_files(config) == ["model.path: say which directory (or hub id) holds the starting weights"]
    named = config.evaluation.model_copy(update={"policy": "latest"})
    assert missing_files(config.model_copy(update={"evaluation": named})) == []


def test_a_hub_id_is_not_taken_for_a_directory() -> None:
    assert missing_files(load(["qwen3_gpu"])) == []
