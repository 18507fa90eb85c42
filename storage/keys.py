"""Keys: the name of a piece of work is a hash of everything that may change its rows."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from storage.errors import StoreError

# 128 bits: no two pieces of work of any store get one key by chance.
KEY_LENGTH = 32


def canonical_json(value: Any) -> str:
    """Spell a JSON value in its one canonical way: sorted keys, no spaces, ASCII only, floats by `repr`.

    1 and 1.0 are different values, and so are None and a missing key. Raises StoreError for anything that JSON
    does not hold exactly: NaN, infinities, sets, bytes, keys that are not strings.
    """
    _check(value, "$")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def content_key(content: Any) -> str:
    """Name content by its hash: 32 hex characters of the SHA-256 of bytes, or of a value's canonical JSON."""
    data = content if isinstance(content, bytes) else canonical_json(content).encode()
    return sha256(data)[:KEY_LENGTH]


def sha256(data: bytes) -> str:
    """Return the SHA-256 of bytes in hex."""
    return hashlib.sha256(data).hexdigest()


def work_key(stage: str, version: int, step: int, section: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """Name a piece of work: 32 hex characters over stage, its version, step, own config section and input keys."""
    return content_key(
        {"stage": stage, "version": version, "step": step, "section": dict(section), "inputs": dict(inputs)}
    )


def _check(value: Any, path: str) -> None:
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise _refusal(f"the key {name!r} is not a string", path)
            _check(item, f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise _refusal(f"{value!r} is not a finite number", path)
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        raise _refusal(f"a {type(value).__name__} has no canonical spelling", path)


def _refusal(what: str, path: str) -> StoreError:
    return StoreError(what, path, "nothing was written", "use null, booleans, numbers, strings, lists and objects")
