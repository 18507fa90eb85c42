"""The engine's core is cheaper than vLLM's own and computes the same."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

PROGRAM = """
import json, torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from tasks.inference.engine.core import patch_core

patch_core()
torch.manual_seed(0)
found = {}
for name, shape, size in (("hidden", (7, 96), 96), ("heads", (7, 3, 32), 32), ("none", (0, 96), 96)):
    with set_current_vllm_config(VllmConfig()):
        norm = RMSNorm(size, eps=1e-5)
    norm.weight.data = torch.randn(size)
    wide = torch.randn(shape[0], 300)  # queries are a part of a wider row, as in a layer
    x = wide[:, 4 : 4 + shape[1] * (shape[2] if len(shape) > 2 else 1)].view(shape)
    residual = torch.randn(shape)
    pairs = [(norm.forward_native(x), norm.forward_cpu(x))]
    pairs += zip(norm.forward_native(x, residual), norm.forward_cpu(x, residual.clone()))
    found[name] = max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs)
    assert all(a.shape == b.shape for a, b in pairs)
half = norm.to(torch.bfloat16)
assert half.forward_cpu(torch.randn(2, 96, dtype=torch.bfloat16)).dtype == torch.bfloat16
print(json.dumps(found))
"""


def test_norms_by_one_kernel_are_those_of_six_operations() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {"hidden", "heads", "none"} and max(found.values()) < 1e-5
