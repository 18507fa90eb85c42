"""Exact quantiles of numbers that come in parts, more than fit into memory."""

from collections.abc import Sequence
from tempfile import SpooledTemporaryFile

import numpy as np
import numpy.typing as npt

MOST_IN_MEMORY = 1 << 26
"""Bytes of numbers that stay in memory; what is beyond goes to a temporary file."""


class Quantiles:
    """The numbers so far."""

    def __init__(self, most_in_memory: int = MOST_IN_MEMORY) -> None:
        self._most_in_memory = most_in_memory
        self._file = SpooledTemporaryFile(max_size=most_in_memory)  # noqa: SIM115  it is gone with this object

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Take more numbers."""
        self._file.write(np.ascontiguousarray(values).data)

    def at(self, quantiles: Sequence[float]) -> list[float] | None:
        """Return what `numpy.quantile` returns of all numbers; None where there are none."""
        if not (size := self._file.tell()):
            return None
        self._file.seek(0)
        if is_small := size <= self._most_in_memory:
            numbers = np.frombuffer(self._file.read(), np.float64)
        else:  # in the file itself, of which the system keeps in memory what there is room for
            numbers = np.memmap(self._file, np.float64, "r+")
        with np.errstate(over="ignore", invalid="ignore"):
            return list(np.quantile(numbers, quantiles, overwrite_input=not is_small).tolist())
