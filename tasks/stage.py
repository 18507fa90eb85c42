"""What a stage is: a pure function of tables, with what it reads, writes and depends on declared beside it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pyarrow as pa

Tables = Mapping[str, pa.Table]


@dataclass(frozen=True)
class Stage:
    """A pure function from named tables to named tables, and everything that its key is made of.

    `function` is called as `function(tables, config, **needs)`: `tables` holds exactly `reads`, `config` is a view of
    the declared `sections`, and each name in `needs` (for example `step`) is handed over as a keyword.
    """

    name: str
    """The stage's name; tables, ledger and task runs carry it."""
    version: int
    """Raised when the meaning of the stage's rows changes."""
    reads: tuple[str, ...]
    """Tables that go in."""
    writes: tuple[str, ...]
    """Tables that come out."""
    sections: tuple[str, ...]
    """Config sections that the function may read; they are in the key."""
    function: Callable[..., Tables]
    """The pure function."""
    needs: tuple[str, ...] = ()
    """Keywords that the function takes beside tables and config."""
