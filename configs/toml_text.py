"""Writes values as TOML, each in one line."""

import json
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any


class NoTomlForm(ValueError):
    """A value has no form in TOML."""


def toml(value: Any) -> str:
    """Return a value as TOML in one line. Raises NoTomlForm for one that TOML has no form for."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | PathLike):
        return toml_string(fspath(value))
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(str(name))} = {toml(each)}" for name, each in value.items() if each is not None)
        return f"{{ {inside} }}" if inside else "{}"
    raise NoTomlForm(f"{value!r} has no form in TOML")


def toml_string(text: str) -> str:
    """Return a text as a TOML string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else toml_string(name)
