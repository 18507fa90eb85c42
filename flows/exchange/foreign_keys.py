"""ForeignKeys: a config of another trainer, as the functions of trl.py and prime_rl.py read it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SAMPLE: list[dict[str, Any]] = [
    {
        "name": "my_data",
        "taskset": {"id": "own_data", "path": "examples.jsonl", "task": {"scoring": "my_reward:reward"}},
        "max_turns": 1,
    }
]
"""The environment of a config that names none that can be: rows of a file, and a reward function."""


class NoCounterpart(ValueError):
    """A value of another trainer has no counterpart here; the message is the reason."""


class ForeignKeys(dict[str, Any]):
    """Values by the dotted keys of a config; a key that is not set has the trainer's default, or None.

    Items of lists are numbered: `source.0.name`.
    """

    def __init__(self, tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        super().__init__(flatten(tree))
        self._tree, self._defaults = tree, defaults

    def __missing__(self, key: str) -> Any:
        return self._defaults.get(key)

    def first(self, *keys: str) -> Any:
        """Return the value of the first of `keys` that is set, else the first default of them, else None."""
        values = [self.get(key) for key in keys] + [self._defaults.get(key) for key in keys]
        return next((value for value in values if value is not None), None)

    def section(self, key: str) -> Any:
        """Return the table or list at `key`; an empty table where there is none."""
        node: Any = self._tree
        for name in key.split("."):
            node = node[int(name)] if isinstance(node, list) else node.get(name, {})
        return node


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by dotted key; items of lists of tables are numbered; empty tables count."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            yield from flatten({str(index): item for index, item in enumerate(value)}, f"{key}.")
        else:
            yield key, value


def matches(key: str, pattern: str) -> bool:
    """Return whether a dotted key is the pattern or below it; `*` in the pattern is any one part."""
    parts, expected = key.split("."), pattern.split(".")
    return len(parts) >= len(expected) and all(b in ("*", a) for a, b in zip(parts, expected, strict=False))


def quotient(total: int, size: int, text: str) -> int:
    """Return total / size. Raises NoCounterpart, with `text` between the numbers, where it is no whole number."""
    if total % size:
        raise NoCounterpart(f"{total} {text} of {size}")
    return total // size


def rename(table: Mapping[str, Any], names: Mapping[str, str], without: Sequence[str] = ()) -> dict[str, Any]:
    """Return a table with keys renamed and some left out."""
    return {names.get(key, key): value for key, value in table.items() if key not in without}
