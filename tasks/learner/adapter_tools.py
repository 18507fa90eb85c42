"""Merges an adapter into the weights of its base: `python -m tasks.learner.adapter_tools merge BASE ADAPTER TARGET`.

The result is a model like any other, in float32: config and tokenizer of the base, weights W + alpha / rank * B A.
"""

import sys
from pathlib import Path

import torch

from tasks.learner.checkpoint import companions
from tasks.runtime.torchvision_operators import declare_torchvision_operators


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


if __name__ == "__main__":
    merge(*map(Path, sys.argv[2:]))
