"""Log-probs, entropies and losses at the output head, in chunks: the logits of a whole row never exist at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
"""Most bytes that a chunk of logits takes on a device, where the vocabulary leaves that choice. For each chunk the
gradient of the head's weight is read and written, which on CUDA takes as long as the products of a small chunk."""

WITH_OUT_DTYPE = ("cuda", "meta")
"""Devices on which torch multiplies half-precision matrices into one in float32."""


@dataclass(frozen=True)
class Kernels:
    """What is computed of a chunk of logits beside the matrix products; see `measure` and `logits_gradient`."""

    measure: Callable[..., tuple[Tensor, ...]]
    gradient: Callable[..., Tensor]


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, chunk: int, kernels: Kernels | None = None
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies in nats, both (N,), differentiable in `hidden` and `weight`.

    `hidden` (N, D) are the states that predict `targets` (N,), `weight` (V, D) is the output head, `temperatures` (N,)
    divide the logits. At most `chunk` rows of logits exist at a time, in float32 (float64 for float64 input). They are
    computed again in the backward pass: four matrix products, or three where `weight` is not trained.
    """
    logprobs, entropies = _TokenLogprobs.apply(hidden, weight, targets, temperatures, chunk, kernels or PLAIN)
    return logprobs, entropies


def fused_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    chunk: int,
    loss: Callable[[Tensor, slice], Tensor],
    kernels: Kernels | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a loss, a scalar that is differentiable in `hidden` and `weight`, and the detached values that
    `token_logprobs` returns.

    `loss` is given log-probs (n,) of the tokens at a slice and returns their share of the loss, a scalar. No share may
    depend on tokens outside the slice. Gradients are formed while a chunk's logits exist: three matrix products instead
    of four, two where `weight` is not trained.
    """
    total, logprobs, entropies = _FusedLoss.apply(hidden, weight, targets, temperatures, chunk, loss, kernels or PLAIN)
    return total, logprobs, entropies


class _TokenLogprobs(torch.autograd.Function):
    """The function that `token_logprobs` is, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, chunk: int, kernels: Kernels
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = (hidden.new_empty(len(hidden), dtype=_wide(hidden)) for _ in range(2))
        for part in _chunks(len(hidden), chunk):
            logits = _product(hidden[part], weight.T)
            logprobs[part], entropies[part] = kernels.measure(logits, targets[part], temperatures[part])[:2]
            del logits
        ctx.save_for_backward(hidden, weight, targets, temperatures, entropies)
        ctx.chunk, ctx.kernels = chunk, kernels
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperatures, entropies = ctx.saved_tensors
        grad_logprobs, grad_entropies = gradients
        found = _Gradients(hidden, weight, ctx.needs_input_grad[1])
        for part in _chunks(len(hidden), ctx.chunk):
            logits = _product(hidden[part], weight.T)
            logp = ctx.kernels.measure(logits, targets[part], temperatures[part])[2:]
            of_entropy = entropies[part], grad_entropies[part]
            of_tokens = targets[part], temperatures[part], weight.dtype, grad_logprobs[part], *of_entropy
            grad = ctx.kernels.gradient(logits, *logp, *of_tokens)
            del logits
            found.add(part, grad)
            del grad
        return *found.both(), None, None, None, None


class _FusedLoss(torch.autograd.Function):
    """The function that `fused_loss` is, with its gradient, which is there when the forward pass is over."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        chunk: int,
        loss: Callable[[Tensor, slice], Tensor],
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor, Tensor]:
        found, measured = _Gradients(hidden, weight, ctx.needs_input_grad[1]), []
        one = hidden.new_ones((), dtype=_wide(hidden))
        for part in _chunks(len(hidden), chunk):
            logits = _product(hidden[part], weight.T)
            logprobs, entropies, *logp = kernels.measure(logits, targets[part], temperatures[part])
            share, grad_logprobs = _derivative(loss, logprobs, part, one)
            grad = kernels.gradient(logits, *logp, targets[part], temperatures[part], weight.dtype, grad_logprobs)
            del logits  # before there are the next
            found.add(part, grad)
            del grad
            measured.append((share[None], logprobs, entropies))
        nothing = hidden.new_zeros(0, dtype=_wide(hidden))
        total, logprobs, entropies = map(torch.cat, zip((nothing,) * 3, *measured, strict=True))
        # Not saved as a graph's tensors are, which may not be changed in place: the backward pass takes them, once.
        ctx.found = found.both()
        ctx.mark_non_differentiable(logprobs, entropies)
        return total.sum(), logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (of_hidden, of_weight), ctx.found = ctx.found, (None, None)
        scaled = [each if each is None else each.mul_(gradients[0]) for each in (of_hidden, of_weight)]
        return *scaled, None, None, None, None, None, None


class _Gradients:
    """The gradients of states and head, to which each chunk adds its own."""

    def __init__(self, hidden: Tensor, weight: Tensor, of_weight: bool) -> None:
        self._hidden, self._weight = hidden, weight
        self._of_hidden = torch.empty_like(hidden)
        # Summed in float32 also for half-precision heads: adding many chunks in bfloat16 loses half the digits.
        self._of_weight = torch.zeros_like(weight, dtype=_wide(weight)) if of_weight else None

    def add(self, part: slice, grad: Tensor) -> None:
        """Add what follows from the gradient of a chunk's logits (n, V)."""
        torch.mm(grad, self._weight, out=self._of_hidden[part])
        if self._of_weight is not None:
            _accumulate(self._of_weight, grad.T, self._hidden[part])

    def both(self) -> tuple[Tensor, Tensor | None]:
        """Return the gradients in states and, where it is asked for, in the head."""
        return self._of_hidden, self._of_weight.to(self._weight.dtype) if self._of_weight is not None else None


