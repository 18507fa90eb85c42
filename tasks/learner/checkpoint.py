"""Saves and loads a policy: a Hugging Face directory with optimizer state beside the weights, synced to disk.

Weights in float32 are stored as they are trained, by one rank, and an engine casts them when it loads. Policies in
bfloat16 (`training.policy_dtype`) are what the model is computed with, written by all ranks; the float32 weights behind
them are kept beside the optimizer's moments, so that a resumed run is the same run.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from storage.policies.manifest import weights_digest
from storage.refs import File
from tasks.learner import adapters
from tasks.learner.digest import OPTIMIZER_FILE, OPTIMIZER_PREFIX, tensors_sha256, weight_paths, weights_sha256
from tasks.learner.distributed import World, like, local, whole
from tasks.learner.model import PolicyModel
from tasks.learner.optimizer import Optimizer, OptimizerPart
from tasks.learner.protocol import LearnerError, NoOptimizerState
from tasks.learner.shards import converting_model, file_layout, stored_parts, stored_shapes, write_index, write_shards
from tasks.runtime.weights_sum import PRECISIONS, SUMS_FILE, WeightsSum, add_sums, precision_of, sum_tensor

COMPANION_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
STEP = "step"
"""Name of the step counter among the tensors of optimizer state; the others are named `MOMENT.PARAMETER`."""
MASTER = "master."
"""What the names of float32 weights among them begin with."""


PROBE_TEXT = """\
A train leaves the station at 9:40 and travels 126 miles in one hour and three quarters. How fast does it go on average?
The distance divided by the time is the speed, so we divide 126 by 1.75, which is 72. The train goes 72 miles an hour.
To check the result, multiply: 72 times 1.75 is 126, and the answer holds. If it stopped for a quarter of an hour on the
way, it moved for an hour and a half only, and its speed between the stops was 84 miles an hour.

def speed(distance, hours, stop=0.0):
    if hours <= stop:
        raise ValueError("the train never moved")
    return distance / (hours - stop)
