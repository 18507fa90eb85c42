"""Writes two random adapters over a model and prints rows with the learner's log-probs of all three policies.

`python -m tests.gpu.adapters REQUEST`; REQUEST has the arguments of `write_adapters` as JSON.
"""

import json
import sys
from pathlib import Path

import torch

from configs.training import TrainingConfig
from tasks.learner.adapters import open_adapter
from tasks.learner.checkpoint import save_policy
from tasks.learner.distributed import like, start_world
from tasks.learner.model import load_policy
from tasks.learner.trainer import Trainer

SPREAD = 0.2
"""Standard deviation of the factors B: log-probs then differ by far more than rounding."""
BASE, *ADAPTERS = "base", "first", "second"


def write_adapters(model, target, training, learner, probe, world):
    """Write the adapters below `target`; return rows of base and adapters as `engine.checks` reads them.

    `training` has the section lora; `probe` are the token ids whose log-probs are taken.
    """
    trainer, rows = Trainer(world), []
    trainer.configure(training, learner)
    for seed, name in enumerate((BASE, *ADAPTERS)):
        directory = Path(model) if name == BASE else Path(target) / name
        if name != BASE:
            _write_adapter(Path(model), directory, TrainingConfig(**training), seed, world)
        trainer.load(name, str(directory), fresh_optimizer=True, base=model)
        row = {"policy_key": name, "version": 0, "probe_token_ids": probe, "probe_logprobs": trainer.probe(probe)}
        rows.append({**row, "directory": str(directory)})
    return rows


@torch.no_grad()
def _write_adapter(model, directory, training, seed, world):
    policy = load_policy(model, training, torch.device("cpu"), open_adapter(BASE, model, None, training.lora))
    torch.manual_seed(seed)
    for name, parameter in policy.causal.named_parameters():
        # A new adapter has B = 0 and equals its base.
        if parameter.requires_grad and ".lora_B." in name:
            parameter.copy_(like(SPREAD * torch.randn(parameter.shape), parameter))
    save_policy(policy, None, {}, directory, world)


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    Path(request["target"]).mkdir(parents=True, exist_ok=True)
    print(json.dumps(write_adapters(**request, world=start_world())))
