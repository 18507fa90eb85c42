"""Configs that other trainers publish, as they stand: all of their keys are known, and what comes out loads."""

from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.load import load
from configs.run import RunConfig
from configs.trainers.reading import read_foreign
from configs.trainers.translation import Translation, config_of, translate

PUBLISHED = Path(__file__).parents[2] / "fixtures/published"


def moved(*names: str) -> tuple[RunConfig, Translation]:
    """Return the config that comes of published files, and what is said of it."""
    trainer, keys, unread = read_foreign([str(PUBLISHED / name) for name in names])
    found = translate(keys, trainer)
    assert (found.unknown, unread) == ([], [])
    return load(base=config_of(found.settings)), found


def lost(found: Translation) -> str:
    """Return all keys without a counterpart."""
    return " ".join(each.keys for each in found.missing)


def test_adapters_and_several_turns() -> None:
    config, found = moved("alphabet_sort_lora.toml")
    (environment,) = config.environments
    assert environment.taskset == {
        "id": "alphabet-sort",
        "min_turns": 3,
        "max_turns": 5,
        "task": {"power_per_turn": False},
    }
    assert (config.assignment.groups_per_step, config.assignment.group_size) == (16, 8)
    assert config.training.lora is not None
    assert (config.training.lora.rank, config.training.lora.alpha) == (32, 64)
    assert config.rollout.max_off_policy_steps == 8, "the default there"
    assert lost(found) == "deployment.num_infer_gpus = 1"


def test_two_seats() -> None:
    config, found = moved("two_seats_rae.toml")
    own: Any = config.algorithm
    assert (own.type, own.decay, own.key, own.order) == ("rae", 0.95, "agent", "pre")
    assert (config.assignment.groups_per_step, config.assignment.group_size) == (32, 1)
    assert config.environments[0].seats == {}, "all agents are played alike"
    assert (config.evaluation.every, config.evaluation.num_examples) == (1, 16)
    assert "orchestrator.eval.source" in lost(found)


def test_an_algorithm_for_each_environment() -> None:
    config, found = moved("mixed_grpo_opd.toml")
    first, second = config.environments
    assert config.algorithm.type == "grpo" and first.algorithm is None
    teacher: Any = second.algorithm
    assert (teacher.type, teacher.teacher.url) == ("opd", "http://localhost:8001")
    assert "orchestrator.train.source.1.algo.teacher.name" in lost(found)


def test_five_environments_with_gates_on_a_cluster() -> None:
    config, found = moved("intellect_3.toml")
    weights = [(each.name, each.weight) for each in config.environments]
    assert weights == [("swe", 0.3), ("deepdive", 0.2), ("math", 0.3), ("logic", 0.2), ("code", 0.2)]
    assert config.admission is not None and config.training.optimizer.type == "muon"
    assert config.environments[1].harness["forward_env"] == ["SERPER_API_KEY"]
    assert {"weight_broadcast.type", "slurm.job_name", "trainer.model.cp"} <= {
        name.partition(" =")[0] for each in found.missing for name in each.keys.split(", ")
    }


def test_lists_of_tables_stay_lists() -> None:
    config, _ = moved("search_judges.toml")
    (judge,) = config.environments[0].taskset["task"]["judges"]
    assert judge["id"] == "reference" and judge["choices"] == ["A", "B"]
    assert config.rollout.max_off_policy_steps == 32
    own: Any = config.algorithm
    assert (own.length_penalty.input, own.length_penalty.output, own.length_penalty.turns) == (0.1, 0.0, 0.0)


def test_images() -> None:
    config, found = moved("color_codeword.toml")
    assert config.environments[0].taskset == {"id": "color-codeword", "images_per_turn": 1}
    assert config.learner.processes == 4 and "model.vlm.vision_encoder_attr" in lost(found)


def test_files_of_components() -> None:
    config, found = moved("orch.toml", "train.toml")
    assert (config.name, config.tracking.type, config.tracking.project) == ("reverse-text", "wandb", "reverse-text")
    assert (config.steps, config.training.learning_rate) == (20, 3e-6)
    assert (config.assignment.groups_per_step, config.model.renderer) == (8, "prime-qwen3")
    assert lost(found).startswith("trainer.monitors.wandb"), "a run has one tracker"


@pytest.mark.parametrize(
    ("name", "keyword"),
    [
        ("refused_sft.toml", "supervised"),
        ("refused_evals.toml", "for evaluations"),
        ("refused_inference.toml", "trains none"),
    ],
)
def test_what_is_no_reinforcement_learning_is_refused(name: str, keyword: str) -> None:
    with pytest.raises(ConfigError, match=keyword):
        moved(name)


def test_a_command_of_trl() -> None:
    config, found = moved("gspo.sh")
    loss: Any = config.training.loss
    assert (loss.type, loss.clip_low, loss.clip_high) == ("gspo", 3e-4, 4e-4)
    assert (config.assignment.groups_per_step, config.packing.updates_per_step) == (8, 4)
    assert config.training.lora is not None and config.training.lora.target_modules == ("q_proj", "v_proj")
    assert config.rollout.max_tokens == 1024
    assert "the number of steps is not given" in next(e.why for e in found.missing if "lr_scheduler_type" in e.keys)


def test_a_script_of_trl() -> None:
    config, _ = moved("lora_without_regret.py")
    assert config.environments[0].taskset["hub"] == "HuggingFaceH4/OpenR1-Math-220k-default-verified"
    assert config.training.lora is not None
    assert (config.training.lora.rank, config.training.lora.alpha) == (1, 32)
    assert (config.assignment.groups_per_step, config.assignment.group_size) == (1, 8)
    assert config.packing.updates_per_step == 2
