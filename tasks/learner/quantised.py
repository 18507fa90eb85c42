"""Writes a quantised checkpoint again in bfloat16: `python -m tasks.learner.quantised SOURCE TARGET`.

The import of a policy starts it, in a process of its own: the one that calls does not load torch. transformers has the
arithmetic of both formats: mxfp4 (OCP Microscaling Formats 1.0) of gpt_oss, and fp8 by blocks (arXiv 2412.19437, 3.3).
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tasks.learner.checkpoint import companions
from tasks.runtime.torchvision_operators import declare_torchvision_operators


def dequantise(source: Path, target: Path) -> None:
    """Write the model in `source` to `target`, under the names of one that was never quantised."""
    declare_torchvision_operators()
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

    files = companions(source, "bfloat16")
    config = json.loads(files["config.json"])
    kind = Mxfp4Config if config.pop("quantization_config")["quant_method"] == "mxfp4" else FineGrainedFP8Config
    settings: dict[str, Any] = {
        "quantization_config": kind(dequantize=True),
        "dtype": torch.bfloat16,
        "local_files_only": True,
    }
    AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False, **settings).save_pretrained(target)
    for name, content in (files | {"config.json": json.dumps(config, indent=2, sort_keys=True).encode()}).items():
        (target / name).write_bytes(content)


if __name__ == "__main__":
    dequantise(*map(Path, sys.argv[1:]))
