"""Compiled layers compute what layers do that are not, and are compiled once for all rows.

On the CPU by a backend that traces layers and their gradient but fuses nothing, with torch's operation for attention as
on CUDA. Two ranks are in test_ranks.py.
"""

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from configs.training import LoraConfig, TrainingConfig
from tasks.learner import adapters
from tasks.learner.distributed import whole
from tasks.learner.model import load_policy, run_row
from tasks.learner.protocol import LearnerError
from tasks.learner.rows import idle_row
from tasks.learner.tiny import tiny_qwen3
from tasks.learner.tiny_vision import tiny_qwen3_vl
from tests.fixtures.packed import row_of, sample
from tests.fixtures.policies import CPU, policy_of
from tests.fixtures.seen_rows import packed_row, shown
from tests.fixtures.varlen import varlen_on_cpu

pytestmark = pytest.mark.engine

GRAPHS = 4
"""One for all layers, one for the last norm, and two for the output head: of log-probs, and of the gradient in its
logits."""
FIRST = idle_row()
"""As many borders as tokens, which are not to be taken for one number."""


def rows(count, seed=0, same=False):
    """Return rows of one to six segments of two to ninety tokens; with `same` each has its longest segment twice."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        lengths = rng.integers(2, 90, rng.integers(1, 7))
        samples = [sample(str(index), int(length), 9 * number + index) for index, length in enumerate(lengths)]
        found.append(row_of(samples + [max(samples, key=lambda each: len(each.token_ids))] * same))
    assert {row.shared is not None for row in found} == {same}
    return found


def gradient(policy, row):
    policy.zero_grad()
    logprobs, entropies = run_row(policy, row, CPU)
    (logprobs.sum() + 0.3 * entropies.sum()).backward()
    gradients = [whole(p.grad).flatten() for p in policy.parameters() if p.grad is not None]
    return torch.cat([logprobs.detach(), *gradients])


def compared(directory, settings, row_list, tolerance):
    """Compare compiled with plain layers on some rows; return how many graphs were made."""
    with varlen_on_cpu() as calls:
        plain, compiled = policy_of(directory, **settings), policy_of(directory, compile=True, **settings)
        torch._dynamo.reset()
        counters.clear()
        for row in [FIRST, *row_list]:
            expected, found = gradient(plain, row), gradient(compiled, row)
            scale = float(expected.abs().max())
            assert row is FIRST or scale > 0
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale)
    assert len(set(calls)) >= min(len(row_list), 16), "rows of different longest segments"
    return counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("deep") / "policy", hidden=32, layers=3, intermediate=64, seed=3)


def test_twenty_rows_of_all_lengths_and_all_layers_are_one_graph(world, deep):
    assert compared(deep, {"dtype": "float32"}, rows(20), 1e-5) == GRAPHS


def test_rows_with_shared_prefixes_are_one_graph_of_layers_more(world, deep):
    assert compared(deep, {"dtype": "float32"}, [*rows(12), *rows(12, seed=1, same=True)], 1e-5) == GRAPHS + 1


@pytest.mark.parametrize("kind", [False, pytest.param("selective", marks=pytest.mark.nightly)])
def test_layers_with_products_in_8_bits_are_one_graph(world, deep, kind):
    settings = {"dtype": "bfloat16", "fp8": True, "gradient_checkpointing": kind}
    assert compared(deep, settings, rows(2), 2e-2) <= GRAPHS + 1


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [True, "selective"])
def test_recomputed_and_sharded_layers_are_compiled_too(world, deep, kind):
    """In bfloat16 one rank is sharded; the graph of a layer that keeps its activations is another one."""
    settings = {"dtype": "bfloat16", "gradient_checkpointing": kind, "checkpoint_every": 2}
    assert compared(deep, settings, rows(4), 2e-2) <= GRAPHS + 1


@pytest.mark.nightly
def test_rows_with_pictures_and_without_are_one_graph(world, tmp_path):
    """The tower, which is trained here, is not compiled: its attention has a loop over pictures."""
    small = tiny_qwen3_vl(tmp_path / "policy", hidden=64, heads=2, seed=3)
    random = np.random.default_rng(0)

    def seen(number):
        counts = random.integers(0, 3, random.integers(1, 4))
        sizes = [[tuple(map(int, random.integers(1, 4, 2))) for _ in range(count)] for count in counts]
        return packed_row(
            [shown(each, 9 * number + index, int(random.integers(2, 90))) for index, each in enumerate(sizes)]
        )

    made = [seen(number) for number in range(8)]
    assert {row.images is None for row in made} == {True, False}
    assert compared(small, {"dtype": "float32", "vision": "trained"}, made, 1e-5) == GRAPHS


@pytest.mark.nightly
def test_layers_with_adapters_are_compiled_too(world, deep):
    with varlen_on_cpu():
        found = []
        for chosen in (False, True):
            settings = TrainingConfig(lora=LoraConfig(rank=4), compile=chosen, dtype="float32")
            adapter = adapters.open_adapter("p0", deep, None, settings.lora)
            policy = load_policy(deep, settings, CPU, adapter)
            found.append(torch.cat([gradient(policy, row) for row in rows(3)]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-4)


def test_what_is_not_asked_for_is_not_compiled(world, deep):
    for compile in ("auto", False):
        policy = policy_of(deep, compile=compile)
        assert all(layer._compiled_call_impl is None for layer in policy.causal.model.layers)


def test_without_the_kernel_nothing_is_compiled(world, deep):
    with pytest.raises(LearnerError, match="cannot be compiled once for all rows"):
        policy_of(deep, compile=True)
