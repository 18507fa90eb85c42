"""Merges an adapter into the weights of its base, and makes random adapters to check an engine with.

`python -m tasks.learner.adapter_tools merge BASE ADAPTER TARGET` writes a model like any other, in float32: config and
tokenizer of the base, weights W + alpha / rank * B A.

`python -m tasks.learner.adapter_tools sample REQUEST` writes two random adapters over a model, with the learner's
log-probs of all three as rows.json; REQUEST has the arguments of `write_adapters` as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from configs.training import TrainingConfig
from tasks.learner.adapters import open_adapter
from tasks.learner.checkpoint import companions, save_policy
from tasks.learner.distributed import World, like, start_world
from tasks.learner.model import load_policy
from tasks.learner.trainer import Trainer
from tasks.runtime.torchvision_operators import declare_torchvision_operators

SPREAD = 0.2
"""Standard deviation of the factors B: large enough that log-probs differ by far more than rounding."""
BASE = "base"
NAMES = ("first", "second")
ROWS = "rows.json"


def merge(base: Path, adapter: Path, target: Path) -> None:
    """Write the merged policy to `target`, a directory that does not exist yet."""
    declare_torchvision_operators()
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(target)
    for name, content in companions(base).items():
        (target / name).write_bytes(content)


def write_adapters(
    model: str, target: str, training: dict[str, Any], learner: dict[str, Any], probe: list[int], world: World
) -> list[dict[str, Any]]:
    """Write the adapters below `target`; return a row for the base and each of them.

    Rows have the columns of the policies table that `engine.checks` reads, and `directory`.
    `training` has the section lora; `probe` are the token ids whose log-probs are taken.
    """
    trainer, rows = Trainer(world), []
    trainer.configure(training, learner)
    for seed, name in enumerate((BASE, *NAMES)):
        directory = Path(model) if name == BASE else Path(target) / name
        if name != BASE:
            _write_adapter(Path(model), directory, TrainingConfig(**training), seed, world)
        trainer.load(name, str(directory), fresh_optimizer=True, base=model)
        row = {"policy_key": name, "version": 0, "probe_token_ids": probe, "probe_logprobs": trainer.probe(probe)}
        rows.append({**row, "directory": str(directory)})
    return rows


@torch.no_grad()
def _write_adapter(model: Path, directory: Path, training: TrainingConfig, seed: int, world: World) -> None:
    """Store an adapter with random factors B in place of the initial zeros."""
    policy = load_policy(model, training, torch.device("cpu"), open_adapter(BASE, model, None, training.lora))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.causal.named_parameters():
        # As initialised, with B zero, an adapter is its base, and a check of engines would show nothing.
        if parameter.requires_grad and ".lora_B." in name:
            parameter.copy_(like(SPREAD * torch.randn(parameter.shape, generator=generator), parameter))
    save_policy(policy, None, {}, directory, world)


def main(command: str, *arguments: str) -> None:
    """Command line: `merge BASE ADAPTER TARGET`, or `sample` with what `write_adapters` takes on standard input."""
    if command == "merge":
        merge(*map(Path, arguments))
        return
    request = json.load(sys.stdin)
    Path(request["target"]).mkdir(parents=True, exist_ok=True)
    rows = write_adapters(**request, world=start_world())
    Path(request["target"], ROWS).write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
