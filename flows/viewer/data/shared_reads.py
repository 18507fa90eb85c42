"""Reading what is new alone: many things that are read in one look are kept one by one, each under its own keys."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from flows.viewer.library import Library

Name = TypeVar("Name", bound=Hashable)
Value = TypeVar("Value")


def each_once(
    library: Library, purpose: Hashable, names: Sequence[Name], read: Callable[[list[Name]], Mapping[Name, Value]]
) -> dict[Name, Value]:
    """Return what belongs to each name; `read` is asked once, for all names at once of which nothing is kept.

    Names hold what names the rows that the values are derived from (`storage.read.lineage.marks`). A name that `read`
    leaves out has no entry.
    """
    held = {name: library.held((purpose, name)) for name in names}
    new = [name for name, value in held.items() if value is None]
    made = read(new) if new else {}
    for name in made:
        held[name] = library.kept((purpose, name), partial(made.__getitem__, name))
    return {name: value for name, value in held.items() if value is not None}