"""
"""What engine and learner are compared on: text as a model meets it, of more than 160 tokens by any usual tokenizer."""


def probe_tokens(directory: Path, vocab_size: int) -> list[int]:
    """Return the tokens of `PROBE_TEXT` by the tokenizer in a directory.

    Empty where there is no tokenizer.json, or where it has tokens that the model lacks.
    """
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        return []
    tokens: list[int] = Tokenizer.from_file(str(path)).encode(PROBE_TEXT, add_special_tokens=False).ids
    return tokens if len(tokens) > 1 and max(tokens) < vocab_size else []


def companions(directory: Path, dtype: str = "float32") -> dict[str, bytes]:
    """Return the files that later policies take over unchanged: config, tokenizer, chat template.

    Kept in memory, because a published directory may be moved or evicted. The config's dtype becomes that of policies.
    """
    files = {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        # An index and checksums are of the weights that were read; those that are written get their own.
        if path.is_file() and path.suffix in COMPANION_SUFFIXES and not path.name.endswith((".index.json", SUMS_FILE))
    }
    config = json.loads(files["config.json"])
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    files["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return files


def save_policy(
    policy: PolicyModel,
    optimizer: Optimizer | None,
    files: dict[str, bytes],
    directory: Path,
    world: World,
    beat: Callable[[], None] = lambda: None,
) -> str:
    """Write the policy into `directory`, with optimizer state if `optimizer` is given; return the weights' digest.

    All ranks call this together and rank 0 writes. Everything is synced to disk before it returns. `beat` is called
    between its parts.
    """
    from safetensors.torch import save_file

    adapter = policy.adapter
    weights = _gather(adapters.tensors(policy.causal) if adapter else dict(policy.causal.state_dict()), world)
    beat()
    state = None if optimizer is None else _gather(moment_tensors(policy, optimizer), world)
    beat()
    if not adapter:
        files = files | weights_sums(policy, world, "float32", "bfloat16")
        beat()
    digest = None
    if world.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        if adapter:
            adapters.write(directory, weights, adapter)
        else:
            policy.causal.save_pretrained(directory, state_dict=weights)
        beat()
        if state is not None:
            save_file(state, directory / OPTIMIZER_FILE)
        for name, content in files.items():
            (directory / name).write_bytes(content)
        beat()
        _sync(directory)
        beat()
        digest = adapter.sha256_of(weights) if adapter else weights_sha256(directory)
    return str(world.broadcast(digest))


def save_rounded(
    policy: PolicyModel,
    optimizer: Optimizer | None,
    files: dict[str, bytes],
    directory: Path,
    world: World,
    beat: Callable[[], None] = lambda: None,
) -> tuple[str, tuple[File, ...]]:
    """Write the policy in bfloat16 and, if `optimizer` is given, its state with the float32 weights beside.

    As `save_policy`, but all ranks write. Returns the weights' digest, and those of all files of tensors.
    """
    if world.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
    world.broadcast(None)  # nobody writes before the directory is there
    causal, weights = policy.causal, own_tensors(policy.causal)
    written = write_shards(weights, "model", directory, world, dtype=torch.bfloat16, beat=beat, causal=causal)
    files = files | weights_sums(policy, world, "bfloat16")
    beat()
    state: tuple[File, ...] = ()
    if optimizer is not None:
        named = {MASTER + name: parameter for _, name, parameter in trained_parameters(policy, optimizer)}
        state = write_shards(named | moment_tensors(policy, optimizer), OPTIMIZER_PREFIX, directory, world, beat=beat)
    if world.rank == 0:
        layout = {
            file: list(stored_shapes(causal, {name: weights[name] for name in names}))
            for file, names in file_layout(weights, "model", torch.bfloat16).items()
        }
        write_index(layout, written, directory)
        for name, content in files.items():
            (directory / name).write_bytes(content)
        _sync(directory)
    beat()
    return weights_digest(written), written + state


def own_tensors(causal: nn.Module) -> dict[str, Tensor]:
    """Return what is stored of a model, by name: a tied output head is the embedding and is left out."""
    once = {name for name, _ in (*causal.named_parameters(), *causal.named_buffers())}
    return {name: tensor for name, tensor in causal.state_dict().items() if name in once}


def weights_sums(policy: PolicyModel, world: World, *dtypes: str) -> dict[str, bytes]:
    """Return the file SUMS_FILE of the weights in memory in some precisions; none of integers among the weights.

    All ranks call this together, and each sums its own shards, where they are.
    """
    weights = own_tensors(policy.causal)
    if any(precision_of(tensor) not in PRECISIONS for tensor in weights.values()):
        return {}

    def is_counted(tensor: Tensor) -> bool:
        # Of several copies of the shards those of the first, and on the first rank what is not sharded.
        return world.rank < (1 if local(tensor) is tensor else world.size // world.replicas)

    def sums(dtype: str) -> dict[str, WeightsSum]:
        own = {name: sum_tensor(local(tensor), dtype) for name, tensor in weights.items() if is_counted(tensor)}
        parts = world.gather(own)
        return {name: add_sums(part[name] for part in parts if name in part) for name in weights}

    return {SUMS_FILE: json.dumps({dtype: sums(dtype) for dtype in dtypes}).encode()}


def check_stored_names(policy: PolicyModel, directory: Path) -> None:
    """Raise LearnerError where a family stores its tensors under other names than it has them in memory."""
    from safetensors import safe_open

    stored = {name for path in weight_paths(directory) for name in safe_open(path, "pt").keys()}  # noqa: SIM118
    causal = policy.causal
    own, in_memory = (stored_shapes(causal, each).keys() for each in (own_tensors(causal), causal.state_dict()))
    if wrong := sorted((own - stored) | (stored - in_memory)):
        raise LearnerError(
            f"training.policy_dtype is bfloat16, but {type(policy.causal).__name__} stores its weights in another form "
            f"than it trains them ({wrong[:3]}); nothing was loaded. Set training.policy_dtype=float32"
        )


def memory_sha256(policy: PolicyModel, world: World, rounded: bool = False) -> str:
    """Return the digest that saving would, without writing: for weights between two updates of one batch."""
    if policy.adapter:
        values = _gather(adapters.tensors(policy.causal), world)
        return str(world.broadcast(policy.adapter.sha256_of(values) if world.rank == 0 else None))
    if rounded:
        weights, causal = own_tensors(policy.causal), policy.causal
        return weights_digest(write_shards(weights, "model", None, world, dtype=torch.bfloat16, causal=causal))
    weights = _gather(own_tensors(policy.causal), world)
    causal = converting_model(policy.causal)
    parts = [stored_parts(causal, name, tensor) for name, tensor in weights.items()]
    arrays = {name: tensor.numpy() for each in parts for name, tensor in each.items()}
    digest = tensors_sha256(arrays) if world.rank == 0 else None
    return str(world.broadcast(digest))


def load_optimizer(policy: PolicyModel, optimizer: Optimizer, directory: Path) -> None:
    """Fill a new optimizer with the state beside the weights.

    Raises NoOptimizerState when there is none, LearnerError when it does not fit the model or is another
    optimizer's.
    """
    from safetensors import safe_open

    paths = sorted(directory.glob(f"{OPTIMIZER_PREFIX}*.safetensors"))
    if not paths:
        raise NoOptimizerState(
            f"{directory} holds no {OPTIMIZER_FILE}: load the last policy that has it and train the recorded batches "
            "again, or ask for a fresh optimizer"
        )
    files = {name: file for path in paths for file in [safe_open(path, "pt")] for name in file.keys()}  # noqa: SIM118
    masters = {MASTER + name for _, name, _ in trained_parameters(policy, optimizer)}
    wanted = moment_names(policy, optimizer) | (masters if masters & files.keys() else set())
    if files.keys() != wanted:
        raise LearnerError(
            f"{paths[0]} does not fit the model and its optimizer: differs in {sorted(files.keys() ^ wanted)[:4]}"
        )
    fill_moments(policy, optimizer, lambda name: files[name].get_tensor(name))
    if masters & files.keys():
        _fill_masters(policy, optimizer, lambda name: files[MASTER + name].get_tensor(MASTER + name))


@torch.no_grad()
def _fill_masters(policy: PolicyModel, optimizer: Optimizer, stored: Callable[[str], Tensor]) -> None:
    """Give parameters, which hold the published weights, their float32 values.

    What was published counts: a value that would be rounded to another one stays as published. There are such only
    where weights were trained again on other kernels.
    """
    for _, name, parameter in trained_parameters(policy, optimizer):
        exact = like(stored(name), parameter)
        parameter.copy_(torch.where(exact.to(torch.bfloat16) == parameter, exact, parameter))


def moment_names(policy: PolicyModel, optimizer: Optimizer) -> set[str]:
    """Return the names of all tensors of optimizer state once a step has been made."""
    names = {f"{moment}.{name}" for part, name, _ in trained_parameters(policy, optimizer) for moment in part.moments}
    return names | ({STEP} if any(part.counts_steps for part in optimizer.parts) else set())


def moment_tensors(policy: PolicyModel, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer state by name, sharded as it is. All parameters have made the same number of steps."""
    state: dict[str, Tensor] = {}
    for part, name, parameter in trained_parameters(policy, optimizer):
        own = part.inner.state[parameter]
        state |= {f"{moment}.{name}": own[moment] for moment in part.moments}
        if part.counts_steps:
            state[STEP] = own[STEP]
    return state


