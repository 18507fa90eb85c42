"""Settings that are computed from TRL's arguments; those that only have another name are in trl.toml.

A step of TRL is an optimizer step. A step here samples a batch and makes `packing.updates_per_step` optimizer steps.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from flows.exchange.foreign_keys import SAMPLE, ForeignKeys, NoCounterpart, quotient, rename

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}
LOSSES = {"grpo": "ppo", "bnpo": "ppo", "dr_grpo": "ppo", "dapo": "ppo", "cispo": "cispo"}
PROMPT_TOKENS = 512
"""Room for a prompt whose length is not limited: the default of TRL's earlier `max_prompt_length`."""
UNKNOWN_STEPS = "the number of steps is not given, only the number of passes over the data: set it by hand"


def _rollouts_per_pass(keys: ForeignKeys) -> int:
    return int(keys["per_device_train_batch_size"]) * int(keys["num_processes"])


def _passes(keys: ForeignKeys) -> int:
    """Return the forward and backward passes in which one sampled batch is trained."""
    if keys["generation_batch_size"]:
        return max(int(keys["generation_batch_size"]) // _rollouts_per_pass(keys), 1)
    return int(keys["steps_per_generation"] or keys["gradient_accumulation_steps"])


def _updates_per_step(keys: ForeignKeys) -> int:
    text = "passes over a sampled batch are no whole number of optimizer steps"
    return quotient(_passes(keys), int(keys["gradient_accumulation_steps"]), text)


def _groups_per_step(keys: ForeignKeys) -> int:
    rollouts = _rollouts_per_pass(keys) * _passes(keys)
    return quotient(rollouts, int(keys["num_generations"]), "rollouts of a step are no whole number of groups")


def _steps(keys: ForeignKeys) -> int:
    """Return the optimizer steps as steps here, rounded up."""
    if int(keys["max_steps"]) <= 0:
        raise NoCounterpart(UNKNOWN_STEPS)
    return math.ceil(int(keys["max_steps"]) / _updates_per_step(keys))


def _schedule(keys: ForeignKeys) -> dict[str, Any]:
    kind = SCHEDULES.get(str(keys["lr_scheduler_type"]))
    if kind is None:
        raise NoCounterpart(f"schedules here are {', '.join(sorted({*SCHEDULES.values()}))}")
    if kind != "constant" and int(keys["max_steps"]) <= 0:
        raise NoCounterpart(f"the rate stays at its peak without training.decay_steps: {UNKNOWN_STEPS}")
    options = dict(keys.section("lr_scheduler_kwargs") or {})
    if "min_lr" in options:
        options["min_lr_rate"] = float(options.pop("min_lr")) / float(keys["learning_rate"])
    return {"type": kind} | rename(options, {"min_lr_rate": "min_ratio", "num_decay_steps": "final_steps"})


def _decay_steps(keys: ForeignKeys) -> int | None:
    falls = SCHEDULES.get(str(keys["lr_scheduler_type"]), "constant") != "constant"
    return int(keys["max_steps"]) if falls and int(keys["max_steps"]) > 0 else None


def _warmup_steps(keys: ForeignKeys) -> int:
    steps = float(keys["warmup_ratio"] or keys["warmup_steps"] or 0)
    if not 0 < steps < 1:
        return int(steps)
    if int(keys["max_steps"]) <= 0:
        raise NoCounterpart(f"a share of all steps, and {UNKNOWN_STEPS}: training.warmup_steps")
    return math.ceil(steps * int(keys["max_steps"]))


def _max_tokens(keys: ForeignKeys) -> int:
    if "max_completion_length" in keys and keys["max_completion_length"] is None:
        raise NoCounterpart("a reply has a limit here: rollout.max_tokens")
    return int(keys["max_completion_length"])


def _max_model_len(keys: ForeignKeys) -> int:
    return int(keys["vllm_max_model_length"] or int(keys["max_prompt_length"] or PROMPT_TOKENS) + _max_tokens(keys))


def _loss(keys: ForeignKeys) -> dict[str, Any]:
    kind = LOSSES.get(str(keys["loss_type"]))
    if kind is None:
        raise NoCounterpart("losses here are dppo, ipo, ppo, cispo, gspo, or a function of your own")
    high = float(keys.first("epsilon_high", "epsilon"))
    if kind == "cispo":  # no lower bound, there and here; the upper one is that of the weight itself
        return {"type": "cispo", "clip_high": round(high - 1, 9)}
    kind = "gspo" if keys["importance_sampling_level"] == "sequence" else kind
    loss = {"type": kind, "clip_low": float(keys["epsilon"]), "clip_high": high}
    return loss | ({"dual_clip": keys["delta"]} if keys["delta"] else {})


def _algorithm(keys: ForeignKeys) -> dict[str, Any]:
    if keys["scale_rewards"] == "batch":
        raise NoCounterpart("advantages are divided by the deviation of their group or not at all; see reinforce_pp")
    scaled = keys["scale_rewards"] in (True, "group")
    if keys["loss_type"] == "dr_grpo" and not scaled:
        return {"type": "dr_grpo", "length_normaliser": _max_tokens(keys)}
    return {"type": "grpo", "normalise_std": scaled} | ({"epsilon": 1e-4} if scaled else {})


def _lora(keys: ForeignKeys) -> dict[str, Any] | None:
    """Return the adapters' settings, unless adapters are switched off."""
    if keys["use_peft"] is False:
        return None
    targets = keys["lora_target_modules"]
    targets = [targets] if isinstance(targets, str) and targets != "all-linear" else targets
    values = {"rank": keys["lora_r"], "alpha": keys["lora_alpha"], "dropout": keys["lora_dropout"]}
    return {name: value for name, value in {**values, "target_modules": targets}.items() if value is not None}


def _environments(keys: ForeignKeys) -> list[dict[str, Any]]:
    """Return the rows of the dataset as an environment; where none is named, those of a file."""
    (sample,) = SAMPLE
    turns = int(keys["max_tool_calling_iterations"] or 0) + 1
    if not keys["dataset_name"]:
        return [{**sample, "max_turns": turns}]
    names = {"hub": "dataset_name", "subset": "dataset_config", "split": "dataset_train_split"}
    source = {name: keys[key] for name, key in names.items() if keys[key]}
    return [{**sample, "taskset": {"id": "own_data", **source, "task": sample["taskset"]["task"]}, "max_turns": turns}]


COMPUTED: Mapping[str, Callable[[ForeignKeys], Any]] = {
    "steps": _steps,
    "environments": _environments,
    "assignment.groups_per_step": _groups_per_step,
    "packing.updates_per_step": _updates_per_step,
    "rollout.max_tokens": _max_tokens,
    "engine.max_model_len": _max_model_len,
    "packing.tokens_per_row": lambda keys: max(2048, _max_model_len(keys)),
    "algorithm": _algorithm,
    "training.loss": _loss,
    "training.schedule": _schedule,
    "training.decay_steps": _decay_steps,
    "training.warmup_steps": _warmup_steps,
    "training.betas": lambda keys: [keys["adam_beta1"], keys["adam_beta2"]],
    "training.lora": _lora,
    "tracking": lambda keys: {"type": "wandb", "project": keys["project"]},
}
