"""Bounds and bounded_memory: how much a query may cost, for `stagecoach sql` and for conditions of searches.

DuckDB's `memory_limit` counts its buffers, not the values that an expression makes, so a limit of the process counts
the rest. Standard library only: the process of a condition starts with it (`flows.queries.condition_process`).
"""

import math
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# A question may come from a page or a script: all that it can reach are the tables handed to it.
SANDBOX = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    # Else `from name` would read a variable of this program.
    "python_enable_replacements": "false",
    # Else it would read and write files below `.tmp` of the working directory.
    "temp_directory": "",
}


@dataclass(frozen=True)
class Bounds:
    """What a question may cost, before it is ended."""

    rows: int = 10_000_000
    """Rows of the answer."""
    memory_gib: float = 4.0
    """Memory of the database, and what the process may take beside what it has, in GiB."""
    seconds: float = 600.0

    @property
    def memory(self) -> int:
        """The memory in bytes, and no less than the database starts with."""
        return max(int(self.memory_gib * 2**30), LEAST_MEMORY)


LEAST_MEMORY = 2**24
SLACK_BYTES = 2**30
"""What the process may take beyond the memory of the database, for threads and for reading the tables."""
DEFAULT = Bounds()
OF_MACHINE = Bounds(memory_gib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, seconds=math.inf)
"""For the condition of a command that names rollouts to work on, such as an export: what the machine has."""


@contextmanager
def bounded_memory(bounds: Bounds) -> Iterator[None]:
    """Within the block the process gets no more memory than that: the database counts its tables and not its texts."""
    used = int(re.findall(r"VmData:\s+([0-9]+) kB", Path("/proc/self/status").read_text())[0]) * 1024
    before = resource.getrlimit(resource.RLIMIT_DATA)
    most = used + bounds.memory + SLACK_BYTES
    # A stricter limit, of whoever started this, stands.
    soft = most if before[0] == resource.RLIM_INFINITY else min(most, before[0])
    resource.setrlimit(resource.RLIMIT_DATA, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
