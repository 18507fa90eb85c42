"""Makes the engine's core cheaper where requests are many and small; it computes the same, up to rounding.

Tokens are drawn from the same probabilities, but a seed stands for other ones than with vLLM's own core.

The core is forked from the process that calls `patch_core`, so the patches hold in it. On CUDA it is started afresh,
and nothing changes there.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import distributed
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, PauseMode
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

MOST_HELD = 32
"""Tokens of a request that are held back: held ones take several hundred bytes each."""


def patch_core() -> None:
    """Patch vLLM's classes; call it before the engine is created."""
    _share_process_group()
    step, sample = EngineCore.step, TopKTopPSampler.forward_cpu

    def step_and_hold(self: EngineCore) -> tuple[dict[int, EngineCoreOutputs], bool]:
        outputs, model_executed = step(self)
        # With statistics each forward pass is reported as it is made.
        return (outputs if self.log_stats else _hold_back(self, outputs)), model_executed

    def sample_seeded(self: Any, logits: Any, generators: Any, k: Any, p: Any) -> Any:
        # The CPU's own draws noise for the whole batch, and then again for each row with a seed. This one draws by
        # `_draw`, which takes the place of its `random_sample` below.
        return self.forward_native(logits, generators, k, p) if generators else sample(self, logits, {}, k, p)

    normalise = RMSNorm.forward_cpu

    def normalise_at_once(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        weight = self.weight
        whole = x.dtype == weight.dtype == torch.float32 and self.has_weight and self.variance_size_override is None
        return _normalise(self, x, residual) if whole else normalise(self, x, residual)

    RMSNorm.forward_cpu = normalise_at_once  # type: ignore[method-assign]
    AsyncLLM.pause_generation = _pause_generation  # type: ignore[method-assign]
    EngineCore.step = step_and_hold  # type: ignore[method-assign]
    TopKTopPSampler.forward_cpu = sample_seeded  # type: ignore[method-assign]
    draw = topk_topp_sampler.random_sample

    def draw_by_seed(
        probs: torch.Tensor, generators: dict[int, torch.Generator], use_fp64_gumbel: bool = False
    ) -> torch.Tensor:
        return _draw(probs, generators) if generators else draw(probs, generators, use_fp64_gumbel)

    topk_topp_sampler.random_sample = draw_by_seed
    allocate = KVCacheManager.allocate_slots

    def allocate_where_needed(self: KVCacheManager, request: Any, num_new_tokens: int, *rest: Any, **named: Any) -> Any:
        decodes = num_new_tokens == 1 and not rest and named == {"num_lookahead_tokens": 0}
        if decodes and _stays_within_block(self, request.num_computed_tokens):
            return self.empty_kv_cache_blocks
        return allocate(self, request, num_new_tokens, *rest, **named)

    KVCacheManager.allocate_slots = allocate_where_needed  # type: ignore[method-assign]


def _stays_within_block(manager: KVCacheManager, position: int) -> bool:
    """Tell whether the token at a position neither begins a block of the KV cache nor fills one.

    Its block is there then, and no further one is whole and can be shared: for a request that decodes there is nothing
    to allocate. vLLM works that out for each token, in about a tenth of the time of a small model's pass. Only where
    all layers attend to everything: other kinds of layers give blocks back as they go on.
    """
    groups = manager.coordinator.single_type_managers
    size = groups[0].block_size if len(groups) == 1 and type(groups[0]) is FullAttentionManager else 1
    return position % size != 0 and (position + 1) % size != 0


def _normalise(norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
    """Return what `RMSNorm.forward_native` does, from one kernel in place of six operations."""
    x, weight = x.contiguous(), norm.weight.data  # the kernel goes by no strides
    if residual is None:
        output = torch.empty_like(x)
        torch.ops._C.rms_norm(output, x, weight, norm.variance_epsilon)
        return output
    residual = residual.contiguous()
    torch.ops._C.fused_add_rms_norm(x, residual, weight, norm.variance_epsilon)
    return x, residual


def _draw(probs: torch.Tensor, generators: Mapping[int, torch.Generator]) -> torch.Tensor:
    """Return a token for each row, [rows], of probabilities, [rows, vocabulary], by inverting their cumulative sum.

    A row with a generator takes one number of it, where vLLM's own takes one for each token of the vocabulary. What it
    gets depends on no other row.
    """
    numbers = torch.rand(len(probs), 1, dtype=torch.float64)
    for row, number in enumerate(numbers.unbind()):
        if row in generators:
            number.uniform_(generator=generators[row])
    sums = probs.cumsum(-1, dtype=torch.float64)
    # The first sum above: never a token of probability zero, as its sum is not above the one before it. A row that is
    # no number has no such sum.
    found = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)
    return found.clamp(max=probs.shape[1] - 1).view(-1)


async def _pause_generation(
    self: AsyncLLM,
    *,
    mode: PauseMode = "abort",
    wait_for_inflight_requests: bool | None = None,
    clear_cache: bool = True,
) -> None:
    """Pause as vLLM's own does, without the 20 ms after it in which the last outputs would be returned first."""
    if clear_cache:
        await self.renderer.clear_mm_cache_async()
    await self.engine_core.pause_scheduler_async("wait" if wait_for_inflight_requests else mode, clear_cache)


def _share_process_group() -> None:
    """Let a core without peers have one process group: each of vLLM's 13 has a thread that wakes up every 10 ms."""
    make, destroy = distributed.new_group, distributed.destroy_process_group

    def new_group(*positional: Any, **named: Any) -> Any:
        return distributed.group.WORLD if distributed.get_world_size() == 1 else make(*positional, **named)

    def destroy_process_group(group: Any = None) -> None:
        if distributed.is_initialized():  # the one group is destroyed in the name of each
            destroy(group)

    distributed.new_group, distributed.destroy_process_group = new_group, destroy_process_group


def _hold_back(core: Any, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
    """Hold tokens back whose client waits for the last one: they go out together, and no message is made for each.

    A message costs both processes as much as the pass through a small model.
    """
    held: dict[str, list[EngineCoreOutput]] = vars(core).setdefault("held_outputs", {})
    requests = core.scheduler.requests
    for each in outputs.values():
        sent = []
        for output in each.outputs:
            key = output.request_id
            earlier = held.get(key, ())
            if _can_wait(output, requests.get(key)) and len(earlier) + 1 < MOST_HELD:
                held.setdefault(key, []).append(output)
            else:
                sent.append(_merge([*held.pop(key, ()), output]))
        each.outputs = sent
    if len(held) > len(requests):  # some were aborted
        for key in held.keys() - requests.keys():
            del held[key]
    return {client: each for client, each in outputs.items() if each.outputs}


def _can_wait(output: EngineCoreOutput, request: Any) -> bool:
    """Tell whether nobody looks at a request's tokens before the last one: no stream, and no stop strings."""
    parameters = getattr(request, "sampling_params", None)
    if parameters is None or output.finish_reason is not None:
        return False
    wholly_held = output.routed_experts is None and output.new_sampling_mask is None
    return wholly_held and parameters.output_kind == RequestOutputKind.FINAL_ONLY and not parameters.stop


def _merge(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Return one output in place of several of a request."""
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    if logprobs := [output.new_logprobs for output in outputs if output.new_logprobs is not None]:
        # A row is as wide as the request of its batch wants that asks for most: a probe, while rollouts are under way.
        width = min(each.logprobs.shape[1] for each in logprobs)
        rows = ((ids[:, :width], values[:, :width], ranks) for ids, values, ranks, *_ in logprobs)
        ids, values, ranks = map(np.concatenate, zip(*rows, strict=True))
        last.new_logprobs = LogprobsLists(ids, values, ranks)
    for name in ("prefill_stats", "new_prompt_logprobs_tensors", "prompt_token_id_logprobs"):
        setattr(last, name, _first(getattr(output, name) for output in outputs))
    return last


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)
