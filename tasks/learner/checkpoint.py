"""A policy on disk: a Hugging Face directory, optimizer state beside the weights, all of it synced.

Weights are always stored in float32, as they are trained: rounding them would make a resumed run another run. An engine
casts them when it loads.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from tasks.learner import adapters, moments
from tasks.learner.digest import OPTIMIZER_FILE, tensors_sha256, weights_sha256
from tasks.learner.distributed import World, whole
from tasks.learner.errors import LearnerError, NoOptimizerState
from tasks.learner.model import PolicyModel
from tasks.learner.optimizer import Optimizer

COMPANION_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}


def companions(directory: Path) -> dict[str, bytes]:
    """Return the files that a policy hands down to its descendants: config, tokenizer, chat template.

    Held in memory, because a published directory may be moved or evicted. The config's dtype becomes float32.
    """
    files = {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.is_file() and path.suffix in COMPANION_SUFFIXES and not path.name.endswith(".index.json")
    }
    config = json.loads(files["config.json"])
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
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
    state = None if optimizer is None else _gather(moments.tensors(policy, optimizer), world)
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


def memory_sha256(policy: PolicyModel, world: World) -> str:
    """Return the digest that `save_policy` would, without writing: for weights between two updates of one batch."""
    if policy.adapter:
        values = _gather(adapters.tensors(policy.causal), world)
        return str(world.broadcast(policy.adapter.sha256_of(values) if world.rank == 0 else None))
    tied = set(policy.causal.state_dict()) - {name for name, _ in policy.causal.named_parameters()}
    weights = _gather({name: tensor for name, tensor in policy.causal.state_dict().items() if name not in tied}, world)
    digest = tensors_sha256({name: tensor.numpy() for name, tensor in weights.items()}) if world.rank == 0 else None
    return str(world.broadcast(digest))


def load_optimizer(policy: PolicyModel, optimizer: Optimizer, directory: Path) -> None:
    """Fill a new optimizer with the state beside the weights.

    Raises NoOptimizerState when there is none, LearnerError when it does not fit the model or is another
    optimizer's.
    """
    from safetensors import safe_open

    path = directory / OPTIMIZER_FILE
    if not path.is_file():
        raise NoOptimizerState(
            f"{directory} holds no {OPTIMIZER_FILE}: load the last policy that has it and train the recorded batches "
            "again, or ask for a fresh optimizer"
        )
    wanted = moments.names(policy, optimizer)
    with safe_open(path, "pt") as stored:
        found = set(stored.keys())
        if found != wanted:
            raise LearnerError(
                f"{path} does not fit the model and its optimizer: differs in {sorted(found ^ wanted)[:4]}"
            )
        moments.fill(policy, optimizer, stored.get_tensor)


def _gather(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return whole tensors on the CPU, on rank 0; nothing elsewhere, so that no other rank holds the model."""
    gathered = {}
    for name, tensor in tensors.items():
        full = whole(tensor.detach())
        if world.rank == 0:
            gathered[name] = full.cpu()
    return gathered


def _sync(directory: Path) -> None:
    for path in (*directory.iterdir(), directory, directory.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
