"""Reading what is new alone: many things that are read in one look are kept one by one, each under its own keys."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from flows.viewer.library import Library

Name = TypeVar("Name", bound=Hashable)
Value = TypeVar("Value")


class _NotKept(LookupError):
    """Nothing is kept under a name."""


def each_once(
    library: Library, purpose: Hashable, names: Sequence[Name], read: Callable[[list[Name]], Mapping[Name, Value]]
) -> dict[Name, Value]:
    """Return what belongs to each name; `read` is asked once, for all names at once of which nothing is kept.

    Names hold the keys of the work that the values are derived from. A name that `read` leaves out has no entry.
    """
    found: dict[Name, Value] = {}
    for name in dict.fromkeys(names):
        try:
            found[name] = library.kept((purpose, name), _nothing)
        except _NotKept:
            continue
    new = [name for name in dict.fromkeys(names) if name not in found]
    made = read(new) if new else {}
    for name, value in made.items():
        found[name] = library.kept((purpose, name), lambda value=value: value)
    return found


def _nothing() -> Any:
    raise _NotKept
