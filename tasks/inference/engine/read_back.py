"""The weights that an engine computes with: loaded in each of its workers, and their checksum taken there.

With tensor parallelism every worker has a part. The sums of the parts add up to that of the whole, where values that
several workers hold are counted by the first of them alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.inference.engine.checksum import PRECISIONS, WeightsSum, add_sums, precision_of, sum_files, sum_tensor
from tasks.inference.engine.weights_view import HEAD, read_weights

PACKED = "packed_sum"
"""The attribute of a module that keeps the checksum of its packed weight."""


class ReadBack:
    """What vLLM's worker gets beside its own methods, by `--worker-extension-cls`."""

    model_runner: Any
    reload_weights: Callable[..., None]

    def weights_sum(self, directory: str) -> list[list[int] | None]:
        """Return the checksum of this worker's weights, and that of the files in `directory` by the first worker.

        The second is None by the others, and for files in a precision that is not compared.
        """
        from vllm.distributed import get_tensor_model_parallel_rank

        model = self.model_runner.get_model()
        dtype = str(self.model_runner.model_config.dtype).removeprefix("torch.")
        files = None
        if get_tensor_model_parallel_rank() == 0:
            files = sum_files(directory, dtype, own_head=_has_own_head(model), device=self.model_runner.device)
        return [list(sum_model(model, dtype)), files and list(files)]

    def load_directory(self, directory: str) -> None:
        """Load the weights of a directory in place of those that are there, whatever else it holds."""
        from vllm.platforms import current_platform

        weights = read_weights(Path(directory), untie=bool(current_platform.is_cpu()))
        self.reload_weights(weights_iterator=weights)

    def sampled_counts(self) -> dict[str, int]:
        """Return how many tokens of each request in flight were sampled."""
        return {each: len(state.output_token_ids) for each, state in self.model_runner.requests.items()}


def sum_model(model: Any, dtype: str) -> WeightsSum:
    """Return the checksum of this worker's part of a model."""
    sums: dict[int, WeightsSum] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            packed = vars(module).get(PACKED) if name == "weight" else None
            # One that modules share counts once: as the last of them has it, which is a tied output head.
            # A packed one is empty, or in an order of its own: it has no parts.
            sums[id(weight)] = packed or _sum_parts(module, name, weight, dtype)
    return add_sums(sums.values())


def sum_packed(layer: Any) -> WeightsSum | None:
    """Return the checksum of the matrix of a layer that is about to be packed; None for a precision without one."""
    dtype = precision_of(layer.weight)
    return _sum_parts(layer, "weight", layer.weight, dtype) if dtype in PRECISIONS else None


def _sum_parts(module: Any, name: str, weight: Any, dtype: str) -> WeightsSum:
    return add_sums(sum_tensor(part, dtype) for part in _own_parts(module, name, weight))


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
