"""GlooWeightTransferEngine: receives a policy on CPUs, as vLLM's engine for NCCL does on GPUs.

vLLM's factory makes one in each worker of an engine that was started with `engine.weight_transfer = "gloo"`.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

from tasks.inference.engine.weights_view import EMBEDDINGS, HEAD

GLOO_SECONDS = timedelta(seconds=30)
"""Longest wait for the learner."""


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """Begins and finishes an update as the engine for NCCL; joins and receives by gloo."""

    model: Any
    _group: Any

    def init_transfer_engine(self, init_info: Any) -> None:
        """Join the learner's group: it is the first, and workers follow by their rank."""
        rank = init_info.rank_offset + self.parallel_config.rank
        store = TCPStore(init_info.master_address, init_info.master_port, timeout=GLOO_SECONDS)
        self._group = ProcessGroupGloo(store, rank, init_info.world_size, GLOO_SECONDS)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive weights; that of vLLM waits for an accelerator afterwards, and a CPU has none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Load tensors in the order in which the learner sends them."""
        self.model.load_weights(self._receive_tensors(update_info))

    def _receive_tensors(self, info: NCCLWeightTransferUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self._group.broadcast(tensor.reshape(-1).view(torch.uint8), 0).wait()
            yield name, tensor
            if name in EMBEDDINGS and HEAD not in info.names:  # the CPU's engine has a head of its own: weights_view
                yield HEAD, tensor
