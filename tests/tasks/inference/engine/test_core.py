"""The engine's core is cheaper than vLLM's own and computes the same."""

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.engine


def last_line_of(program: str) -> Any:
    """Run a program in a process of its own, which it patches, and return what its last line says as JSON."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


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
    found = last_line_of(PROGRAM)
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
    found = last_line_of(DRAWS)
    # Six standard deviations of a share of 20,000 draws are at most 0.021.
    assert found["shares"] == pytest.approx([0.0, 0.4, 0.0, 0.05, 0.25, 0.3, 0.0], abs=0.021)
    assert [found["shares"][token] for token in (0, 2, 6)] == [0.0, 0.0, 0.0], "a token that cannot be"
    assert found["alone"] == found["among"] == found["first"] == found["unscaled"]
    assert found["last"] == [1] * 4
    assert set(found["not numbers"]) <= set(range(7)), "a token that the vocabulary has not"
    assert set(found["without"]) <= {1, 3, 4, 5}


BLOCKS = """
import json, random, torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request
from tasks.inference.engine.core import patch_core

SIZE, BLOCKS, own, asked = 4, 60, KVCacheManager.allocate_slots, []
DECODES = {"num_lookahead_tokens": 0}


def counting(self, request, num_new_tokens, *rest, **named):
    asked.append(named)
    return own(self, request, num_new_tokens, *rest, **named)


KVCacheManager.allocate_slots = counting
patch_core()
init_none_hash(sha256)
hasher = get_request_block_hasher(SIZE, sha256)
chance = random.Random(0)


def manager(kind, **window):
    spec = kind(block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32, **window)
    config = KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, max_model_len=200, scheduler_block_size=SIZE, hash_block_size=SIZE)


def blocks(manager, request):
    return manager.get_block_ids(request.request_id)


def schedule(kind, **window):
    \"\"\"Let two managers serve the same requests, one by vLLM's own way; return what they came to.\"\"\"
    plain, ours = manager(kind, **window), manager(kind, **window)
    running, number, refused, decoded = [], 0, 0, 0
    del asked[:]
    for _ in range(600):
        if len(running) < 6:
            number += 1
            prompt = [chance.randrange(2) for _ in range(chance.randint(1, 11))]
            request = Request(str(number), prompt, SamplingParams(max_tokens=90), None, block_hasher=hasher)
            found = []
            for each, way in ((plain, own), (ours, KVCacheManager.allocate_slots)):
                shared, count, *_ = each.get_computed_blocks(request)
                new = way(each, request, len(prompt) - count, count, shared)
                found.append((count, new is None, blocks(each, request)))
            assert found[0] == found[1], found
            if not found[0][1]:
                request.num_computed_tokens = len(prompt)
                running.append(request)
        for request in list(running):
            request.append_output_token_ids(chance.randrange(2))
            ends = own(plain, request, 1, **DECODES), ours.allocate_slots(request, 1, **DECODES)
            decoded += 1
            assert (ends[0] is None) == (ends[1] is None)
            assert blocks(plain, request) == blocks(ours, request)
            if ends[0] is None or chance.random() < 0.03:
                refused += ends[0] is None
                running.remove(request)
                plain.free(request), ours.free(request)
            else:
                assert ends[0].get_block_ids() == ends[1].get_block_ids()
                request.num_computed_tokens += 1
        assert plain.block_pool.get_num_free_blocks() == ours.block_pool.get_num_free_blocks()
        cached = [set(each.block_pool.cached_block_hash_to_block._cache) for each in (plain, ours)]
        assert cached[0] == cached[1]
    return {"decoded": decoded, "asked": asked.count(DECODES), "refused": refused, "cached": len(cached[0])}


full, window = schedule(FullAttentionSpec), schedule(SlidingWindowSpec, sliding_window=6)
print(json.dumps({"full": full, "window": window}))
"""


def test_blocks_are_allocated_and_cached_as_by_vllm_itself() -> None:
    found = last_line_of(BLOCKS)
    full, window = found["full"], found["window"]
    # Blocks have four tokens: vLLM is asked for the first and the last of each, and for all where a window moves on.
    assert 0.4 < full["asked"] / full["decoded"] < 0.6 and window["asked"] == window["decoded"] > 0
    assert full["refused"] > 10 and full["cached"] > 10
