"""The weights that an engine computes with: loaded in each of its workers, and their checksum, to compare.

It is compared with what the learner had in memory while it wrote the policy, or, where it recorded nothing in the
engine's precision, with the files.

With tensor parallelism every worker has a part. The sums of the parts add up to that of the whole, where values that
several workers hold are counted by the first of them alone.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.inference.engine.weights_view import EMBEDDINGS, HEAD, has_tied_head, read_weights, weight_files
from tasks.runtime.weights_sum import PRECISIONS, SUMS_FILE, WeightsSum, add_sums, precision_of, sum_tensor

if TYPE_CHECKING:  # it imports torch
    from tasks.inference.engine.expert_capture import ExpertCapture

PACKED = "packed_sum"
"""The attribute of a module that keeps the checksum of its weight as it was before it was packed or quantised."""
FP8 = "stagecoach_fp8"
"""The name among vLLM's quantisations of the one in `tasks.inference.engine.quantised`."""
DECAYS = ("A", "A_log")
"""What decays states: a policy has logarithms, and vLLM keeps the values of Mamba's. They do not count: log-probs prove
them."""


def recorded_sum(directory: str | Path, dtype: str, *, own_head: bool) -> WeightsSum | None:
    """Return the checksum of the weights in `directory` that the learner recorded; None where it did not in `dtype`.

    `own_head` as in `sum_files`. Raises WeightsUnusable for damaged files.
    """
    file = Path(directory, SUMS_FILE)
    sums = json.loads(file.read_text()).get(dtype) if file.is_file() else None
    if not sums:
        return None
    heads = EMBEDDINGS if own_head and has_tied_head(Path(directory)) else ()
    counted = (value for name, value in sums.items() if not name.endswith(DECAYS[1]))
    return add_sums([*counted, *(sums[name] for name in heads if name in sums)])


def sum_files(directory: str | Path, dtype: str, *, own_head: bool, device: Any = "cpu") -> WeightsSum | None:
    """Return the checksum that an engine of precision `dtype` has with the weights in `directory`, taken on a device.

    With `own_head` the engine has an output head of its own, also where the files tie it to the embedding. Returns None
    where the files have a precision that is none of PRECISIONS. Raises WeightsUnusable for damaged files.
    """
    sums = []
    for name, tensor in read_weights(Path(directory), untie=own_head):
        if name.endswith(DECAYS[1]):
            continue
        if precision_of(tensor) not in PRECISIONS:
            return None
        sums.append(sum_tensor(tensor.to(device), dtype))
    return add_sums(sums)


class ReadBack:
    """What vLLM's worker gets beside its own methods, by `--worker-extension-cls`."""

    model_runner: Any
    reload_weights: Callable[..., None]
    expert_capture: "ExpertCapture"

    def weights_sum(self, directory: str) -> list[list[int] | None]:
        """Return the checksum of this worker's weights, and by the first worker what it is to be for `directory`.

        The second is None by the others, and for files in a precision that is not compared.
        """
        from vllm.distributed import get_tensor_model_parallel_rank

        model = self.model_runner.get_model()
        dtype = str(self.model_runner.model_config.dtype).removeprefix("torch.")
        files = None
        if get_tensor_model_parallel_rank() == 0:
            own_head = _has_own_head(model)
            files = recorded_sum(directory, dtype, own_head=own_head)
            if files is None:
                states = (path.stat() for path in weight_files(Path(directory)))
                times = tuple((state.st_ino, state.st_mtime_ns) for state in states)
                files = _sum_unchanged(times, directory, dtype, own_head, self.model_runner.device)
        return [list(sum_model(model, dtype)), files and list(files)]

    def capture_experts(self) -> None:
        """Hold from now on which experts the model chooses; see `ExpertCapture`. Raises ValueError for one without."""
        from tasks.inference.engine.expert_capture import ExpertCapture

        self.expert_capture = ExpertCapture(self.model_runner)

    def take_experts(self, request_id: str, start: int, end: int) -> tuple[str, list[int], bytes]:
        """Return the experts of a request's tokens; see `ExpertCapture.take`."""
        return self.expert_capture.take(request_id, start, end)

    def load_directory(self, directory: str) -> None:
        """Load the weights of a directory in place of those that are there, whatever else it holds."""
        from vllm.platforms import current_platform

        weights = read_weights(Path(directory), untie=bool(current_platform.is_cpu()))
        self.reload_weights(weights_iterator=weights)


@cache
def _sum_unchanged(times: object, directory: str, dtype: str, own_head: bool, device: Any) -> WeightsSum | None:
    # Weights below adapters are compared at every step; files in the same state are read once.
    return sum_files(directory, dtype, own_head=own_head, device=device)


def sum_model(model: Any, dtype: str) -> WeightsSum:
    """Return the checksum of this worker's part of a model."""
    sums: dict[int, WeightsSum] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if name in ("weight_scale", *DECAYS):  # scales of a quantised matrix are no values of the policy
                continue
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
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    if isinstance(module, vocab_parallel_embedding.VocabParallelEmbedding):
        return [weight[: module.shard_indices.num_org_elements]]
    if isinstance(module, linear.QKVParallelLinear):
        sizes = [size // module.tp_size for size in module.output_sizes]
        query, *keys_values = weight.split(sizes, dim=0)
        return [query, *(keys_values if module.tp_rank % module.num_kv_head_replicas == 0 else [])]
    # A bias of a matrix that is split by its input is added once, and every worker has it whole.
    split_by_input = isinstance(module, linear.RowParallelLinear) and name == "weight"
    # Experts are split by their inner width, or dealt to workers whole.
    experts = isinstance(module, RoutedExperts) and name != "w2_bias"
    if split_by_input or experts or (isinstance(module, linear.ColumnParallelLinear) and module.tp_size > 1):
        return [weight]
    return [] if get_tensor_model_parallel_rank() else [weight]


def _has_own_head(model: Any) -> bool:
    """Tell whether the output head has a parameter of its own."""
    names = [name for name, _ in model.named_parameters()]
    return any(name.replace(".base_layer", "").endswith(HEAD) for name in names)
