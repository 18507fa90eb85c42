"""Weights: about how many bytes of memory something takes, with all that it holds."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

SMALL = 1024
"""Bytes that anything which is kept counts for beside its own: its name and its place."""
MOST = 2000
"""Items of a long list or dictionary that are looked at, evenly spread; the others are taken to be like them."""
_TABLES = (pa.Table, pa.RecordBatch, pa.Array, pa.ChunkedArray, np.ndarray)
_WITHOUT_ITEMS = (str, bytes, bytearray, int, float, complex, type)


def weight(value: Any) -> int:
    """Return about how many bytes something takes: tables as they say, all else with what it holds, however deep.

    What is held twice in it counts once. Of long lists and dictionaries some items alone are weighed.
    """
    seen: set[int] = set()
    total, waiting = 0.0, [(value, 1.0)]
    while waiting:
        each, times = waiting.pop()
        if each is None or isinstance(each, bool) or id(each) in seen:
            continue
        seen.add(id(each))
        total += times * _own(each)
        waiting += [(item, times * like) for item, like in _inside(each)]
    return SMALL + round(total)


def _own(value: Any) -> int:
    if isinstance(value, (pl.DataFrame, pl.Series)):
        return int(value.estimated_size())
    return int(value.nbytes) if isinstance(value, _TABLES) else sys.getsizeof(value)


def _inside(value: Any) -> Iterator[tuple[Any, float]]:
    """Yield what a value holds, and for how many items like it each stands."""
    if isinstance(value, (pl.DataFrame, pl.Series, *_TABLES, *_WITHOUT_ITEMS)):
        return
    if isinstance(value, (Mapping, Sequence, set, frozenset)):
        apart = -(-len(value) // MOST) or 1
        like = len(value) / -(-len(value) // apart) if value else 1.0
        for items in (value.keys(), value.values()) if isinstance(value, Mapping) else (value,):
            yield from ((item, like) for item in islice(items, 0, None, apart))
        return
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    yield getattr(value, "__dict__", None), 1.0
    yield from ((getattr(value, name, None), 1.0) for name in slots)
