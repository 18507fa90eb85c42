"""Auxiliary losses of routers, where `training.router_aux_loss_coef` or `training.router_z_loss_coef` is above 0.

Of a layer with E experts and router logits x, over the n tokens of a packed row that predict a token with weight:

    load   E * sum over experts of f P     f: how often a token chooses the expert, P: mean of softmax(x)
           (Switch Transformer, arXiv 2101.03961, equation 4; k choices count each, as in transformers: never below k)
    z      mean of (log sum exp x)^2       (ST-MoE, arXiv 2202.08906, equation 5)

Each is the mean over layers with experts, and over the rows of the update by their n. So z does not depend on how
samples share rows, and neither on how many ranks there are; load does on the first: experts are balanced in each row.
f, which has no gradient, counts what the router was made to choose (`RouterReplay`), and of a row that ranks share the
tokens of all of them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.training import TrainingConfig
from tasks.learner.context_parallel import ContextGroup
from tasks.learner.protocol import LearnerError

FIGURES = "router_aux_loss", "router_z_loss"


class RouterLosses:
    """What the routers of a model said of the row that is computed, and the losses that follow from it."""

    def __init__(self, causal: Any, layers: nn.ModuleList, settings: TrainingConfig) -> None:
        """Listen to the routers. Raises LearnerError where transformers has no loss of them."""
        if not hasattr(causal.config.get_text_config(), "router_aux_loss_coef"):
            raise LearnerError(
                "training.router_aux_loss_coef, training.router_z_loss_coef: transformers has no such loss of "
                f"{type(causal).__name__}; nothing was loaded. Leave both 0"
            )
        self._coefs = settings.router_aux_loss_coef, settings.router_z_loss_coef
        self._predictors: Tensor | None = None
        self._said: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.total = 1
        """Weighted tokens of the update, of all rows and ranks."""
        for block in layers.modules():
            router = getattr(block, "gate", None) or getattr(block, "router", None)
            if hasattr(block, "experts") and isinstance(router, nn.Module):
                router.register_forward_hook(torch.compiler.disable(self._listen))

    def begin(self, predictors: Tensor) -> None:
        """Listen to what is said of these places (n,) among the tokens that are computed, until the next call."""
        self._predictors = predictors
        self._said.clear()

    def share(self, num_weighted: int, context: ContextGroup | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what a row with so many weighted tokens adds to the update's loss, and to both losses, by name.

        Where ranks share the row the first is of this rank's tokens, and has a gradient; the others are of all.
        """
        layers = [self._of_layer(*said, max(num_weighted, 1), context) for said in self._said.values()]
        losses = torch.stack(layers).mean(0) / self.total
        measured = losses.detach().double()
        if context:
            dist.all_reduce(measured, group=context.group)
        return losses @ losses.new_tensor(self._coefs), dict(zip(FIGURES, measured, strict=True))

    def _of_layer(self, logits: Tensor, chosen: Tensor, num_weighted: int, context: ContextGroup | None) -> Tensor:
        """Return `num_weighted` times both losses, (2,)."""
        logits, chosen = logits[self._predictors].float(), chosen[self._predictors].flatten()
        counts = logits.new_zeros(logits.shape[1]).index_add(0, chosen, logits.new_ones(len(chosen)))
        if context:
            dist.all_reduce(counts, group=context.group)
        load = logits.shape[1] / num_weighted * counts @ logits.softmax(-1).sum(0)
        return torch.stack([load, logits.logsumexp(-1).square().sum()])

    def _listen(self, router: nn.Module, _: Any, output: Any) -> None:
        # Granite's say the same in another order, Jamba's no choice.
        if not isinstance(output, tuple) or len(output) != 3 or output[2].is_floating_point():
            raise LearnerError(
                "training.router_aux_loss_coef, training.router_z_loss_coef: what is chosen by routers of the kind "
                f"{type(router).__name__} cannot be seen; nothing was trained. Leave both 0"
            )
        logits, _, chosen = output
        # Recomputed layers say it once more.
        self._said.setdefault(router, (logits, chosen))