def fill_moments(policy: PolicyModel, optimizer: Optimizer, stored: Callable[[str], Tensor]) -> None:
    """Fill an optimizer without state from the unsharded tensors that `stored` returns by name."""
    for part, name, parameter in trained_parameters(policy, optimizer):
        # Copies: a tensor that was read is a view of the file, and a step counter shared by all parameters would be
        # raised once for each of them.
        state = {moment: like(stored(f"{moment}.{name}").clone(), parameter) for moment in part.moments}
        if part.counts_steps:
            state[STEP] = stored(STEP).clone().to(parameter.device)
        if state:
            part.inner.state[parameter] = state


def trained_parameters(policy: PolicyModel, optimizer: Optimizer) -> Iterator[tuple[OptimizerPart, str, nn.Parameter]]:
    """Yield what is trained, by name, with the part of the optimizer that updates it."""
    named = {id(parameter): name for name, parameter in policy.causal.named_parameters()}
    for part in optimizer.parts:
        for parameter in part.parameters():
            yield part, named[id(parameter)], parameter


def _gather(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return whole tensors on the CPU, on rank 0; nothing elsewhere, so that no other rank holds the model."""
    gathered = {}
    for name, tensor in tensors.items():
        # A collective: every rank takes part, although only the first keeps the result.
        full = whole(tensor.detach())
        if world.rank == 0:
            gathered[name] = full.cpu()
    return gathered


def _sync(directory: Path) -> None:
    # The files, their entries in the directory, and the entry of the directory itself.
    for path in (*directory.iterdir(), directory, directory.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
