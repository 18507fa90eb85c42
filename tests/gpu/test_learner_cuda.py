"""The learner on CUDA: flash kernels against the segment path, no leakage, the same weights twice."""

import pytest
import torch

from configs.training import TrainingConfig
from tasks.learner.attention import Segments, packed_attention
from tasks.learner.model import load_policy, run_row
from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.learner_steps import new_trainer, train_step
from tests.fixtures.packed import all_rows, batches, batches_from_table, sample

pytestmark = [
    pytest.mark.engine,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BORDERS = (0, 65, 66, 300)
SAMPLES = [sample("a", 70, 1), sample("b", 33, 2, temperature=0.7), sample("c", 140, 3)]


@pytest.fixture(scope="module")
def world():
    import torch.distributed as dist

    from tasks.learner.distributed import World, start_world

    if dist.is_initialized():
        # Tests that ran before in this process own the group.
        yield World(rank=0, size=1, local_rank=0)
        return
    yield start_world()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("model") / "policy", hidden=256, heads=4, layers=2, seed=3)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_flash_equals_segments_forward_and_backward(kv_heads):
    segments = Segments(BORDERS, torch.device("cuda"))
    states = [torch.randn(1, heads, BORDERS[-1], 64, device="cuda") for heads in (4, kv_heads, kv_heads)]
    weights = torch.randn(1, BORDERS[-1], 4, 64, device="cuda")
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [state.to(dtype).requires_grad_() for state in states]
        output, _ = packed_attention(torch.nn.Identity(), *leaves, None, scaling=0.125, segments=segments)
        gradients = torch.autograd.grad((output * weights.to(dtype)).sum(), leaves)
        results.append([tensor.float() for tensor in (output, *gradients)])
    for exact, half in zip(*results, strict=True):
        torch.testing.assert_close(half, exact, rtol=3e-2, atol=3e-2)


def logprobs(policy, samples):
    (batch,) = batches_from_table(batches([samples]))
    with torch.no_grad():
        return run_row(policy, all_rows(batch)[0], torch.device("cuda"))[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 1e-2)])
def test_packed_equals_alone(world, model_directory, dtype, tolerance):
    policy = load_policy(model_directory, TrainingConfig(dtype=dtype), torch.device("cuda"))
    alone = torch.cat([logprobs(policy, [each]) for each in SAMPLES])
    torch.testing.assert_close(logprobs(policy, SAMPLES), alone, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_batches_give_the_same_weights(world, model_directory, tmp_path, dtype):
    trainer = new_trainer(world, learning_rate=1e-3, dtype=dtype)
    runs = []
    for name in ("one", "two"):
        trainer.load("p0", str(model_directory), fresh_optimizer=True)
        steps = [train_step(trainer, step, tmp_path / name, batches([SAMPLES, SAMPLES[:1]]), True) for step in range(3)]
        runs.append([update["weights_sha256"] for (update,), _ in steps])
    assert trainer.state()["device"] == "cuda"
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3
