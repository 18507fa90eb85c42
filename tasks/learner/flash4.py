"""The kernels of FlashAttention 4 as torch calls them: the module that `register_flash_attention_fa4` is given.

torch 2.13 looks for these two names in a module and unpacks two values of the first; the package returns more since
4.0.0b20. In the backward pass torch does not name the longest segment, and the package takes the length of the row:
semaphores of a deterministic pass are larger, results the same. To be removed when torch takes what the package of the
GPU lock returns (tests/cuda_wheels).
"""

from typing import Any

from flash_attn.cute import interface
from flash_attn.cute.interface import _flash_attn_bwd as _flash_attn_bwd


def _flash_attn_fwd(*arguments: Any, **options: Any) -> Any:
    return interface._flash_attn_fwd(*arguments, **options)[:2]  # output and log-sum-exp
