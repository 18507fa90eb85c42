"""WeightSender: sends the policy in the learner's memory to engines, by the trainer's side of vLLM's weight transfer.

Called in each rank by its Trainer. What an engine's server is asked for on the way, the flow asks on rank 0's behalf:
the learner knows neither addresses nor keys of engines. Imports vllm, so it is imported with the first transfer.
"""

import base64
import math
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer import (
    ParamMeta,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

from tasks.learner.checkpoint import own_tensors
from tasks.learner.distributed import World
from tasks.learner.shards import converting_model, gather_whole, stored_parts, stored_shapes
from tasks.runtime.process_variables import bind_address

GLOO_SECONDS = timedelta(seconds=30)
"""Longest wait of gloo for the other end."""
ABANDONED_SECONDS = 60.0
"""Longest time that a rank may stay in a transfer whose other end is gone: a kernel of NCCL waits for ever."""
Ask = Callable[[str, Mapping[str, Any]], None]
"""Calls a route of the engine by its name, with its content; raises OSError or EOFError where that failed."""


class PolicySource(WeightSource):
    """The tensors of a policy as they are published, in order of their names in memory."""

    def __init__(self, causal: Any, dtype: torch.dtype | None, world: World) -> None:
        self._causal, self._dtype, self.world = converting_model(causal), dtype, world
        self._tensors = dict(sorted(own_tensors(causal).items()))

    def metadata(self) -> list[ParamMeta]:
        """Return name, type and whole shape of each tensor."""
        stored = stored_shapes(self._causal, self._tensors, self._dtype)
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors: a collective of all ranks."""
        for name, whole in gather_whole(self._tensors, list(self._tensors), self._dtype, self.world):
            for stored, tensor in stored_parts(self._causal, name, whole).items():
                yield stored, tensor.contiguous()


class WeightSender:
    """Sends policies of one learner to its engines, each of which it joins once."""

    def __init__(self) -> None:
        self._engines: dict[str, TrainerWeightTransferEngine[Any]] = {}

    def send(self, source: PolicySource, ask: Ask, *, backend: str, target: str, workers: int) -> None:
        """Send a policy to the engine `target`, which has so many workers; all ranks call this together.

        Raises what the transfer does; the next one to the engine joins it anew then.
        """
        client = _Client(ask)
        engine = self._engines.pop(target, None)
        try:
            if engine is None:
                info = _init_info(backend, source, 1 + workers)
                engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
            engine.client, engine.source = client, source
            engine.send_weights()
            engine.source = None  # or the tensors would outlive the policy in the learner
        finally:
            client.deadline.cancel()
        self._engines[target] = engine


class _Client:
    """What vLLM's trainer engines call of an engine's server."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        # The flow learns that the process is gone, and has the policy from its files.
        self.deadline = threading.Timer(ABANDONED_SECONDS, os._exit, (1,))
        self.deadline.daemon = True

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call("start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        content = dict(update_info)
        if handles := content.pop("ipc_handles", None):  # as vLLM's own client for HTTP has them
            content["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        self._call("update_weights", {"update_info": content})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", {})

    def _call(self, route: str, content: Mapping[str, Any]) -> None:
        try:
            self._ask(route, content)
        except (OSError, EOFError):
            self.deadline.start()
            raise


@dataclass
class GlooTrainerInitInfo(NCCLTrainerInitInfo):
    """Where rank 0 listens for the workers, and how many processes meet there."""

    backend: ClassVar[str] = "gloo"


def _init_info(backend: str, source: PolicySource, world_size: int) -> TrainerInitInfo:
    rank = source.world.rank
    if backend == "ipc":  # vLLM refuses a tensor above the size of its buffer, as an embedding may be
        largest = max(math.prod(meta.shape) * meta.dtype.itemsize for meta in source.metadata())
        buffer = max(DEFAULT_PACKED_BUFFER_SIZE_BYTES, largest)
        return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=buffer)
    with socket.create_server((bind_address(), 0)) as free:
        address, port = free.getsockname()
    place = GlooTrainerInitInfo if backend == "gloo" else NCCLTrainerInitInfo
    return place(address, port, world_size, rank=rank)


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The trainer's side of `tasks.inference.engine.gloo_transfer`: broadcasts tensors one by one."""

    init_info_cls = GlooTrainerInitInfo
    _group: Any

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Have the workers join rank 0."""
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            host, port, size = init_info.master_address, init_info.master_port, init_info.world_size
            store = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=GLOO_SECONDS)
            place = {"master_address": host, "master_port": port, "world_size": size, "rank_offset": 1}
            with ThreadPoolExecutor(1) as thread:
                joined = thread.submit(client.init_weight_transfer_engine, place)
                engine._group = ProcessGroupGloo(store, 0, size, GLOO_SECONDS)
                joined.result()
        return engine

    def send_weights(self) -> None:
        """Send all tensors while the workers receive them; the other ranks take part in gathering."""
        assert self.source is not None
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        metas = self.source.metadata()
        types = [str(meta.dtype).removeprefix("torch.") for meta in metas]
        info = NCCLWeightTransferUpdateInfo([meta.name for meta in metas], types, [list(meta.shape) for meta in metas])
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as thread:
            received = thread.submit(self.client.update_weights, asdict(info))
            for _, tensor in self.source:
                self._group.broadcast(tensor.reshape(-1).view(torch.uint8), 0).wait()
            received.result()
        self.client.finish_weight_update()


WeightTransferTrainerFactory.register_engine("gloo", GlooTrainerWeightTransferEngine)
