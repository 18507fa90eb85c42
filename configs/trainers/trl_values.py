"""Values of TRL as values of ours: what is more than another name of the same thing.

A converter raises NotNeeded where the default here says the same, NoCounterpart where nothing here does.
"""

import math
from collections.abc import Callable
from typing import Any

from configs.filters import FilteringConfig
from configs.trainers.translation import SAMPLE, Given, NoCounterpart, NotNeeded

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw": "adamw"}
LOSSES = {"grpo": "ppo", "bnpo": "ppo", "dr_grpo": "ppo", "dapo": "ppo", "cispo": "cispo"}
PROMPT_TOKENS = 512
"""Room for a prompt where its length is not said; what TRL's `max_prompt_length` was by default."""
UNKNOWN_STEPS = "the number of steps is not given, only the number of passes over the data: set it by hand"


def _per_update(given: Given) -> int:
    """Return the rollouts of one forward and backward pass of all processes."""
    return int(given["per_device_train_batch_size"]) * int(given["num_processes"])


def _passes(given: Given) -> int:
    """Return how many such passes one sampled batch is trained in."""
    if given["generation_batch_size"]:
        return max(int(given["generation_batch_size"]) // _per_update(given), 1)
    return int(given["steps_per_generation"] or given["gradient_accumulation_steps"])


def _updates(given: Given) -> int:
    """Return the optimizer steps that are made of a sampled batch."""
    passes, accumulated = _passes(given), int(given["gradient_accumulation_steps"])
    if passes % accumulated:
        raise NoCounterpart(
            f"{passes} passes over a sampled batch are no whole number of optimizer steps of {accumulated} passes; "
            "here every step samples a batch of its own"
        )
    return passes // accumulated


def updates_per_step(given: Given) -> int:
    """Return the optimizer steps of a sampled batch, where they are more than one."""
    if (updates := _updates(given)) == 1:
        raise NotNeeded
    return updates


def groups_per_step(given: Given) -> int:
    """Return the examples of a sampled batch."""
    rollouts, group = _per_update(given) * _passes(given), int(given["num_generations"])
    if rollouts % group:
        raise NoCounterpart(f"{rollouts} rollouts of a step are no whole number of groups of {group}")
    return rollouts // group


def whole(key: str) -> Callable[[Given], int]:
    """Return a converter of a number of optimizer steps there to steps here, rounded up."""

    def steps(given: Given) -> int:
        if given[key] is None or (key == "max_steps" and float(given[key]) <= 0):
            raise NoCounterpart(UNKNOWN_STEPS)
        if 0 < float(given[key]) < 1:
            raise NoCounterpart("it is a share of all steps, and here a number of steps")
        return max(math.ceil(float(given[key]) / _updates(given)), 1)

    return steps


def schedule(given: Given) -> str:
    """Return how the learning rate falls."""
    name = str(given["lr_scheduler_type"])
    if name not in SCHEDULES:
        raise NoCounterpart(f"schedules here are {', '.join(sorted({*SCHEDULES.values()}))}")
    if SCHEDULES[name] != "constant" and int(given["max_steps"]) <= 0:
        raise NoCounterpart(
            f"the rate falls until the last step, and {UNKNOWN_STEPS}, in training.decay_steps. Without it the rate "
            f"stays "
            "at its peak"
        )
    if SCHEDULES[name] == "linear":  # the default here, too
        raise NotNeeded
    return SCHEDULES[name]


def decay_steps(given: Given) -> int:
    """Return the optimizer step at which the rate has fallen: the last one."""
    falls = SCHEDULES.get(str(given["lr_scheduler_type"]), "constant") != "constant"
    if not falls or int(given["max_steps"]) <= 0:
        raise NotNeeded
    return int(given["max_steps"])


def warmup(given: Given) -> int:
    """Return the optimizer steps of warm-up, of a share as well."""
    ratio = given.first("warmup_ratio", default=0.0)
    steps = float(ratio if ratio else given["warmup_steps"] or 0)
    if 0 < steps < 1:
        if int(given["max_steps"]) <= 0:
            raise NoCounterpart(f"a share of all steps, and {UNKNOWN_STEPS}: training.warmup_steps")
        return math.ceil(steps * int(given["max_steps"]))
    return int(steps)


def scheduler_setting(name: str, *keys: str) -> Callable[[Given], Any]:
    """Return a converter of the first of `keys` in `lr_scheduler_kwargs`, for schedules here that have it."""

    def value(given: Given) -> Any:
        settings = given["lr_scheduler_kwargs"] or {}
        settings = settings if isinstance(settings, dict) else {}
        found = next((settings[key] for key in keys if key in settings), None)
        if found is None and name == "min_ratio" and "min_lr" in settings:
            found = float(settings["min_lr"]) / float(given["learning_rate"])
        if found is None or _schedule_of(given) not in (("wsd",) if name == "final_steps" else ("cosine", "wsd")):
            raise NotNeeded
        return found

    return value


def _schedule_of(given: Given) -> str:
    return SCHEDULES.get(str(given["lr_scheduler_type"]), "")


def optimizer(given: Given) -> str:
    """Return the optimizer, where it is another than the default here."""
    name = str(given["optim"])
    if name not in OPTIMIZERS:
        raise NoCounterpart("the optimizer here is adamw, muon or sign_sgd, in training.optimizer.type")
    if OPTIMIZERS[name] == "adamw":
        raise NotNeeded
    return OPTIMIZERS[name]


def dtype(given: Given) -> str:
    """Return the precision of the learner."""
    if given["fp16"]:
        raise NoCounterpart("the learner computes in bfloat16 or float32; training.dtype chooses")
    return "bfloat16" if given["bf16"] or given["bf16"] is None else "float32"


def model_len(given: Given) -> int:
    """Return the most tokens of prompt and reply."""
    if given["vllm_max_model_length"]:
        return int(given["vllm_max_model_length"])
    return int(given.first("max_prompt_length", default=PROMPT_TOKENS)) + completion(given)


def completion(given: Given) -> int:
    """Return the most tokens of a reply."""
    if given["max_completion_length"] is None:
        raise NoCounterpart("a reply has a limit here: rollout.max_tokens")
    return int(given["max_completion_length"])


def tokens_per_row(given: Given) -> int:
    """Return the length of a packed row, where the longest sample wants more than the default."""
    if model_len(given) <= 2048:
        raise NotNeeded
    return model_len(given)


def loss(given: Given) -> str:
    """Return the loss of the rl component."""
    name = str(given["loss_type"])
    if name not in LOSSES:
        raise NoCounterpart("losses here are dppo, ipo, ppo, cispo, gspo, or a function of your own")
    return "gspo" if given["importance_sampling_level"] == "sequence" else LOSSES[name]


def clip_low(given: Given) -> float:
    """Return how far below 1 a ratio is clipped."""
    if given["loss_type"] == "cispo":  # no lower bound, there and here
        raise NotNeeded
    return float(given["epsilon"])


def clip_high(given: Given) -> float:
    """Return how far above 1 a ratio, or the weight of cispo, is clipped."""
    high = float(given["epsilon"] if given["epsilon_high"] is None else given["epsilon_high"])
    return round(high - 1, 9) if given["loss_type"] == "cispo" else high


def algorithm(given: Given) -> str:
    """Return the algorithm, where it is another than the default here."""
    if given["loss_type"] != "dr_grpo":
        raise NotNeeded
    if _scales(given):
        raise NoCounterpart("dr_grpo here does not divide by the deviation; without it, this is grpo with the loss ppo")
    return "dr_grpo"


def _scales(given: Given) -> bool:
    return given["scale_rewards"] in (True, "group")


def normalise(given: Given) -> bool:
    """Return whether advantages are divided by the deviation of their group."""
    if given["scale_rewards"] == "batch":
        raise NoCounterpart("advantages are divided by the deviation of their group or not at all; see reinforce_pp")
    if given["loss_type"] == "dr_grpo" and not _scales(given):
        raise NotNeeded
    return _scales(given)


def epsilon(given: Given) -> float:
    """Return what is added to that deviation."""
    if not _scales(given):
        raise NotNeeded
    return 1e-4


def length_normaliser(given: Given) -> int:
    """Return the tokens that a rollout counts for in dr_grpo."""
    if given["loss_type"] != "dr_grpo" or _scales(given):
        raise NotNeeded
    return completion(given)


def filters(given: Given) -> list[dict[str, Any]]:
    """Return the default filters, with that of truncated replies enforced."""
    if not given["mask_truncated_completions"]:
        raise NotNeeded
    kinds = [each.type for each in FilteringConfig().filters]
    return [{"type": kind, "enforce": True} if kind == "truncated" else {"type": kind} for kind in kinds]


def engine_arguments(given: Given) -> list[str]:
    """Return arguments for vLLM's command line."""
    arguments = []
    if int(given["vllm_tensor_parallel_size"]) > 1:
        arguments += ["--tensor-parallel-size", str(given["vllm_tensor_parallel_size"])]
    if given["vllm_model_impl"] != "vllm":
        arguments += ["--model-impl", str(given["vllm_model_impl"])]
    if not arguments:
        raise NotNeeded
    return arguments


def renderer_settings(given: Given) -> dict[str, Any]:
    """Return the variables of the chat template that a renderer knows."""
    settings = given["chat_template_kwargs"] or {}
    if set(settings) - {"enable_thinking"}:
        raise NoCounterpart("of a chat template's variables only enable_thinking is known: model.renderer_settings")
    return dict(settings)


def evaluation_every(given: Given) -> int:
    """Return the steps here between evaluations."""
    if given["eval_strategy"] in ("no", None):
        raise NotNeeded
    if given["eval_strategy"] != "steps" or not given["eval_steps"]:
        raise NoCounterpart("evaluations come every so many steps here: evaluation.every")
    return whole("eval_steps")(given)


def lora(key: str) -> Callable[[Given], Any]:
    """Return a converter of a setting of adapters, which is written unless they are switched off."""

    def value(given: Given) -> Any:
        if given["use_peft"] is False:
            raise NotNeeded
        if key == "lora_target_modules" and isinstance(given[key], str) and given[key] != "all-linear":
            return [given[key]]
        return given[key]

    return value


def environments(given: Given) -> list[dict[str, Any]]:
    """Return the rows of the dataset as an environment; where none is named, those of a file."""
    (sample,) = SAMPLE
    calls = given.first("max_tool_calling_iterations")
    turns = 1 if calls is None else int(calls) + 1
    if not given.first("dataset_name"):
        return [{**sample, "max_turns": turns}]
    names = {"hub": "dataset_name", "subset": "dataset_config", "split": "dataset_train_split"}
    chosen = {name: given.first(key) for name, key in names.items() if given.first(key)}
    return [
        {
            "name": "my_data",
            "taskset": {"id": "own_data", **chosen, "task": sample["taskset"]["task"]},
            "max_turns": turns,
        }
    ]
