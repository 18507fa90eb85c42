"""Chunked log-probs: gradients by finite differences, values against plain logits, size of what exists at once."""

import pytest
import torch

from tasks.learner.head import default_chunk, token_logprobs
from tests.fixtures.output_head import TEMPERATURES, Largest, problem
from tests.fixtures.policies import assert_near

pytestmark = [pytest.mark.engine, pytest.mark.essential]


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_gradients_of_logprob_and_entropy(chunk):
    hidden, weight, targets = problem()
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, targets, TEMPERATURES, chunk), (hidden, weight), atol=1e-8
    )


@pytest.mark.parametrize("chunk", [2, 100])
def test_equals_plain_logits(chunk):
    hidden, weight, targets = problem()
    plain = (hidden @ weight.T / TEMPERATURES[:, None]).log_softmax(-1)
    logprobs, entropies = token_logprobs(hidden, weight, targets, TEMPERATURES, chunk)
    assert_near(logprobs, plain.gather(1, targets[:, None]).squeeze(1), 1e-14)
    assert_near(entropies, -(plain.exp() * plain).sum(-1), 1e-14)


@pytest.mark.parametrize("size", [40.0, 400.0])
def test_no_entropy_is_negative_where_logits_are_large(size):
    """Logits of 40 at temperature 0.3: as a difference of two numbers of 133, an entropy of 1e-6 is rounding."""
    torch.manual_seed(1)
    logits = size * torch.randn(64, 200)
    # A head that is the identity: the states are the logits.
    found = token_logprobs(logits, torch.eye(200), torch.zeros(64, dtype=torch.int64), torch.full((64,), 0.3), 16)[1]
    scaled = logits / 0.3
    exact = scaled.double().log_softmax(-1)
    assert (found >= 0).all()
    torch.testing.assert_close(found.double(), -(exact.exp() * exact).sum(-1), rtol=1e-5, atol=2e-7)
    normaliser = scaled.logsumexp(-1)
    cancelling = normaliser - ((scaled - normaliser[:, None]).exp() * scaled).sum(-1)
    assert (cancelling < 0).any()


def test_the_gradient_of_a_half_precision_head_is_summed_in_single_precision():
    """Of 512 chunks, each adding little to what is there: in bfloat16 most of that would be rounded away."""
    torch.manual_seed(2)
    hidden = torch.rand(512, 8).bfloat16()
    weight = torch.randn(16, 8).bfloat16()
    targets = torch.randint(0, 16, (512,))
    found, exact = (head.clone().requires_grad_() for head in (weight, weight.double()))
    for states, head in ((hidden, found), (hidden.double(), exact)):
        logprobs, entropies = token_logprobs(states, head, targets, torch.ones(512), 1)
        (logprobs.sum() + 0.1 * entropies.sum()).backward()
    assert found.grad.dtype == torch.bfloat16
    # Each entry is rounded to eight bits once, and so are the gradients of logits before the products.
    torch.testing.assert_close(found.grad.double(), exact.grad, rtol=2**-7, atol=0.02)


def test_half_precision_is_rounded_once_not_in_every_product():
    hidden, weight, targets = (tensor.detach() for tensor in problem(64, 32, 50))
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    logprobs, entropies = token_logprobs(hidden, weight, targets, torch.ones(64), 16)
    exact, _ = token_logprobs(hidden.double(), weight.double(), targets, torch.ones(64), 64)
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert_near(logprobs.double(), exact, 1e-4)
    rounded = (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    assert (rounded.double() - exact).abs().max() > 1e-3


def test_full_logits_never_exist():
    size, width, vocabulary, chunk = 64, 4, 300, 8
    hidden, weight, targets = problem(size, width, vocabulary, torch.float32)
    with Largest() as ours:
        logprobs, entropies = token_logprobs(hidden, weight, targets, torch.ones(size), chunk)
        (logprobs.sum() + entropies.sum()).backward()
    with Largest() as plain:
        (hidden @ weight.T).log_softmax(-1)
    assert ours.size == chunk * vocabulary
    assert plain.size == size * vocabulary


def test_no_tokens():
    hidden, weight, targets = problem()
    logprobs, _ = token_logprobs(hidden[:0], weight, targets[:0], TEMPERATURES[:0], 4)
    logprobs.sum().backward()
    assert (logprobs.shape, weight.grad.abs().max().item()) == ((0,), 0.0)


@pytest.mark.parametrize(
    ("vocabulary", "chunk"),
    [
        (1, 1024),
        (512, 1024),
        (32_768, 1024),
        (32_769, 512),
        (128_256, 256),
        (151_936, 128),
        (262_144, 128),
        (10**9, 64),
    ],
)
def test_a_chunk_of_logits_is_as_large_as_the_vocabulary_leaves_room_for(vocabulary, chunk):
    assert default_chunk(vocabulary, torch.device("cpu")) == chunk
    assert chunk * vocabulary * 4 <= 128 * 2**20 or chunk == 64


def test_on_cuda_a_chunk_is_larger():
    assert [default_chunk(vocabulary, torch.device("cuda")) for vocabulary in (512, 151936, 10**6)] == [1024, 1024, 256]
