"""Exact quantiles of numbers that come in parts, more than fit into memory."""

from collections.abc import Iterator, Sequence
from tempfile import SpooledTemporaryFile

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

MOST_IN_MEMORY = 1 << 27
"""Bytes of numbers that stay in memory; what is beyond goes to a temporary file."""
DIGITS = 16
"""Bits of the numbers that a pass over the file decides."""


class Quantiles:
    """The numbers so far, none below zero."""

    def __init__(self, most_in_memory: int = MOST_IN_MEMORY) -> None:
        self._most = most_in_memory
        self._count = 0
        self._file = SpooledTemporaryFile(max_size=most_in_memory)  # noqa: SIM115  it is gone with this object

    def add(self, values: Values) -> None:
        """Take more numbers."""
        self._count += len(values)
        self._file.write(np.ascontiguousarray(values).data)

    def at(self, quantiles: Sequence[float]) -> list[float] | None:
        """Return what `numpy.quantile` returns of all numbers; None where there are none."""
        if not self._count:
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            if 8 * self._count <= self._most:
                return list(np.quantile(next(self._parts()), quantiles).tolist())
            if any(np.isnan(part).any() for part in self._parts()):
                return [float("nan")] * len(quantiles)
            places = (self._count - 1) * np.asarray(quantiles)
            below = np.floor(places).astype(int).tolist()
            wanted = {min(each, self._count - 1) for place in below for each in (place, place + 1)}
            values = self._order_statistics(wanted)
            # Between two neighbours numpy interpolates as between two numbers alone.
            pairs = [[values[place], values[min(place + 1, self._count - 1)]] for place in below]
            return [float(np.quantile(pair, at % 1)) for pair, at in zip(pairs, places.tolist(), strict=True)]

    def _parts(self) -> Iterator[Values]:
        self._file.seek(0)
        while data := self._file.read(self._most // 8 * 8 or 8):
            yield np.frombuffer(data, np.float64)

    def _order_statistics(self, places: set[int]) -> dict[int, float]:
        """Return the numbers that stand at some places once all are sorted."""
        # Bits of numbers that are not negative are sorted as the numbers are. The first bits are found first.
        first: dict[int, tuple[int, int]] = dict.fromkeys(places, (0, 0))
        for shift in range(64 - DIGITS, -1, -DIGITS):
            counts = {prefix: np.zeros(1 << DIGITS, np.int64) for prefix, _ in first.values()}
            for part in self._parts():
                bits = part.view(np.uint64)
                for prefix, count in counts.items():
                    own = bits if shift == 64 - DIGITS else bits[bits >> np.uint64(shift + DIGITS) == prefix]
                    digits = (own >> np.uint64(shift)).astype(np.int64) & ((1 << DIGITS) - 1)
                    count += np.bincount(digits, minlength=1 << DIGITS)
            for place, (prefix, skipped) in first.items():
                ends = skipped + np.cumsum(counts[prefix])
                digit = int(np.searchsorted(ends, place, side="right"))
                first[place] = (prefix << DIGITS) | digit, skipped if digit == 0 else int(ends[digit - 1])
        return {place: float(np.array(prefix, np.uint64).view(np.float64)) for place, (prefix, _) in first.items()}
