"""Writes values as TOML, each in one line."""

import json
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any


def toml(value: Any) -> str:
    """Return a value as TOML in one line. Raises ValueError for one that TOML has no form for."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | PathLike):
        return json.dumps(fspath(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(str(name))} = {toml(each)}" for name, each in value.items() if each is not None)
        return f"{{ {inside} }}" if inside else "{}"
    raise ValueError(f"{value!r} has no form in TOML")


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else toml(name)
