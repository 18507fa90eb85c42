"""Log-probs and entropies at the output head, in chunks: the logits of a whole row never exist at once."""

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
"""Most bytes that a chunk of logits takes on a device, where the vocabulary leaves that choice. For each chunk the
gradient of the head's weight is read and written, which on CUDA takes as long as the products of a small chunk."""


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies in nats, both (N,), differentiable in `hidden` and `weight`.

    `hidden` (N, D) are the states that predict `targets` (N,), `weight` (V, D) is the output head, `temperatures` (N,)
    divide the logits. At most `chunk` rows of logits exist at a time, in float32 (float64 for float64 input).
    """
    logprobs, entropies = _TokenLogprobs.apply(hidden, weight, targets, temperatures, chunk)
    return logprobs, entropies


class _TokenLogprobs(torch.autograd.Function):
    """The function that `token_logprobs` is, with its gradient; see `_values` and `_gradients`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = _values(hidden, weight, targets, temperatures, chunk)
        ctx.save_for_backward(hidden, weight, targets, temperatures, entropies)
        ctx.chunk = chunk
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies = gradients
        of_hidden, of_weight = _gradients(*ctx.saved_tensors, grad_logprobs, grad_entropies, ctx.chunk)
        return of_hidden, of_weight, None, None, None


def _values(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (N,); with z = h W^T / T, p = softmax(z) and y the token:

        log-prob  l = log p_y
        entropy   H = -sum_j p_j log p_j

    H is not taken as logsumexp(z) - sum_j p_j z_j, which is the same and cancels: of large logits float32 then leaves
    entropies below zero, where here no term of the sum is.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logprobs = torch.empty(len(hidden), dtype=wide, device=hidden.device)
    entropies = torch.empty_like(logprobs)
    for part in _chunks(len(hidden), chunk):
        logp = _log_softmax(_logits(hidden[part], weight, temperatures[part]))
        logprobs[part] = logp.gather(1, targets[part, None]).squeeze(1)
        entropies[part] = -logp.exp().mul_(logp).sum(-1)
    return logprobs, entropies


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients in `hidden` and `weight`, from those in log-probs and entropies.

        dl/dz_j = [j = y] - p_j
        dH/dz_j = -p_j (log p_j + H)

    The logits of each chunk are computed again: a fourth matrix product for a fraction of the memory.
    """
    grad_hidden = torch.empty_like(hidden)
    # Summed in float32 also for half-precision heads: adding many chunks in bfloat16 loses half the digits.
    grad_weight = torch.zeros_like(weight, dtype=entropies.dtype)
    for part in _chunks(len(hidden), chunk):
        logp = _log_softmax(_logits(hidden[part], weight, temperatures[part]))
        p = logp.exp()
        grad = logp.add_(entropies[part, None]).mul_(-grad_entropies[part, None]).sub_(grad_logprobs[part, None])
        grad.mul_(p)
        # Each row has one target: a plain write, which is deterministic on CUDA as a scattered sum is not.
        grad[torch.arange(len(grad), device=grad.device), targets[part]] += grad_logprobs[part]
        grad.div_(temperatures[part, None])
        grad_hidden[part] = _product(grad.to(weight.dtype), weight).to(hidden.dtype)
        _accumulate(grad_weight, grad.T, hidden[part])
    return grad_hidden, grad_weight.to(weight.dtype)


def _chunks(size: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, size)) for start in range(0, size, chunk)]


def _logits(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    return _product(hidden, weight.T).div_(temperatures[:, None])


def _log_softmax(logits: Tensor) -> Tensor:
    """Return log p of logits (N, V) in their place, so that no more than one other tensor of that size exists."""
    # The largest logit first: less a normaliser of 133, the log-prob of a near-certain token would be rounding.
    logits.sub_(logits.amax(-1, keepdim=True))
    return logits.sub_(logits.exp().sum(-1, keepdim=True).log_())


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product of half-precision operands without rounding the result to half precision."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.device.type in ("cuda", "meta"):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total += _product(left.to(right.dtype), right)


def default_chunk(vocab_size: int, device: torch.device) -> int:
    """Return how many tokens' logits exist at the same time on a device beside a vocabulary of this size.

    Two or three tensors of that many logits in float32 are what the head needs beyond its weight and gradient.
    """
    fits = CHUNK_BYTES[device.type] // (4 * vocab_size)
    # Below 64 the products are too thin to be fast; above 1024 there is nothing left to gain.
    return max(64, min(1024, 1 << fits.bit_length() >> 1))
