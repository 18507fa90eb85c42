"""The weights that an engine computes with: loaded in each of its workers, and their checksum taken there.

With tensor parallelism every worker has a part. The sums of the parts add up to that of the whole, where values that
several workers hold are counted by the first of them alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import Any

from tasks.inference.engine.checksum import BITS, WeightsSum, sum_tensor
from tasks.inference.engine.weights_view import HEAD, read_weights

PACKED = "packed_sum"
"""The attribute of a module that keeps the checksum of its packed weight."""


class ReadBack:
    """What vLLM's worker gets beside its own methods, by `--worker-extension-cls`."""

    model_runner: Any
    reload_weights: Callable[..., None]

    def weights_sum(self) -> dict[str, Any]:
        """Return the checksum of the weights that this worker computes with, their precision, and what its head is.

        `own_head` tells whether the output head is a parameter of its own. `adapters` has the checksum of each adapter
        that is in memory, the last one loaded at the end, with the precision of its factors; None for one that cannot
        be compared. An adapter that was unloaded stays in memory until its slot is needed.
        """
        model = self.model_runner.get_model()
        dtype = str(self.model_runner.model_config.dtype).removeprefix("torch.")
        manager = getattr(getattr(self.model_runner, "lora_manager", None), "_adapter_manager", None)
        return {
            **asdict(sum_model(model, dtype)),
            "dtype": dtype,
            "own_head": _has_own_head(model),
            "adapters": _sum_adapters(manager) if manager else [],
        }

    def load_directory(self, directory: str) -> None:
        """Load the weights of a directory in place of those that are there, whatever else it holds."""
        from vllm.platforms import current_platform

        weights = read_weights(Path(directory), untie=bool(current_platform.is_cpu()))
        self.reload_weights(weights_iterator=weights)

    def sampled_counts(self) -> dict[str, int]:
        """Return how many tokens of each request in flight were sampled."""
        return {each: len(state.output_token_ids) for each, state in self.model_runner.requests.items()}


def combine(workers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer of a whole engine from those of its workers, each of which has a part."""
    adapters = zip(*(each["adapters"] for each in workers), strict=True)
    return {**workers[0], **_total(workers), "adapters": [None if None in of else _merge_parts(of) for of in adapters]}


def _merge_parts(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {**parts[0], **_total(parts)}


def _total(answers: Iterable[dict[str, Any]]) -> dict[str, int]:
    return asdict(reduce(WeightsSum.plus, map(WeightsSum.of, answers), WeightsSum()))


def sum_model(model: Any, dtype: str) -> WeightsSum:
    """Return the checksum of this worker's part of a model."""
    sums: dict[int, WeightsSum] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            packed = vars(module).get(PACKED) if name == "weight" else None
            # One that modules share counts once: as the last of them has it, which is a tied output head.
            sums[id(weight)] = packed or _sum_all(_own_parts(module, name, weight), dtype)
    return reduce(WeightsSum.plus, sums.values(), WeightsSum())


def _sum_all(tensors: Iterable[Any], dtype: str) -> WeightsSum:
    return reduce(WeightsSum.plus, (sum_tensor(each, dtype) for each in tensors), WeightsSum())


def sum_packed(layer: Any) -> WeightsSum | None:
    """Return the checksum of the matrix of a layer that is about to be packed; None for a precision without one."""
    dtype = str(layer.weight.dtype).removeprefix("torch.")
    return _sum_all(_own_parts(layer, "weight", layer.weight), dtype) if dtype in BITS else None


def _own_parts(module: Any, name: str, weight: Any) -> list[Any]:
    """Return the parts of a parameter that this worker counts.

    These are its own rows of a vocabulary, without padding; its own heads; and on the first worker what all hold.
    """
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    if isinstance(module, vocab_parallel_embedding.VocabParallelEmbedding):
        return [weight[: module.shard_indices.num_org_elements]]
    if isinstance(module, linear.QKVParallelLinear):
        sizes = [size // module.tp_size for size in module.output_sizes]
        query, *keys_values = weight.split(sizes, dim=0)
        return [query, *(keys_values if module.tp_rank % module.num_kv_head_replicas == 0 else [])]
    # A bias of a matrix that is split by its input is added once, and every worker has it whole.
    split_by_input = isinstance(module, linear.RowParallelLinear) and name == "weight"
    if split_by_input or (isinstance(module, linear.ColumnParallelLinear) and module.tp_size > 1):
        return [weight]
    return [weight] if _rank(module) == 0 else []


def _rank(module: Any) -> int:
    """Return the worker's number within its tensor-parallel group."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(getattr(module, "tp_rank", 0) or get_tensor_model_parallel_rank())


def _has_own_head(model: Any) -> bool:
    """Tell whether the output head has a parameter of its own."""
    names = [name for name, _ in model.named_parameters()]
    return any(name.replace(".base_layer", "").endswith(HEAD) for name in names)


def _sum_adapters(manager: Any) -> list[dict[str, Any] | None]:
    """Return the checksum of each adapter that has a slot, in the order in which they were loaded: numbers count up."""
    slots = sorted((number, slot) for slot, number in enumerate(manager.lora_index_to_id) if number is not None)
    return [_sum_adapter(manager, slot, manager.get_adapter(number)) for number, slot in slots]


def _sum_adapter(manager: Any, slot: int, adapter: Any) -> dict[str, Any] | None:
    """Return the checksum of a slot's factors, padding included, with the count of values that were to be loaded.

    None where a module holds factors in a way that files do not: experts, fused factors, or factors split by rank.
    """
    result, dtype = WeightsSum(), ""
    for name, module in manager.modules.items():
        loaded = adapter.get_lora(name)
        found = _sum_factors(module, slot, loaded) if loaded else WeightsSum()
        if found is None:
            return None
        result = result.plus(found)
        if loaded:
            dtype = str(module.lora_a_stacked[0].dtype).removeprefix("torch.")
    return {**asdict(result), "dtype": dtype} if dtype in BITS else None


def _sum_factors(module: Any, slot: int, loaded: Any) -> WeightsSum | None:
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.model_executor.layers import linear

    if not isinstance(module, BaseLinearLayerWithLoRA) or module.lora_config.fully_sharded_loras:
        return None
    base, factors = module.base_layer, loaded.lora_a if isinstance(loaded.lora_a, list) else [loaded.lora_a]
    replicas = getattr(base, "num_kv_head_replicas", 1)
    if len(factors) != module.n_slices or (module.n_slices == 1 and replicas > 1):
        return None
    first, result = module.tp_rank == 0, WeightsSum()
    for index, factor in enumerate(factors):
        if factor is None:  # of matrices that are fused, this one has no adapter
            continue
        a, b = module.lora_a_stacked[index][slot, 0], module.lora_b_stacked[index][slot, 0]
        owns_heads = index == 0 or module.tp_rank % replicas == 0
        owns_a = first or isinstance(base, linear.RowParallelLinear)
        owns_b = first or (isinstance(base, linear.ColumnParallelLinear) and owns_heads)
        for owns, values, count in ((owns_a, a, len(factor) * a.shape[1]), (owns_b, b, len(b) * len(factor))):
            if owns:
                found = sum_tensor(values, str(values.dtype).removeprefix("torch."))
                result = result.plus(replace(found, count=count))  # padding is zeros, which add nothing else
    return result
