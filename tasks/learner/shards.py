"""Writes tensors as safetensors files, by all ranks side by side and several threads of each.

Which tensors share a file follows from their names and sizes alone: any number of ranks writes the same bytes. The
SHA-256 of a file is computed once, of what is in memory, and nobody has to read the file for it.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from storage.refs import File
from tasks.learner.digest import DIGEST_KIND, INDEX_FILE
from tasks.learner.distributed import World, whole

SHARD_BYTES = 1 << 28
"""A file takes tensors up to this size, or one that is larger: 0.6B parameters in bfloat16 are five files."""
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
) -> tuple[File, ...]:
    """Write tensors, sharded as they are, into the files `prefix-NUMBER-of-COUNT.safetensors`; return all of these.

    All ranks call this together; each file is written and synced to disk by one of them. With `dtype` floating-point
    values are rounded to it. Without a directory nothing is written: for the digests of what would be. `beat` is
    called after each file.
    """
    layout = file_layout(tensors, prefix, dtype)
    own: list[Future[File]] = []
    with ThreadPoolExecutor(WRITERS, thread_name_prefix="write") as threads:
        for number, (name, members) in enumerate(layout.items()):
            mine = number % world.size == world.rank
            content = {each: full.cpu().contiguous() for each, full in _gather_whole(tensors, members, dtype) if mine}
            if mine:
                if len(own) >= WRITERS:  # not more in memory than is being written
                    own[-WRITERS].result()
                own.append(threads.submit(_write_file, name, content, directory))
            beat()
        files = [file for part in world.gather([each.result() for each in own]) for file in part]
    return tuple(sorted(files, key=lambda file: file.path))


def file_layout(tensors: Mapping[str, Tensor], prefix: str, dtype: torch.dtype | None) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, in order of name."""
    groups: list[list[str]] = []
    room = 0
    for name in sorted(tensors):
        size = tensors[name].numel() * _stored_type(tensors[name], dtype).itemsize
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


def _stored_type(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype and tensor.is_floating_point() else tensor.dtype


def _gather_whole(
    tensors: Mapping[str, Tensor], names: Sequence[str], dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors, rounded before they are gathered: a collective, in which every rank takes part."""
    for name in names:
        tensor = tensors[name].detach()
        yield name, whole(tensor.to(_stored_type(tensor, dtype)))


def _write_file(name: str, content: Mapping[str, Tensor], directory: Path | None) -> File:
    data = save(dict(content), {"format": "pt"})
    if directory:
        with open(directory / name, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    return File(name, len(data), hashlib.sha256(data).hexdigest())