def _derivative(
    loss: Callable[[Tensor, slice], Tensor], logprobs: Tensor, part: slice, one: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss of some tokens, detached, and `one` times its derivative by their log-probs."""
    with torch.enable_grad():
        leaves = logprobs.detach().requires_grad_()
        share = loss(leaves, part)
        (grad,) = torch.autograd.grad(share, leaves, one)
    return share.detach(), grad


def measure(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, ...]:
    """Return log-probs and entropies (n,) of logits (n, V), which become log p of all tokens in their place.

    With z the logits over the temperature, p = softmax(z) and y the token:

        log-prob  l = log p_y
        entropy   H = -sum_j p_j log p_j

    H is not taken as logsumexp(z) - sum_j p_j z_j, which is the same and cancels: of large logits float32 then leaves
    entropies below zero, where here no term of the sum is.
    """
    logp = _log_softmax(logits.div_(temperatures[:, None]))
    return logp.gather(1, targets[:, None]).squeeze(1), -logp.exp().mul_(logp).sum(-1)


def logits_gradient(
    logp: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    dtype: torch.dtype,
    grad_logprobs: Tensor,
    entropies: Tensor | None = None,
    grad_entropies: Tensor | None = None,
) -> Tensor:
    """Return the gradient in the logits (n, V), in `dtype`, from those in log-probs and, if given, entropies.

    dl/dz_j = [j = y] - p_j
    dH/dz_j = -p_j (log p_j + H)
    """
    grad = logp.exp()
    if entropies is None or grad_entropies is None:
        grad.mul_(-grad_logprobs[:, None])
    else:
        grad.mul_(logp.add_(entropies[:, None]).mul_(-grad_entropies[:, None]).sub_(grad_logprobs[:, None]))
    # Each row has one target: a plain write, which is deterministic on CUDA as a scattered sum is not.
    grad[torch.arange(len(grad), device=grad.device), targets] += grad_logprobs
    return grad.div_(temperatures[:, None]).to(dtype)


PLAIN = Kernels(measure, logits_gradient)
"""One operation after the other, in place where that saves memory."""


def measure_at_once(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, ...]:
    """Return what `measure` does, and per row what makes logits into log p, both (n, 1): largest, and log of the sum.

    To be compiled. Nothing is written but these, and no single logit is picked, which would be a pass of its own.
    """
    z = logits / temperatures[:, None]
    largest = z.amax(-1, keepdim=True)
    shifted = z - largest
    log_sum = shifted.exp().sum(-1, keepdim=True).log()
    logp = shifted - log_sum
    logprobs = torch.where(_is_target(logits, targets), logp, 0.0).sum(-1)
    return logprobs, -(logp.exp() * logp).sum(-1), largest, log_sum


def logits_gradient_at_once(
    logits: Tensor,
    largest: Tensor,
    log_sum: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    dtype: torch.dtype,
    grad_logprobs: Tensor,
    entropies: Tensor | None = None,
    grad_entropies: Tensor | None = None,
) -> Tensor:
    """Return what `logits_gradient` does, from logits and what `measure_at_once` found; to be compiled."""
    logp = logits / temperatures[:, None] - largest - log_sum
    push = grad_logprobs[:, None]
    grad = torch.where(_is_target(logits, targets), push, 0.0) - push * logp.exp()
    if entropies is not None and grad_entropies is not None:
        grad = grad - grad_entropies[:, None] * logp.exp() * (logp + entropies[:, None])
    return (grad / temperatures[:, None]).to(dtype)


def _is_target(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]


def compiled_kernels(compiled: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Kernels:
    """Return kernels that read the logits of a chunk once each, and write nothing as large but the gradient."""
    return Kernels(compiled(measure_at_once), compiled(logits_gradient_at_once))


def capped_kernels(kernels: Kernels, cap: float) -> Kernels:
    """Return kernels for a model whose logits z become cap * tanh(z / cap) before the temperature divides them."""

    def measure_capped(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, ...]:
        logits.div_(cap).tanh_()
        slope = 1 - logits**2
        logprobs, entropies, *others = kernels.measure(logits.mul_(cap), targets, temperatures)
        return logprobs, entropies, slope, *others

    def gradient_capped(logits: Tensor, slope: Tensor, *others: Any) -> Tensor:
        return kernels.gradient(logits, *others).mul_(slope)

    return Kernels(measure_capped, gradient_capped)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(size: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, size)) for start in range(0, size, chunk)]


def _log_softmax(logits: Tensor) -> Tensor:
    """Return log p of logits (N, V) in their place, so that no more than one other tensor of that size exists."""
    # The largest logit first: less a normaliser of 133, the log-prob of a near-certain token would be rounding.
    logits.sub_(logits.amax(-1, keepdim=True))
    return logits.sub_(logits.exp().sum(-1, keepdim=True).log_())


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product of half-precision operands without rounding the result to half precision."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.device.type in WITH_OUT_DTYPE:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    elif total.device.type in WITH_OUT_DTYPE:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += _product(left, right)


def default_chunk(vocab_size: int, device: torch.device) -> int:
    """Return how many tokens' logits exist at the same time on a device beside a vocabulary of this size.

    Two or three tensors of that many logits in float32 are what the head needs beyond its weight and gradient.
    """
    fits = CHUNK_BYTES[device.type] // (4 * vocab_size)
    # Below 64 the products are too thin to be fast. The memory plan takes more than 1024 where they fit.
    return max(64, min(1024, 1 << fits.bit_length() >> 1))
