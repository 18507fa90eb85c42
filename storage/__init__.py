"""Where things live: Arrow tables in Delta Lake, weights in directories, one ledger that says what is finished.

In a notebook, `storage.open(root)` gives every table of a store as a polars LazyFrame.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage.read.frames import open as open


def __getattr__(name: str) -> Any:
    """Import the door for notebooks when it is asked for, so that `import storage` stays light."""
    if name != "open":
        raise AttributeError(f"module 'storage' has no attribute {name!r}")
    from storage.read import frames

    return frames.open
