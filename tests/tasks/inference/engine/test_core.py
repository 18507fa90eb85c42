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


DRAWS = """
import json, torch
from vllm.v1.sample.ops import topk_topp_sampler
from tasks.inference.engine.core import patch_core

patch_core()
torch.manual_seed(0)
weights = torch.tensor([0.0, 0.4, 0.0, 0.05, 0.25, 0.3, 0.0])


def draw(probs, seeds):
    generators = {row: torch.Generator().manual_seed(seed) for row, seed in seeds.items()}
    return topk_topp_sampler.random_sample(probs, generators, False).tolist()


many = draw(weights.repeat(20000, 1), {row: row for row in range(20000)})
others = torch.softmax(torch.randn(5, 7), -1)
mixed = torch.cat([others, weights[None], others])
not_numbers = torch.full((2, 7), float("nan"))
print(json.dumps({
    "shares": (torch.bincount(torch.tensor(many), minlength=7) / 20000).tolist(),
    "alone": [draw(weights[None], {0: seed})[0] for seed in range(50)],
    "among": [draw(mixed, {5: seed, 1: 3})[5] for seed in range(50)],
    "first": many[:50],
    "unscaled": draw(3 * weights.repeat(50, 1), {row: row for row in range(50)}),
    "last": draw(torch.tensor([[0.0, 1e-30, 0.0]] * 4), {row: row for row in range(4)}),
    "not numbers": draw(not_numbers, {0: 1}),
    "without": draw(weights.repeat(4, 1), {}),
}))
"""


def test_a_seeded_token_is_drawn_as_its_probability_says_whoever_else_is_in_the_batch() -> None:
    done = subprocess.run([sys.executable, "-c", DRAWS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # Six standard deviations of a share of 20,000 draws are at most 0.021.
    assert found["shares"] == pytest.approx([0.0, 0.4, 0.0, 0.05, 0.25, 0.3, 0.0], abs=0.021)
    assert [found["shares"][token] for token in (0, 2, 6)] == [0.0, 0.0, 0.0], "a token that cannot be"
    assert found["alone"] == found["among"] == found["first"] == found["unscaled"]
    assert found["last"] == [1] * 4
    assert set(found["not numbers"]) <= set(range(7)), "a token that the vocabulary has not"
    assert set(found["without"]) <= {1, 3, 4, 5}
