"""The probe of a policy as transformers, and peft, compute it."""

from pathlib import Path
from typing import Any

from tasks.inference.engine.command import CPU_BLOCK_TOKENS

PROBE = [(7 * index + 3) % 256 for index in range(3 * CPU_BLOCK_TOKENS)]


def policy_row(key: str, directory: Path, adapter: Path | None = None) -> dict[str, Any]:
    """A policies row with the probe as transformers, and peft, compute it."""
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
