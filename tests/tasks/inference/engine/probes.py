"""The probe of a policy as transformers, and peft, compute it; weights with flipped bits."""

import struct

import numpy as np

from tasks.inference.engine.command import CPU_BLOCK_TOKENS
from tasks.runtime.torchvision_operators import declare_torchvision_operators

PROBE = [(7 * index + 3) % 256 for index in range(3 * CPU_BLOCK_TOKENS)]


def reference_logprobs(directory, tokens, adapter=None):
    """The log-prob of each token after those before it as transformers, and peft, compute it; 0 of the first."""
    declare_torchvision_operators()
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model = PeftModel.from_pretrained(model, adapter).eval() if adapter else model
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].double(), -1)
    return [0.0, *logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()]


def policy_row(key, directory, adapter=None):
    """A policies row with the probe as transformers, and peft, compute it."""
    logprobs = reference_logprobs(directory, PROBE, adapter)
    return {"policy_key": key, "version": 0, "probe_token_ids": PROBE, "probe_logprobs": logprobs}


def flip(source, target, share, weights="model.safetensors"):
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
