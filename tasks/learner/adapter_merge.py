"""Merges an adapter into the weights of its base: `python -m tasks.learner.adapter_merge BASE ADAPTER TARGET`.

The result is a model like any other, in float32: config and tokenizer of the base, weights W + alpha / rank * B A.
"""

import argparse
from pathlib import Path

import torch

from tasks.learner.checkpoint import companions


def merge(base: Path, adapter: Path, target: Path) -> None:
    """Write the merged policy to `target`, a directory that does not exist yet."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(target)
    for name, content in companions(base).items():
        (target / name).write_bytes(content)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Merge an adapter into the weights of its base.")
    for name in ("base", "adapter", "target"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    merge(arguments.base, arguments.adapter, arguments.target)


if __name__ == "__main__":
    main()
