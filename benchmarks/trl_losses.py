"""Our losses beside TRL's own code on the same batches: `python -m benchmarks.trl_losses`; figures in trl_losses.md.

Calls `GRPOTrainer._compute_loss` of TRL 1.16 as it is, on a trainer that has its settings and no model: what would be
the model's log-probs are the batch's. Compared are value and gradient by those log-probs, in float64, over rollouts of
one to 24 tokens with padding, advantages of zero among them. `--trl DIR` keeps the environment that TRL goes into.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.against_trl import ROOT, install_trl
from configs.losses import CispoLoss, DppoLoss, GspoLoss, LossConfig, PpoLoss, TruncatedImportance
from tests.fixtures.padded import Batch, packed_loss

BATCHES = 500
WIDE = 1e9
"""A bound that nothing reaches."""
CASES: Mapping[str, tuple[dict[str, Any], LossConfig]] = {
    "ppo, clip 0.2": ({}, PpoLoss()),
    "ppo, clip 0.2 and 0.28": ({"epsilon_high": 0.28}, PpoLoss(clip_high=0.28)),
    "gspo, clip 0.2": ({"importance_sampling_level": "sequence"}, GspoLoss(clip_low=0.2, clip_high=0.2)),
    "cispo, at most 1.2": ({"loss_type": "cispo", "epsilon_high": 1.2}, CispoLoss(clip_low=1.0, clip_high=0.2)),
    "truncated importance, cap 2": (
        {"use_vllm": True},
        DppoLoss(mask_low=WIDE, mask_high=WIDE, kl_tau=0.0, tis=TruncatedImportance(cap=2.0)),
    ),
}
"""By name TRL's settings, where they differ from `trainer`, and our loss."""


def random_batch(generator: torch.Generator) -> Batch:
    """Learner's log-probs l and engine's q, advantages and mask, each (B, T); the first three float64."""
    lengths = torch.randint(1, 25, (int(torch.randint(1, 17, (1,), generator=generator)),), generator=generator)
    shape = (len(lengths), int(lengths.max()))
    q = -3 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.01
    spread = 0.05 if torch.rand(1, generator=generator) < 0.5 else 0.7
    l = (q + spread * torch.randn(shape, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)  # noqa: E741
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    advantages[torch.rand(len(lengths), generator=generator) < 0.2] = 0.0
    return l, q, advantages[:, None].expand(shape), torch.arange(shape[1]) < lengths[:, None]


def theirs(batch: Batch, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Value and gradient (B, T) of TRL's loss over the padded tokens."""
    from trl import GRPOTrainer

    logprobs, q, advantages, mask = batch
    l = logprobs.clone().requires_grad_()  # noqa: E741
    whole = trainer(l, settings)
    mask = mask.double()
    prompt = torch.zeros(len(mask), 0)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": advantages[:, 0],
        "num_items_in_batch": mask.sum(),
    }
    if whole.use_vllm:  # one update for each batch: TRL's own ratio is one, and that to the engine is its weight
        inputs["importance_sampling_ratio"] = (logprobs - q).exp().clamp(max=2.0)
    else:
        inputs["old_per_token_logps"] = q
    value = GRPOTrainer._compute_loss(whole, whole.model, inputs)
    value.backward()
    assert l.grad is not None
    return value.detach(), l.grad


def trainer(logprobs: Tensor, settings: Mapping[str, Any]) -> Any:
    """As much of a GRPOTrainer as its loss reads, with `logprobs` (B, T) for the model's."""
    alone = SimpleNamespace(num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value)
    arguments = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    defaults = {
        "loss_type": "bnpo",  # the mean over the tokens of the batch
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    }
    model = SimpleNamespace(training=True)
    return SimpleNamespace(model=model, args=arguments, accelerator=alone, **{**defaults, **settings})


def compare() -> None:
    """Print the largest differences of every case, as markdown."""
    print("| loss | largest difference of the value | of a token's gradient | largest gradient |")
    print("|---|---:|---:|---:|")
    for name, (settings, loss) in CASES.items():
        generator = torch.Generator().manual_seed(7)
        found = [0.0, 0.0, 0.0]
        for _ in range(BATCHES):
            batch = random_batch(generator)
            (value, gradient), (value_of_trl, gradient_of_trl) = packed_loss(batch, loss), theirs(batch, settings)
            pairs = (value - value_of_trl, gradient - gradient_of_trl, gradient_of_trl)
            found = [max(most, float(each.abs().max())) for most, each in zip(found, pairs, strict=True)]
        print(f"| {name} | {found[0]:.1e} | {found[1]:.1e} | {found[2]:.2g} |")


def main() -> None:
    """Compare in an environment that has TRL."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, help="directory of the environment with TRL, made where it is missing")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.here:
        return compare()
    with tempfile.TemporaryDirectory(prefix="stagecoach-trl-") as directory:
        python = install_trl((chosen.trl or Path(directory, "trl")).resolve())
        subprocess.run([str(python), "-m", "benchmarks.trl_losses", "--here"], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
