"""Writes a quantised checkpoint again in bfloat16: `python -m tasks.learner.quantised SOURCE TARGET`.

The import of a policy starts it, in a process of its own: the one that calls does not load torch.

- mxfp4 (gpt_oss): 32 values of 4 bits (E2M1) share a scale, a power of two (E8M0), by the OCP Microscaling Formats (MX)
  Specification 1.0. A product is exact in bfloat16.
- fp8 in blocks (Qwen3-FP8, DeepSeek): a block of a matrix of 8 bits (E4M3) shares a scale in float32
  (arXiv 2412.19437, 3.3). A product is rounded to bfloat16.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.learner.checkpoint import companions
from tasks.learner.digest import INDEX_FILE, weight_paths
from tasks.runtime.torchvision_operators import declare_torchvision_operators

BLOCKS, SCALES, FP8_SCALES = "_blocks", "_scales", "_scale_inv"


def dequantise(source: Path, target: Path) -> None:
    """Write the model in `source` to `target`, file by file, under the names of one that was never quantised."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    target.mkdir(parents=True, exist_ok=True)
    files = companions(source, "bfloat16")
    config = json.loads(files["config.json"])
    block = config.pop("quantization_config").get("weight_block_size")
    # A scale may be in another file than its values.
    where = {name: path for path in weight_paths(source) for name in safe_open(path, "pt").keys()}  # noqa: SIM118

    def read(name: str) -> Tensor:
        with safe_open(where[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def plain(name: str) -> tuple[str, Tensor]:
        scales, stem = name + FP8_SCALES, name.removesuffix(BLOCKS)
        if stem != name and stem + SCALES in where:
            return stem, from_mxfp4(read(name), read(stem + SCALES))
        return name, from_fp8(read(name), read(scales), block) if scales in where else read(name)

    layout = dict[str, str]()
    for path in weight_paths(source):
        names = [name for name, file in where.items() if file == path and not name.endswith((SCALES, FP8_SCALES))]
        content = dict(map(plain, names))
        save_file(content, target / path.name, {"format": "pt"})
        layout |= dict.fromkeys(content, path.name)
    if (source / INDEX_FILE).is_file():
        files[INDEX_FILE] = json.dumps({"metadata": {}, "weight_map": layout}).encode()
    for name, data in (files | {"config.json": json.dumps(config, indent=2, sort_keys=True).encode()}).items():
        (target / name).write_bytes(data)


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return experts (E, inputs, outputs) in bfloat16 of blocks (E, outputs, inputs / 32, 16), scales without the 16.

    Both are bytes: of two values in one the lower half comes first; a scale is 2 to the power of its byte less 127.
    """
    declare_torchvision_operators()
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found: Any = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    return found.contiguous()  # type: ignore[no-any-return]


def from_fp8(matrix: Tensor, scales: Tensor, block: list[int]) -> Tensor:
    """Return a matrix (rows, columns) in bfloat16: each value times the scale of its block; the last may be smaller."""
    rows, columns = matrix.shape
    whole = scales.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (matrix.float() * whole).bfloat16()


if __name__ == "__main__":
    dequantise(*map(Path, sys.argv[1:]))
