"""ExpertCapture: the experts that a model chose for each token of each request, on the CPU.

On CUDA vLLM returns them by itself (`--enable-return-routed-experts`); its model runner for the CPU cannot.
Made in the engine's worker by `read_back.ReadBack`; PolicyTrackingLLM takes the experts of a request that has ended.
"""

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

MAX_HELD = 1024
"""Requests whose experts are held: an aborted one is never taken."""


class ExpertCapture:
    """Takes the choices of a forward pass from vLLM's routers, and gives them to the requests of its batch."""

    def __init__(self, runner: Any) -> None:
        """`runner` is the worker's model runner."""
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        self._runner = runner
        self._step: dict[int, torch.Tensor] = {}
        """Of the current forward pass, the choices (tokens, k) by layer."""
        self._held: dict[str, list[tuple[int, npt.NDArray[Any]]]] = {}
        """By request, the place of the first token and the choices of each forward pass, (tokens, layers, k)."""
        model = runner.get_model()
        routed = [module for module in model.modules() if isinstance(module, MoERunner)]
        if not routed:
            raise ValueError("training.router_replay is rollout, but the model has no experts")
        for module in routed:
            module.router.set_capture_fn(partial(self._step.__setitem__, module.layer_id))
        model.register_forward_hook(self._hold)
        config = runner.model_config
        self._shape = config.get_total_num_hidden_layers(), config.get_num_experts_per_tok()
        self._dtype = np.uint8 if config.get_num_experts() <= 256 else np.uint16

    def _hold(self, *_: Any) -> None:
        """Give the choices of a forward pass to its requests, whose tokens come one request after the other."""
        batch, borders = self._runner.input_batch, self._runner.query_start_loc.np
        if batch.req_ids and self._step:
            chosen = np.zeros((int(borders[batch.num_reqs]), *self._shape), self._dtype)
            for layer, experts in self._step.items():
                chosen[:, layer] = experts[: len(chosen)].numpy()
            for index, request in enumerate(batch.req_ids):
                first, rows = int(batch.num_computed_tokens_cpu[index]), chosen[borders[index] : borders[index + 1]]
                self._held.setdefault(request, []).append((first, rows))
        self._step.clear()
        for request in [*self._held][:-MAX_HELD]:
            del self._held[request]

    def take(self, request_id: str, start: int, end: int) -> tuple[str, list[int], bytes]:
        """Return type, shape and bytes of the experts of a request's tokens from `start` to `end`, and forget them.

        (tokens, layers, k); 0 for a token that no forward pass of the request had: one of the prefix cache, the last.
        A token that was computed again, after weights were exchanged, keeps its first choice: by that the next token
        was sampled.
        """
        # The engine's own name of a request has a random end.
        names = [name for name in self._held if name.rpartition("-")[0] == request_id]
        experts = np.zeros((end, *self._shape), self._dtype)
        for name in names:
            for first, rows in reversed(self._held.pop(name)):
                experts[first : first + len(rows)] = rows[: max(0, end - first)]
        return experts.dtype.name, list(experts[start:].shape), experts[start:].tobytes()
