"""Merge an adapter into the weights that it is laid over: `python -m tasks.learner.merging BASE ADAPTER TARGET`.

What comes out is a model like any other, in float32: config and tokenizer of the base, weights W + alpha / rank * B A.
"""

import argparse
from pathlib import Path

import torch

from tasks.learner.checkpoint import companions


def merge(base: Path, adapter: Path, target: Path) -> None:
    """Write the policy that the adapter makes of its base to `target`, a directory that is not there yet."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    PeftModel.from_pretrained(whole, str(adapter)).merge_and_unload().save_pretrained(target)
    for name, content in companions(base).items():
        (target / name).write_bytes(content)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Merge an adapter into the weights that it is laid over.")
    for name in ("base", "adapter", "target"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    merge(given.base, given.adapter, given.target)


if __name__ == "__main__":
    main()
