"""Log-probs and entropies of selected tokens, computed in chunks: the logits of a whole row never exist at once.

With z = h W^T / T (T the token's temperature), p = softmax(z) and y the sampled token:
    log-prob  l = z_y - logsumexp(z)             dl/dz_j = [j = y] - p_j
    entropy   H = logsumexp(z) - sum_j p_j z_j   dH/dz_j = -p_j (log p_j + H)
The backward pass recomputes the logits of each chunk: a fourth matrix product for a fraction of the memory.
"""

from typing import Any

import torch
from torch import Tensor


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
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        for part in _chunks(len(hidden), chunk):
            logits = _logits(hidden[part], weight, temperatures[part])
            normaliser = logits.logsumexp(-1)
            logprobs[part] = logits.gather(1, targets[part, None]).squeeze(1) - normaliser
            probabilities = (logits - normaliser[:, None]).exp_()
            entropies[part] = normaliser - probabilities.mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, temperatures, entropies)
        ctx.chunk = chunk
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies = gradients
        hidden, weight, targets, temperatures, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Summed in float32 also for half-precision heads: adding many chunks in bfloat16 loses half the digits.
        grad_weight = torch.zeros_like(weight, dtype=entropies.dtype)
        for part in _chunks(len(hidden), ctx.chunk):
            logits = _logits(hidden[part], weight, temperatures[part])
            logp = logits.sub_(logits.logsumexp(-1, keepdim=True))
            p = logp.exp()
            grad = logp.add_(entropies[part, None]).mul_(-grad_entropies[part, None]).sub_(grad_logprobs[part, None])
            grad.mul_(p)
            # Each row has one target: a plain write, which is deterministic on CUDA as a scattered sum is not.
            grad[torch.arange(len(grad), device=grad.device), targets[part]] += grad_logprobs[part]
            grad.div_(temperatures[part, None])
            grad_hidden[part] = _product(grad.to(weight.dtype), weight).to(hidden.dtype)
            _accumulate(grad_weight, grad.T, hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _chunks(size: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, size)) for start in range(0, size, chunk)]


def _logits(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    return _product(hidden, weight.T).div_(temperatures[:, None])


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product of half-precision operands without rounding the result to half precision."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total += _product(left.to(right.dtype), right)
