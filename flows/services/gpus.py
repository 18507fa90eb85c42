"""GPUs by name and memory: those that are known, and those of this machine."""

import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError

HARDWARE: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("hardware.toml").read_text("utf-8"))
"""GPUs by their memory, and models of the hub by their widths."""
GPUS: dict[str, int] = HARDWARE["gpus"]
"""Memory of GPUs in MiB."""
GIB, MIB = 1 << 30, 1 << 20
UNPLANNED = 0.05
"""Share of a GPU that no plan takes: for a desktop, other libraries, memory in pieces, and estimates that are low."""
FP8_CAPABILITY = 8.9
"""Compute capability of the first GPUs with products of 8 bits: Ada; Hopper and Blackwell have more."""
QUERY = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Gpu:
    """A GPU by what it can hold."""

    name: str
    total: int
    """Bytes."""

    @property
    def usable(self) -> int:
        """Bytes that a plan may take."""
        return int(self.total * (1 - UNPLANNED))


def parse_gpu(text: str) -> Gpu:
    """Return the GPU that a text names: one of GPUS, or its memory such as `80GiB`; raises ConfigError for another."""
    by_name = {name.lower(): name for name in GPUS}
    if name := by_name.get(text.lower().replace(" ", "-")):
        return Gpu(name, GPUS[name] * MIB)
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gib|gb|g)?", text.lower()):
        return Gpu(f"a GPU of {match[1]} GiB", int(float(match[1]) * GIB))
    raise ConfigError(
        f"gpu: {text!r} is no GPU that is known here: give one of {', '.join(GPUS)}, or its memory, as 80GiB"
    )


def gpus(*users: str) -> list[Gpu]:
    """Return the GPUs of this machine that nvidia-smi names, of those that its users see.

    Each user is a text as CUDA_VISIBLE_DEVICES has it; an empty one sees what this process sees. The list is empty
    where nvidia-smi does not know one of them, such as a part of a GPU (MIG).
    """
    seen = [user or os.environ.get("CUDA_VISIBLE_DEVICES", "") for user in users or ("",)]
    only = [f"--id={','.join(dict.fromkeys(','.join(seen).split(',')))}"] if all(seen) else []
    try:
        done = subprocess.run([*QUERY, *only], capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError):
        return []
    lines = (line.rpartition(",") for line in done.stdout.splitlines() if line.strip())
    return [Gpu(name.strip(), int(total) * MIB) for name, _, total in lines if total.strip().isdigit()]


def compute_capability() -> float | None:
    """Return the least compute capability of this machine's GPUs; None where nvidia-smi does not say it."""
    query = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return min(map(float, done.stdout.split()), default=None)
    except (subprocess.SubprocessError, OSError, ValueError):
        return None


def smallest_gpu(*users: str) -> Gpu | None:
    """Return the GPU with the least memory of those that `gpus` returns; None where there is none."""
    return min(gpus(*users), key=lambda gpu: gpu.total, default=None)
