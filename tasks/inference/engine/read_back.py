"""The weights that an engine computes with: loaded in each of its workers, and their checksum, to compare with files.

The checksum is the number of values, and the sums of their bit patterns and of the squares of these, modulo 2 to the
64, each value in the engine's precision. The sums do not depend on how an engine fuses, splits or transposes matrices,
so they equal those of the files; a flipped bit or an old matrix changes them. They do not see two matrices exchanged:
the log-probs of a probe do.

With tensor parallelism every worker has a part. The sums of the parts add up to that of the whole, where values that
several workers hold are counted by the first of them alone.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tasks.inference.engine.weights_view import HEAD, read_weights

MODULUS = 1 << 64
CHUNK = 1 << 22
"""Values that are summed at once: the patterns are widened to 8 bytes each."""
PRECISIONS = ("bfloat16", "float16", "float32")
PACKED = "packed_sum"
"""The attribute of a module that keeps the checksum of its packed weight."""


class WeightsSum(NamedTuple):
    """The checksum of some weights."""

    num_values: int = 0
    total: int = 0
    """The sum of their bit patterns, modulo 2 to the 64."""
    squares: int = 0
    """The sum of the squares of their bit patterns, modulo 2 to the 64."""


def add_sums(sums: Iterable[WeightsSum]) -> WeightsSum:
    """Return the checksum of all."""
    return WeightsSum(*(sum(numbers) % MODULUS for numbers in zip(*sums, strict=True)))


def sum_files(directory: str | Path, dtype: str, *, own_head: bool, device: Any = "cpu") -> WeightsSum | None:
    """Return the checksum that an engine of precision `dtype` has with the weights in `directory`, taken on a device.

    With `own_head` the engine has an output head of its own, also where the files tie it to the embedding. Returns None
    where the files have a precision that is none of PRECISIONS. Raises WeightsUnusable for damaged files.
    """
    sums = []
    for _, tensor in read_weights(Path(directory), untie=own_head):
        if precision_of(tensor) not in PRECISIONS:
            return None
        sums.append(sum_tensor(tensor.to(device), dtype))
    return add_sums(sums)


def precision_of(tensor: Any) -> str:
    """Return the name of a tensor's precision."""
    return str(tensor.dtype).removeprefix("torch.")


def sum_tensor(weight: Any, dtype: str) -> WeightsSum:
    """Return the checksum of a tensor in the precision `dtype`."""
    import torch

    sums = []
    for part in weight.detach().reshape(-1).split(CHUNK):
        bits = part.to(getattr(torch, dtype)).view(torch.int32 if dtype == "float32" else torch.int16)
        wide = bits.to(torch.int64) & (0xFFFFFFFF if dtype == "float32" else 0xFFFF)  # sums and products wrap around
        total, squares = torch.stack([wide.sum(), (wide * wide).sum()]).tolist()
        sums.append(WeightsSum(part.numel(), total, squares))
    return add_sums(sums)


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
    from vllm.distributed import get_tensor_model_parallel_rank
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
    return [] if get_tensor_model_parallel_rank() else [weight]


def _has_own_head(model: Any) -> bool:
    """Tell whether the output head has a parameter of its own."""
    names = [name for name, _ in model.named_parameters()]
    return any(name.replace(".base_layer", "").endswith(HEAD) for name in names)
