"""Context parallelism: ranks share a packed row, each with a part of its tokens, in attention with a part of the heads.

Everything but attention looks at one token at a time. Around attention the ranks exchange what they have: tokens of all
heads for all tokens of some heads, and back (DeepSpeed-Ulysses, arXiv 2309.14509). So attention is computed by the same
code as on one rank, and its borders between segments hold.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from tasks.learner.protocol import LearnerError


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share a row, seen from one of them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def complete(self, values: Tensor, own: slice, total: int) -> Tensor:
        """Return values (total,) of all weighted tokens of a row, on every rank; `values` (n,) are this rank's.

        Gradients go to this rank's values alone: every rank computes the same loss of all values, and the gradients of
        all ranks are added up.
        """
        before, after = values.new_zeros(own.start), values.new_zeros(total - own.stop)
        mine = torch.cat([before, values, after])
        everybody = mine.detach().clone()
        dist.all_reduce(everybody, group=self.group)
        # Exact: of two addends one is always zero.
        return mine + (everybody - mine.detach())

    def exchange_tokens(self, states: Tensor) -> Tensor:
        """Return some heads of all tokens, (1, heads / size, T, D), of all heads of some tokens, (1, heads, t, D)."""
        heads = states[0].unflatten(0, (self.size, -1)).contiguous()
        return self._exchange(heads).transpose(0, 1).flatten(1, 2)[None]

    def exchange_heads(self, attended: Tensor) -> Tensor:
        """Return all heads of some tokens, (1, t, heads, D), of some heads of all tokens, (1, T, heads / size, D)."""
        tokens = attended[0].unflatten(0, (self.size, -1)).contiguous()
        return self._exchange(tokens).transpose(0, 1).flatten(1, 2)[None]

    def repeat_keys(self, states: Tensor) -> Tensor:
        """Return keys or values (1, heads, t, D) with as many heads as there are ranks, where these are more."""
        heads = states.shape[1]
        return states.repeat_interleave(self.size // heads, dim=1) if heads < self.size else states

    def own_heads(self, of_heads: Tensor) -> Tensor:
        """Return the part (heads / size, ...) of a tensor (heads, ...) that belongs to this rank's heads."""
        return of_heads.chunk(self.size)[self.rank]

    def require_heads(self, config: Any) -> None:
        """Raise LearnerError unless the heads of a model can be dealt to the ranks."""
        heads = config.num_attention_heads
        keys = getattr(config, "num_key_value_heads", None) or heads
        if heads % self.size or (keys % self.size and self.size % keys):
            raise LearnerError(
                f"learner.context_parallel is {self.size}, but the model has {heads} attention heads and {keys} of "
                "keys and values, which cannot be dealt evenly; nothing was loaded. Choose a divisor of both"
            )

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send part i (of the first axis) to rank i; return what every rank sent to this one, in their order."""
        received: Tensor = all_to_all_single_autograd(parts, None, None, self.group)
        return received
