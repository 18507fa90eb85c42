"""RouterReplay: has the routers of a policy choose the experts that the engine chose (R3, arXiv 2510.11370).

Made with the policy where `training.router_replay` is rollout; PolicyModel gives it the experts of each row. Only the
choice is recorded: the weights of the chosen experts are the learner's, so that routers keep their gradient.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tasks.learner.protocol import LearnerError


class RouterReplay:
    """The recorded experts of the row that is computed, and how many choices there were."""

    def __init__(self, layers: Iterable[nn.Module], device: torch.device) -> None:
        """Put it into the routers of a model's layers. Raises LearnerError where none has experts."""
        self._experts: Tensor | None = None
        self._recorded: Tensor | None = None
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)
        """Choices of a token in a layer: without a record, recorded, and recorded that are not the learner's own."""
        self._num_routers = 0
        self._counted = set[nn.Module]()
        """Routers whose choices of the row are in `counts`; those of recomputed layers choose once more."""
        route = torch.compiler.disable(self._route)
        for index, layer in enumerate(layers):
            for block in layer.modules():
                router = getattr(block, "gate", None) or getattr(block, "router", None)
                if hasattr(block, "experts") and isinstance(router, nn.Module):
                    router.forward = partial(route, router, index)
                    self._num_routers += 1
        if not self._num_routers:
            raise LearnerError(
                "training.router_replay is rollout, but the model has no experts; nothing was loaded. Set it to off"
            )

    def begin(self, experts: Tensor | None, num_tokens: int) -> None:
        """Choose these experts, (t, layers, k), until the next call, also in recomputed layers; None for no record."""
        self._experts = experts
        self._counted.clear()
        self._recorded = None if experts is None else experts.flatten(1).any(1)
        absent = num_tokens if self._recorded is None else (~self._recorded).sum()
        self.counts[0] += absent * self._num_routers

    def _route(self, router: nn.Module, layer: int, *arguments: Any, **options: Any) -> Any:
        if self._experts is None or self._recorded is None:
            return type(router).forward(router, *arguments, **options)
        counts = None if router in self._counted else self.counts
        self._counted.add(router)
        with RecordedChoice(self._experts[:, layer], self._recorded, counts) as choice:
            result = type(router).forward(router, *arguments, **options)
        if choice.num_forced != 1:
            raise LearnerError(
                f"training.router_replay: {type(router).__name__} chose {choice.num_forced} times by torch.topk, not "
                "once: recorded experts cannot be chosen; nothing was trained. Set it to off"
            )
        return result


class RecordedChoice(TorchFunctionMode):
    """Within it, `torch.topk` over the experts of all tokens returns the recorded ones, with their own values."""

    def __init__(self, experts: Tensor, recorded: Tensor, counts: Tensor | None) -> None:
        """Take experts (t, k), whether each token's are recorded, (t,), and counts as of `RouterReplay`, if any."""
        super().__init__()
        self._experts, self._recorded, self._counts = experts, recorded, counts
        self.num_forced = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what the function returns, but for the choice of experts."""
        result = function(*args, **kwargs or {})
        if function not in (torch.topk, torch.Tensor.topk) or result.indices.shape != self._experts.shape:
            return result
        self.num_forced += 1
        own = result.indices
        indices = torch.where(self._recorded[:, None], self._experts, own)
        if self._counts is not None:
            differs = (indices.sort(-1).values != own.sort(-1).values).any(-1)
            self._counts[1:] += torch.stack([self._recorded.sum(), differs.sum()])
        return torch.return_types.topk((args[0].gather(-1, indices), indices))
