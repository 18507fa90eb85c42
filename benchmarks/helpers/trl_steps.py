"""Steps of TRL's GRPOTrainer, for against_trl.py, which runs this file in an environment that has TRL.

Prints a JSON line for each step: seconds since the process began, processor seconds so far, and what was sampled.
"""

import argparse
import json
import time
from typing import Any

import psutil
from datasets import Dataset

from tasks.runtime.torchvision_operators import declare_torchvision_operators

declare_torchvision_operators()

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


class Clock(TrainerCallback):  # type: ignore[misc]
    """Prints the time at the end of each step."""

    def on_log(self, _arguments: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Print; the trainer logs every step."""
        if "reward" in logs:
            times = psutil.Process().cpu_times()
            figures = {"reward": float(logs["reward"]), "tokens": float(logs["num_tokens"])}
            record = {"step": state.global_step, "wall": time.perf_counter(), "cpu": times.user + times.system}
            print(json.dumps(record | figures), flush=True)


def score(completions: list[str], expected: list[str], **_: Any) -> list[float]:
    """Return the environment's reward for each completion."""
    from sample_reverse_text.texts import similarity

    return [similarity(each, text) for each, text in zip(completions, expected, strict=True)]


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", help="what both sides share, as JSON")
    settings = json.loads(parser.parse_args().settings)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype="float32")
    config = GRPOConfig(
        output_dir=settings["directory"],
        per_device_train_batch_size=settings["trl_batch"],
        gradient_accumulation_steps=settings["groups"] * settings["group_size"] // settings["trl_batch"],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_tokens"],
        max_steps=settings["steps"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings["seed"],
    )
    with open(settings["prompts"], encoding="utf-8") as file:
        prompts = Dataset.from_list([json.loads(line) for line in file])
    GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=config,
        train_dataset=prompts,
        processing_class=tokenizer,
        callbacks=[Clock()],
    ).train()


if __name__ == "__main__":
    main()
