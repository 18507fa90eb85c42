"""Compiles FlashAttention 4, as torch calls it, for tensors without values: no GPU of the architecture is needed.

`python -m tests.cuda_wheels.compile_attention` prints the shapes of what torch unpacks, for a deterministic backward
pass and another. FLASH_ATTENTION_ARCH and CUTE_DSL_ARCH name the architecture, once for a process.
"""

import json

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import _fa4, activate_flash_attention_impl

import tasks.learner.attention  # noqa: F401  # registers the version that is activated

TOKENS, HEADS, KV_HEADS, WIDTH = 500, 16, 8, 128
CAUSAL = (None, False, None, 0)
"""Scale, whether causal, and the window, of which the product gives (-1, 0)."""


def shapes(deterministic):
    """Return the shapes of output, log-sum-exp and gradients."""
    new = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.empty(TOKENS, heads, WIDTH, **new) for heads in (HEADS, KV_HEADS, KV_HEADS))
    borders = torch.empty(5, dtype=torch.int32, device="cuda")
    out, lse = _fa4._fa4_run_forward(q, k, v, borders, borders, 235, 235, *CAUSAL, None)
    states = (torch.empty_like(out), q, k, v, out, lse, borders, borders)
    return [list(each.shape) for each in (out, lse, *_fa4._fa4_run_backward(*states, *CAUSAL, deterministic))]


if __name__ == "__main__":
    torch.cuda.current_device = lambda: 0
    activate_flash_attention_impl("FA4")
    with FakeTensorMode():
        print(json.dumps([shapes(deterministic) for deterministic in (True, False)]))
