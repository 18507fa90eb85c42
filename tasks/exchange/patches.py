"""Patches: the difference between two JSON values, so that what a trace's columns do not hold is kept beside them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

SET, REMOVE, INSIDE = "set", "remove", "inside"
"""A patch is `{"set": value}`, or `{"remove": [names], "inside": {name or place: patch}}`; None is no difference."""
Patch = dict[str, Any]


def difference(old: Any, new: Any) -> Patch | None:
    """Return the patch that makes `new` of `old`, or None where they are equal; 1, 1.0 and true are three values."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = {name: (old.get(name, ...), value) for name, value in new.items()}
        return _inside(pairs, [name for name in old if name not in new])
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        found = _inside({str(place): pair for place, pair in enumerate(zip(old, new, strict=True))}, [])
        # A list that differs in most places is shorter as a whole.
        return found if found is None or len(found[INSIDE]) * 2 < len(new) or not _plain(new) else {SET: new}
    return None if _same(old, new) else {SET: new}


def patched(old: Any, patch: Patch | None) -> Any:
    """Return what `patch` makes of `old`, which is left as it is."""
    if patch is None:
        return old
    if SET in patch:
        return patch[SET]
    inside = patch.get(INSIDE, {})
    if isinstance(old, list):
        return [patched(value, inside.get(str(place))) for place, value in enumerate(old)]
    kept = {name: value for name, value in old.items() if name not in patch.get(REMOVE, ())}
    return kept | {name: patched(kept.get(name), one) for name, one in inside.items()}


def shortest(values: Any) -> list[float]:
    """Return float32 values as the shortest decimals that are these values: 0.1, not 0.10000000149011612."""
    return [float(str(value)) for value in np.asarray(values, np.float32)]


def _inside(pairs: Mapping[str, tuple[Any, Any]], removed: list[str]) -> Patch | None:
    inside = {}
    for name, (old, new) in pairs.items():
        found = {SET: new} if old is ... else difference(old, new)
        if found is not None:
            inside[name] = found
    if not inside and not removed:
        return None
    return {INSIDE: inside} | ({REMOVE: removed} if removed else {})


def _plain(values: list[Any]) -> bool:
    return not any(isinstance(value, (dict, list)) for value in values)


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, float) and isinstance(new, float) and old != old and new != new:
        return True
    return type(old) is type(new) and bool(old == new)
