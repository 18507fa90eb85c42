"""Arguments of TRL's GRPOConfig in our words, and what of them has none."""

from typing import Any

import pytest

from configs.load import load
from configs.trainers.translation import Translation, config_of, translate
from configs.trainers.trl import TRAINER


def settings(**arguments: Any) -> dict[str, Any]:
    """Return our settings out of arguments."""
    return translate(arguments, TRAINER).settings


def reasons(found: Translation) -> dict[str, str]:
    """Return why keys have no counterpart, by key."""
    return {lost.keys.partition(" =")[0]: lost.why for lost in found.missing}


def test_without_arguments_it_is_what_trl_does_by_default() -> None:
    config = load(base=config_of(settings(max_steps=100)))
    assert (config.steps, config.assignment.groups_per_step, config.assignment.group_size) == (100, 1, 8)
    assert config.rollout.max_tokens == 512 and config.engine.max_model_len == 1024
    assert config.algorithm.type == "grpo" and config.algorithm.normalise_std and config.algorithm.epsilon == 1e-4
    loss = config.training.loss
    assert loss.type == "ppo" and (loss.clip_low, loss.clip_high) == (0.2, 0.2)
    assert config.training.schedule.type == "linear" and config.training.decay_steps == 100
    assert config.training.gradient_checkpointing and config.training.learning_rate == 1e-6


@pytest.mark.parametrize(
    ("arguments", "groups", "updates"),
    [
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}, 2, 1),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_processes": 8}, 16, 1),
        ({"steps_per_generation": 8, "gradient_accumulation_steps": 2}, 8, 4),
        ({"generation_batch_size": 64, "gradient_accumulation_steps": 4}, 8, 2),
        ({"per_device_train_batch_size": 16, "num_generations": 4}, 4, 1),
    ],
)
def test_a_step_samples_one_batch_and_makes_its_optimizer_steps(
    arguments: dict[str, int], groups: int, updates: int
) -> None:
    found = settings(max_steps=80, eval_strategy="steps", eval_steps=40, **arguments)
    assert found["assignment.groups_per_step"] == groups
    assert found.get("packing.updates_per_step", 1) == updates
    # What is counted in optimizer steps there is counted in batches here, but for the schedule's.
    assert (found["steps"], found["evaluation.every"]) == (80 // updates, 40 // updates)
    assert found["training.decay_steps"] == 80


@pytest.mark.parametrize(
    "arguments", [{"num_generations": 7}, {"steps_per_generation": 3, "gradient_accumulation_steps": 2}]
)
def test_batches_that_are_no_whole_groups_or_updates_are_listed(arguments: dict[str, int]) -> None:
    found = translate({"max_steps": 10, **arguments}, TRAINER)
    assert any("no whole number" in lost.why for lost in found.missing)
    load(base=config_of(found.settings))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"lr_scheduler_type": "constant"}, {"training.schedule.type": "constant"}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}, {"training.warmup_steps": 5}),
        (
            {"lr_scheduler_type": "cosine", "warmup_ratio": 0.1},
            {"training.warmup_steps": 5, "training.decay_steps": 50},
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}, "learning_rate": 1e-5},
            {"training.schedule.min_ratio": 0.1},
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 20}},
            {"training.schedule.type": "wsd", "training.schedule.final_steps": 20, "training.decay_steps": 50},
        ),
    ],
)
def test_schedules(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    found = settings(max_steps=50, **arguments)
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_a_schedule_needs_to_know_how_many_steps_there_are() -> None:
    found = translate({"num_train_epochs": 3, "lr_scheduler_type": "cosine"}, TRAINER)
    assert "steps" not in found.settings and "training.schedule.type" not in found.settings
    assert "number of steps is not given" in reasons(found)["num_train_epochs"]
    assert "training.decay_steps" in reasons(found)["lr_scheduler_type"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"epsilon": 0.1, "epsilon_high": 0.28}, {"type": "ppo", "clip_low": 0.1, "clip_high": 0.28}),
        ({"delta": 3.0}, {"type": "ppo", "dual_clip": 3.0}),
        (
            {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
            {"type": "gspo", "clip_low": 3e-4},
        ),
        # A bound of the weight there, added to 1 here.
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"type": "cispo", "clip_high": 4.0}),
    ],
)
def test_losses(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    loss = config_of(settings(**arguments))["training"]["loss"]
    assert {key: loss[key] for key in expected} == expected


def test_dr_grpo_has_the_longest_reply_as_its_length() -> None:
    found = settings(loss_type="dr_grpo", scale_rewards=False, max_completion_length=300)
    assert (found["algorithm.type"], found["algorithm.length_normaliser"]) == ("dr_grpo", 300)
    scaled = translate({"loss_type": "dr_grpo"}, TRAINER)
    assert "deviation" in reasons(scaled)["loss_type"] and scaled.settings["algorithm.normalise_std"] is True


@pytest.mark.parametrize("loss_type", ["sapo", "luspo", "vespo"])
def test_losses_that_are_not_here_are_listed(loss_type: str) -> None:
    assert "losses here" in reasons(translate({"loss_type": loss_type}, TRAINER))["loss_type"]


def test_adapters() -> None:
    found = translate({"use_peft": True, "lora_r": 8, "lora_dropout": 0.05, "lora_target_modules": ["q_proj"]}, TRAINER)
    lora = load(base=config_of(found.settings)).training.lora
    assert lora is not None and (lora.rank, lora.alpha, lora.target_modules) == (8, 32, ("q_proj",))
    assert "must be 0" in reasons(found)["lora_dropout"]
    assert load(base=config_of(settings(use_peft=False, lora_r=8))).training.lora is None


def test_a_dataset_becomes_the_rows_of_an_environment() -> None:
    (environment,) = settings(dataset_name="a/b", dataset_config="main", max_tool_calling_iterations=4)["environments"]
    assert environment["taskset"] == {
        "id": "own_data",
        "hub": "a/b",
        "subset": "main",
        "task": {"scoring": "my_reward:reward"},
    }
    assert environment["max_turns"] == 5


def test_truncated_replies_are_left_out() -> None:
    filters = settings(mask_truncated_completions=True)["filtering.filters"]
    assert {"type": "truncated", "enforce": True} in filters and {"type": "zero_advantage"} in filters


def test_what_is_off_is_no_loss_and_what_is_on_is() -> None:
    off = translate(
        {"max_steps": 9, "beta": 0.0, "top_k": 0, "num_iterations": 1, "top_entropy_quantile": 1.0}, TRAINER
    )
    assert off.missing == [] and len(off.idle) == 4
    on = translate({"beta": 0.04, "num_iterations": 2}, TRAINER)
    assert "kl_tau" in reasons(on)["beta"] and "updates_per_step" in reasons(on)["num_iterations"]


def test_a_value_that_is_not_valid_here_is_listed_and_not_written() -> None:
    found = translate({"max_grad_norm": 0, "run_name": "a run", "epsilon": "wide"}, TRAINER)
    assert not {"training.max_grad_norm", "name", "training.loss.clip_low"} & set(found.settings)
    assert {"max_grad_norm", "run_name", "epsilon"} <= set(reasons(found))
