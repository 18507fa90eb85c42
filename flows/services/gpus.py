"""GPUs by name and memory: those that are known, and those of this machine."""

import os
import re
import subprocess
import tomllib
from collections.abc import Sequence
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
    lines = (line.rpartition(",") for line in _query("name,memory.total", users))
    return [Gpu(name.strip(), int(total) * MIB) for name, _, total in lines if total.strip().isdigit()]


def compute_capability(*users: str) -> float | None:
    """Return the least compute capability of the GPUs that users see, see `gpus`; None where it is not known."""
    try:
        return min(map(float, _query("compute_cap", users)), default=None)
    except ValueError:
        return None


def _query(values: str, users: Sequence[str]) -> list[str]:
    """Return a line of values for each GPU that users see; none where nvidia-smi does not know one."""
    seen = [user or os.environ.get("CUDA_VISIBLE_DEVICES", "") for user in users or ("",)]
    only = [f"--id={','.join(dict.fromkeys(','.join(seen).split(',')))}"] if all(seen) else []
    command = ("nvidia-smi", f"--query-gpu={values}", "--format=csv,noheader,nounits", *only)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()]


def smallest_gpu(*users: str) -> Gpu | None:
    """Return the GPU with the least memory of those that `gpus` returns; None where there is none."""
    return min(gpus(*users), key=lambda gpu: gpu.total, default=None)
