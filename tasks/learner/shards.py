"""Writes tensors as safetensors files, by all ranks side by side and several threads of each.

Which tensors share a file follows from their names and sizes alone: any number of ranks writes the same bytes. A GPU's
are copied into pinned memory, which torch keeps for later files, while earlier ones are written and hashed. The SHA-256
of a file is computed once, right after it was written; the engine's checksum shows that the file is what was in memory.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file
from torch import Tensor

from storage.refs import File
from tasks.learner.digest import DIGEST_KIND, INDEX_FILE
from tasks.learner.distributed import World, local, whole

EXPERTS = ".experts."
"""Part of the names of the matrices of experts, which are fused in memory: (experts, outputs, inputs) or the other way
round."""

SHARD_BYTES = 1 << 28
"""A file takes tensors up to this size, or one that is larger: 0.6B parameters in bfloat16 are five files."""
METADATA = {"format": "pt"}
WRITERS = 4
"""Files that a rank hashes and writes at the same time. So many of them, and their bytes, are in the host's memory."""


def write_shards(
    tensors: Mapping[str, Tensor],
    prefix: str,
    directory: Path | None,
    world: World,
    *,
    dtype: torch.dtype | None = None,
    beat: Callable[[], None] = lambda: None,
    causal: Any = None,
) -> tuple[File, ...]:
    """Write tensors, sharded as they are, into the files `prefix-NUMBER-of-COUNT.safetensors`; return all of these.

    All ranks call this together; each file is written and synced to disk by one of them. With `dtype` floating-point
    values are rounded to it. Without a directory nothing is written: for the digests of what would be. `beat` is
    called after each file. Weights of a `causal` model are written as `stored_parts`.
    """
    layout, causal = file_layout(tensors, prefix, dtype), converting_model(causal)
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    own: list[Future[File]] = []
    with ThreadPoolExecutor(WRITERS, thread_name_prefix="write") as threads:
        for number, (name, members) in enumerate(layout.items()):
            mine = number % world.size == world.rank
            # On a GPU the content is complete after `copied`: nobody computes meanwhile, so one stream is enough.
            content = {
                stored: part.contiguous().to("cpu", non_blocking=True)
                for each, full in gather_whole(tensors, members, dtype, world)
                if mine
                for stored, part in stored_parts(causal, each, full).items()
            }
            if mine:
                if len(own) >= WRITERS:  # not more in memory than is being written
                    own[-WRITERS].result()
                copied = torch.cuda.current_stream().record_event() if on_gpu else None
                own.append(threads.submit(_write_file, name, content, directory, copied))
            beat()
        files = [file for part in world.gather([each.result() for each in own]) for file in part]
    return tuple(sorted(files, key=lambda file: file.path))


def file_layout(tensors: Mapping[str, Tensor], prefix: str, dtype: torch.dtype | None) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, in order of name."""
    groups: list[list[str]] = []
    room = 0
    for name in sorted(tensors):
        size = tensors[name].numel() * stored_type(tensors[name], dtype).itemsize
        if not groups or size > room:
            groups.append([])
            room = SHARD_BYTES
        groups[-1].append(name)
        room -= size
    count = len(groups)
    return {f"{prefix}-{number:05}-of-{count:05}.safetensors": group for number, group in enumerate(groups, 1)}


def write_index(layout: Mapping[str, Sequence[str]], files: Sequence[File], directory: Path) -> None:
    """Write which file holds which tensor, as Hugging Face's loaders want it, and what the policy's digest is of."""
    content = {
        "metadata": {DIGEST_KIND: "files", "total_size": sum(file.size for file in files)},
        "weight_map": {name: file for file, names in layout.items() for name in names},
    }
    (directory / INDEX_FILE).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def stored_parts(causal: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return what a weight of a model in memory, whole, is in files and engines, by name: experts are apart there.

    These are views. transformers fuses matrices when it reads a model, and has the way back.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return {name: tensor} if causal is None else dict(revert_weight_conversion(causal, {name: tensor}))


def converting_model(causal: Any) -> Any:
    """Return a model if some of its weights have another form in files, else None; it walks through all modules."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return causal if causal is not None and get_model_conversion_mapping(causal, add_legacy=False) else None


def stored_shapes(causal: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return `stored_parts` of all tensors, sharded as they are, without memory: for names, shapes and types."""
    causal = converting_model(causal)
    empty = {
        name: torch.empty(tensor.shape, dtype=stored_type(tensor, dtype), device="meta")
        for name, tensor in tensors.items()
    }
    return {stored: part for name, each in empty.items() for stored, part in stored_parts(causal, name, each).items()}


def stored_type(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype and tensor.is_floating_point() else tensor.dtype


def gather_whole(
    tensors: Mapping[str, Tensor], names: Sequence[str], dtype: torch.dtype | None, world: World
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors, rounded before they are gathered: a collective, in which every rank takes part."""
    for name in names:
        tensor = tensors[name].detach()
        rounded = tensor.to(stored_type(tensor, dtype))
        yield name, local(rounded) if world.size == 1 else whole(rounded)


def _write_file(name: str, content: dict[str, Tensor], directory: Path | None, copied: torch.cuda.Event | None) -> File:
    if copied:
        copied.synchronize()
    if directory is None:
        data = save(content, METADATA)
        return File(name, len(data), hashlib.sha256(data).hexdigest())
    save_file(content, directory / name, METADATA)
    with open(directory / name, "rb") as stream:
        os.fsync(stream.fileno())
        digest = hashlib.file_digest(stream, "sha256")
        return File(name, stream.tell(), digest.hexdigest())
