"""The probe of a policy as transformers, and peft, compute it; weights with flipped bits."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from tasks.inference.engine.command import CPU_BLOCK_TOKENS
from tasks.runtime.torchvision_operators import declare_torchvision_operators

PROBE = [(7 * index + 3) % 256 for index in range(3 * CPU_BLOCK_TOKENS)]


def policy_row(key: str, directory: Path, adapter: Path | None = None) -> dict[str, Any]:
    """A policies row with the probe as transformers, and peft, compute it."""
    declare_torchvision_operators()
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model = PeftModel.from_pretrained(model, adapter).eval() if adapter else model
    tokens = torch.tensor([PROBE])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits[0, :-1].double(), -1)
    scored = logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()
    return {"policy_key": key, "version": 0, "probe_token_ids": PROBE, "probe_logprobs": [0.0, *scored]}


def flip(source: Path, target: Path, share: float, weights: str = "model.safetensors") -> Path:
    """Copy a policy with one bit flipped in a share of its weights: the lowest, which no probe would notice."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    content = bytearray((target / weights).read_bytes())
    start = 8 + struct.unpack("<Q", content[:8])[0]
    values = np.frombuffer(content, np.uint32, offset=start)
    chosen = np.random.default_rng(5).choice(len(values), max(1, int(share * len(values))), replace=False)
    values[chosen] ^= 1
    (target / weights).write_bytes(content)
    return target
